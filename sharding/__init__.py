"""Mesh, logical axes and parameter rules, and the table of chips. Does not import models or torch.

May import nothing of the pack.
"""
