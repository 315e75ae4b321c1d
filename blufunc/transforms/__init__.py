"""Transforms of functions: derivatives, batching, compilation, control flow, custom rules."""
