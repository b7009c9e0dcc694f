"""The Pallas kernels for TPUs, each next to its plain reference in float32, and when a kernel refuses a call.

May import `sharding`, for the facts of chips.
"""
