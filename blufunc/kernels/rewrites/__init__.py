"""Passes from jaxpr to jaxpr, one file a rule; ``pipeline.py`` has their order.

In: a simplified jaxpr. Out: an equivalent jaxpr that maps better to kernels and libraries. May import
``kernels.fusion`` (classification) and what that may.
"""
