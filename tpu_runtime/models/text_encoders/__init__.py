"""Text encoders of the families: conversation, tokens, states. May import nothing of `models`."""
