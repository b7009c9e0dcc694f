"""The mesh, the logical axes and the parameter rules. Knows no model and no torch.

May import nothing of the pack.
"""
