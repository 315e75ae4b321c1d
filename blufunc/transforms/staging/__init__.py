"""``jit`` and its stages, ``make_jaxpr``, callbacks, scopes, and transfers.

In: functions and arguments. Out: compiled calls, jaxprs, reports. May import ``kernels`` and the preceding packages of
transforms.
"""
