"""Pallas kernels for TPUs, each next to a plain float32 reference, and the reasons why a kernel cannot compute a call.

May import `sharding`: its table of chips.
"""
