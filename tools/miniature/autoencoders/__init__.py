"""The autoencoders of tiny models, and their shared parts."""
