"""What trains miniatures (`tools/train_miniature.py`): what they are shown, what families share, a file a family."""
