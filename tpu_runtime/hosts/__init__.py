"""Several hosts, one engine: who they are, what they say to each other, and how one that is gone ends. May import
`checkpoints` and what these may.
"""
