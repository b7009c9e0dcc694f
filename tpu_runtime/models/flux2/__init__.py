"""FLUX.2 dev and klein, text and images to image. May import `models/common`, `formats`, `programs` and the leaves."""
