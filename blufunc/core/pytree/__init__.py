"""Pytrees: nested containers of leaves.

In: containers. Out: their leaves and structure, key paths, and the same containers with other leaves. May import
``core.ir`` (source lines, typed keys).
"""
