"""Files and graphs as people bring them, with the right result of each from another program."""
