"""Meshes, partition specs and shardings.

In: devices, or a device count, and named axes. Out: descriptions of layouts. May import ``core``.
"""
