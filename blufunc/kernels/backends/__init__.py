"""Where programs run: NumPy, the CPU (NumPy or C++), CUDA.

In: simplified jaxprs. Out: executables. May import all of ``kernels`` but ``inspect``.
"""
