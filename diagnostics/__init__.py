"""Checks and measurements of a machine: the self-test, timed programs, and comparison of a step's variants.

May import `nodes` and the runtime. The commands in `cli/` print the results.
"""
