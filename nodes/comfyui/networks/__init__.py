"""The calls of ComfyUI's samplers to its networks, in our terms: rows of guidance, inputs of each model, and checks.

May import the runtime.
"""
