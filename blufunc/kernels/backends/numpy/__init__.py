"""Reference executor: a jaxpr as a straight-line function of NumPy calls.

In: a jaxpr. Out: a function of lists of arrays. May import ``core``.
"""
