"""blufunc: gradients, batches and compiled programs from pure Python functions over immutable arrays."""

from blufunc import kernels as _kernels  # registers the backends

__version__ = "0.1.0.dev0"
