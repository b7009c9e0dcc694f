"""The autoencoders of miniatures, and what these share."""
