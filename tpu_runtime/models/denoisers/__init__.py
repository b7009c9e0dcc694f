"""Denoisers as data: sizes, how weights are cut, placed and called by their makers. May import `programs`."""
