"""CogVideoX 1.5, text and image to video. May import `models/common`, `formats`, `programs` and the leaves."""
