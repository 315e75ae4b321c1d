"""The compiler and the backends.

In: simplified jaxprs. Out: executables of a device, and reports on them. May import ``core``; ``pipeline.py`` has the
order of all passes. Importing this package registers both backends; CUDA's modules load when the device is used.
"""

from blufunc.kernels.backends.cpu import backend as _cpu  # noqa: F401  # isort: skip - the first is the default
from blufunc.kernels.backends.cuda import backend as _cuda  # noqa: F401
