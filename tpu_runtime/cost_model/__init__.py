"""Cost model: seconds of a compiled program, from its text alone. May import `programs.program` and the leaves."""
