"""Exact attention: one entry point (`api.attention`), its policy, the sequence-parallel form, and what queries and keys
go through before.

May import `kernels` and `sharding`.
"""
