"""Passes from jaxpr to jaxpr, one module each; ``pipeline.py`` has their order.

In: a simplified jaxpr, and its ``Origins``, which each pass updates for the equations that it replaces. Out: an
equivalent jaxpr that maps better to kernels and libraries. May import ``kernels.fusion`` (classification) and what that
may.
"""
