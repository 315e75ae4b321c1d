"""Tracing of functions into jaxprs (stage 1), and their simplification (stage 4).

In: a function and abstract arguments, or a jaxpr. Out: a jaxpr. Also chooses recognizers and platform
variants. May import all of ``core``.
"""
