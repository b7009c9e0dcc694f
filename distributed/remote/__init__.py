"""Client for running a model's stages on another machine. The server is `distributed/fleet/serve.py`.

May import `engine`, whose stages pass the same values.
"""
