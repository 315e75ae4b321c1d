"""User transforms and kernels: ``Transform``, ``elementwise``, ``cuda_kernel``.

In: rules, or sources in C or CUDA. Out: functions. May import all of ``transforms``, and ``kernels.user_kernel``.
"""
