"""Rewrites of loops and branches before fusion.

In: a jaxpr with its calls inlined. Out: one whose loops run at points or do less, and whose cheap branches are selects.
Imports what the other rewrites do.
"""
