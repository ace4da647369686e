"""A cache in a folder: written by `save`, read by `load`; `docs/SAVED_CACHES.md` is the format."""
