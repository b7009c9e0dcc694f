"""Users' files and graphs, with the expected result of each from another program."""
