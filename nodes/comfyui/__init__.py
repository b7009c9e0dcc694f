"""The only files that know ComfyUI: node classes, memory, previews and routes.

May import `networks`, `weights`, `graphs`, `nodes` and the runtime.
"""
