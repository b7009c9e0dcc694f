"""Runs workflows without ComfyUI: file formats, a terminal host, and replacements for core nodes.

May import `graphs`, `nodes` and the runtime.
"""
