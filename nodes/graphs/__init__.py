"""Workflows as graphs of nodes: which generations one asks for, what becomes of one that older packs saved, how
to try one without its models, and what ran for a result. May import `nodes` and `pipeline`.
"""
