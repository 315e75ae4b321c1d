"""The compiler and its backends.

In: simplified jaxprs. Out: executables of a device, and reports on them. May import ``core``; ``pipeline.py`` has the
order of all passes. ``blufunc/__init__.py`` registers the backends of the CPU and of CUDA; their modules load when a
device is used.
"""
