"""What a file of weights holds: numbers or codes, in whose layout, under whose names. May import the leaves."""
