"""Upstream modules as pure, compiled functions.

May import the leaves of `tpu_runtime`, `attention`, `kernels` and `sharding`.
"""
