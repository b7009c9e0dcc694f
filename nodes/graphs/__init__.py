"""Workflows as graphs of nodes: the generations a workflow runs, upgrades of older packs' workflows, runs with tiny
models, and the provenance of results. May import `nodes` and `pipeline`.
"""
