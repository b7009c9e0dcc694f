"""Checks that this machine computes correctly: its chips, the kernels, and every family's tiny model.

Tiny models are compared with float32 on the host. May import `engine` and what `engine` may import.
"""
