"""Finding, downloading and loading of weights, and the built-in tiny checkpoints.

May import `models`, `programs` and the leaves.
"""
