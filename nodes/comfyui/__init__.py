"""The only files that know ComfyUI: node classes, memory, previews and routes.

May import `weights`, `graphs`, `nodes` and `api`.
"""
