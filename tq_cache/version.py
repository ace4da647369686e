"""The version of both packages, in one place: the build reads it without importing anything."""

__version__ = "0.1.0"
