"""Matmuls of groups of rows (``ragged_dot``), whose sizes are on the device.

In: an equation and the layouts of its operands. Out: a launch of a kernel that reads sizes on the device: a
warp-specialized one for Hopper, or the GEMM of convolutions, which has any dtype and alignment. May import
``executor``, ``driver`` and the modules of ``library``.
"""
