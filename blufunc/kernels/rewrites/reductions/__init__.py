"""Rewrites of reductions and of what they read. ``pipeline.py`` has their order."""
