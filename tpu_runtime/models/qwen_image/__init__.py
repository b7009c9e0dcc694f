"""Qwen-Image and Edit, text and images to image. May import `models/common`, `formats`, `programs` and the leaves."""
