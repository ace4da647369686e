"""Where one layer's keys and values are held: memory that grows, or is allocated once."""
