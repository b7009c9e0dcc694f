"""Training of tiny models (`tools/train_miniature.py`): data, shared parts, and one file per family."""
