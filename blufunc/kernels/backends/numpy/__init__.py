"""The reference executor: a jaxpr as a straight-line Python function of NumPy calls.

In: a jaxpr. Out: a function of lists of arrays. May import ``core``.
"""
