"""From a model's config alone: which layers are packed, what they hold, how many bytes that takes."""
