"""Client for running a model's stages on another machine. The server is `fleet/serve.py`.

May import `engine`, whose stages pass the same values.
"""
