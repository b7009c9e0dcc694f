"""Workflows as graphs of nodes: which generations one asks for, what becomes of one that older packs saved, and what
ran for a result. May import `nodes` and `pipeline`.
"""
