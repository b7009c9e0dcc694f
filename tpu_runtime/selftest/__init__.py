"""Whether this machine computes what it should: its chips, the kernels, every family's miniature against float32 on the
host. May import `engine` and what that may.
"""
