"""Qwen-Image, text to image, and Edit, images to image. May import `models/common`, `formats`, `programs` and the leaves."""
