"""Caches on disk: binaries, plans, and the timings of library algorithms.

In: keys made of sources, programs and versions. Out: what was stored under them. May import ``core``.
"""
