"""Attention: entry point (`api.attention`), policy, sequence parallelism, and the preparation of queries and keys.

May import `kernels` and `sharding`.
"""
