"""Turns a compiled program's text into seconds; knows no model. May import `programs.program` and the leaves."""
