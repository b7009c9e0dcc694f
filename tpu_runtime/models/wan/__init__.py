"""Wan 2.1 and 2.2, text and image to video. May import `models/common`, `formats`, `programs` and the leaves."""
