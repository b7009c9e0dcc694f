"""What is kept on disk between runs, and whom it is taken from. May import the leaves."""
