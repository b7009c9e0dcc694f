"""Stages of a model that another machine runs: what goes over the line, and who asks. Its other end: `fleet/serve.py`.

May import `engine`, for what travels between stages.
"""
