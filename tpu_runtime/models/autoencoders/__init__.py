"""Autoencoders of the families, split over chips: latents to frames and images to latents. May import `programs`."""
