"""The only files that know ComfyUI: node classes, memory, previews, routes. May import `weights`,
`graphs`, `nodes` and `pipeline`.
"""
