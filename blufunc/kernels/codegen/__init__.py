"""LoopIR to C: the part that the CPU's and CUDA's renderers share.

In: kernels of LoopIR. Out: C statements and expressions, and the helpers that they need. May import ``kernels.loopir``.
"""
