"""From a model's config alone: what each layer holds and is stored as, how many bytes that takes."""
