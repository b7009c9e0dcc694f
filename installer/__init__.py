"""The implementation of `setup.py`. Standard library only, and not part of the pack: only setup.py imports it.

`newer_python` must run on Python 3.7 and newer, the rest on 3.11 and newer.
"""
