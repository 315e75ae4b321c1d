"""LoopIR, the IR of kernels: grids of points, lanes, reductions, scans.

In: nothing. Out: its data structures, index algebra, printer, verifier and interpreter. May import ``core``.
"""
