"""The weights behind ComfyUI's own MODEL, CLIP and VAE: read where core computes with them, written where it saves
them. May import `pipeline`.
"""
