"""Text encoders of the families: conversation, tokens, states. May import `programs` and `models/common`."""
