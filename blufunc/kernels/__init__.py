"""Executors: what runs a jaxpr. The NumPy reference is always there; CUDA registers itself, and loads when it is used."""

from blufunc.kernels import numpy_backend as numpy_backend  # isort: skip  (the first one is the default)
from blufunc.kernels import cuda_backend as cuda_backend
