"""Executors: what runs a jaxpr. The NumPy reference is always there, and first; CUDA loads when it is asked for."""

from blufunc.kernels import numpy_backend as numpy_backend  # isort: skip
from blufunc.kernels import cuda_backend as cuda_backend
