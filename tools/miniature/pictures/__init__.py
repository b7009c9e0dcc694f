"""The tiny models for images."""
