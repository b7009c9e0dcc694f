"""Workflows as graphs of nodes: which generations one asks for, and what becomes of one that older packs saved. May
import `nodes` and `pipeline`.
"""
