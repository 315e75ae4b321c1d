"""Executors: what runs a jaxpr. The NumPy reference is always there."""

from blufunc.kernels import numpy_backend as numpy_backend
