"""Workflows as graphs of nodes.

Covers the generations of a workflow, upgrades of older packs' workflows, runs with tiny models, and provenance. May
import `nodes` and `api`.
"""
