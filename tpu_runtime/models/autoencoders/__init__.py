"""Autoencoders of the families: latents to frames and pictures to latents, split over chips. May import `layers`."""
