"""``jit`` and its stages, ``make_jaxpr``, callbacks, scopes, and moving arrays between devices.

In: functions and arguments. Out: compiled calls, jaxprs, reports. May import ``kernels`` and the packages of transforms
before it.
"""
