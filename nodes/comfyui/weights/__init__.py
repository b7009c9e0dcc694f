"""The weights of ComfyUI's own MODEL, CLIP and VAE: read when core computes with them, written when it saves them.

May import the runtime.
"""
