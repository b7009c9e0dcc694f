"""This machine: its chips, and the kernels and compiler options that it cannot use.

Those were refused, halted a chip or were switched off by the owner; programs are built and keyed accordingly. May
import `kernels`, the cache and the runtime's leaves.
"""
