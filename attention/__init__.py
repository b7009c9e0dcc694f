"""Exact attention: one entry point (`api.attention`), a float32 reference, the TPU kernel, the sharded form; and the
residual norms around it.

May import `sharding`.
"""
