"""The only files that know ComfyUI: node classes, memory, previews, routes. May import `graphs`, `nodes` and
`pipeline`.
"""
