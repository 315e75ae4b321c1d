"""Native forms of single operations: C++ libraries that all programs share.

In: an equation of linear algebra, a sort or a Fourier transform. Out: the function of a library that computes it, and
the parameters of the function. A library is compiled once for a machine; programs have pointers to its functions. May
import ``renderer`` and ``toolchain`` of ``backends.cpu``.
"""
