"""Runs workflows without ComfyUI: the file formats, a terminal host, stand-ins for core nodes. May import `graphs` and
`nodes`.
"""
