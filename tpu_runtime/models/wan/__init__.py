"""The Wan family: shared parts in `wan`, then one file per model. May import `programs` and the leaves."""
