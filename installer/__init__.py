"""What `setup.py` does. Standard library only, and no part of the pack: nothing imports it but setup.py.

`newer_python` is read by Python 3.7 and newer, the rest by 3.11.
"""
