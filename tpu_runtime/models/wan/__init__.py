"""The models of the Wan family: what they share, then one file each. May import `programs` and the leaves."""
