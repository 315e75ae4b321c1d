"""Meshes, partition specs and shardings.

In: devices, or their number, and named axes. Out: descriptions of layouts. May import ``core``.
"""
