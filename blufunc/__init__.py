"""blufunc: gradients, batches and compiled programs from pure Python functions over immutable arrays."""

from blufunc import kernels as kernels
