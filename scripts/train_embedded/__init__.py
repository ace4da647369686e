"""Training of the embedded model; `python scripts/train_embedded` runs `__main__.py`."""
