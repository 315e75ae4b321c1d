"""CUDA driver: memory, modules, streams, graphs, NVRTC.

In: sources and launch arguments. Out: work on a device. May import ``kernels.cache`` and ``render``.
"""
