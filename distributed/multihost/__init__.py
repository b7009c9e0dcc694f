"""Several hosts that run one engine: their ranks, the protocol between them, and how the loss of a host is handled.

May import `checkpoints` and what `checkpoints` may import.
"""
