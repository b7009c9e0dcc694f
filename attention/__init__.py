"""Exact attention: one entry point (`api.attention`), a float32 reference, the TPU kernel, the sharded form.

May import `sharding`.
"""
