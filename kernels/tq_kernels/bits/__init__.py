"""Packed bits: how rows lie in memory, and codes as operands of the tensor cores."""
