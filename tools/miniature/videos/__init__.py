"""The tiny models for videos."""
