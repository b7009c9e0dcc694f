"""Files that are kept on disk between runs, and checks of their ownership. May import the leaves and `model_spec`."""
