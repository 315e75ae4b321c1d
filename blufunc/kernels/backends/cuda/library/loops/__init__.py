"""Loop kernels: recurrent scans as one persistent kernel each.

In: a scan whose body is matmuls by constants and pointwise work. Out: a launch. May import ``driver``, ``render``,
``kernels.lower``.
"""
