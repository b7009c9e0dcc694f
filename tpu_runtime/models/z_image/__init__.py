"""Z-Image, text to image. May import `models/common`, `formats`, `programs` and the leaves."""
