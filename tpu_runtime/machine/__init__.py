"""What this machine does without: kernels and compiler options that it refused, that halted its chips, or that its
owner switched off. Programs are built by it and keyed by it. May import `kernels`, the cache and the runtime's leaves.
"""
