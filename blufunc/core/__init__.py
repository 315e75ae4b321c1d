"""The intermediate representation, arrays and primitives.

In: Python values and functions. Out: jaxprs, and arrays computed eagerly. Independent of transforms and
backends. Packages, bottom first: ``ir``, ``pytree``, ``arrays``, ``primitives``, ``ops``, ``programs``.
"""
