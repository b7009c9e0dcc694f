"""The only files that know ComfyUI: node classes, memory, previews, routes. May import `nodes`, `graphs` and
`pipeline`."""
