"""Denoisers as data: sizes, sharding rules, and the key names of original checkpoints. May import `programs`.

`layers` holds the functions that several denoisers share.
"""
