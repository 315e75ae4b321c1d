"""Rewrites of several matmuls at once. ``pipeline.py`` has their order."""
