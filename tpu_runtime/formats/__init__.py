"""Contents of files of weights: numbers or codes, layouts and names. May import the leaves."""
