"""The intermediate representation, arrays and primitives.

In: Python values and functions. Out: jaxprs, and arrays that operations ran on eagerly. Knows nothing of transforms or
backends. Packages, bottom first: ``ir``, ``pytree``, ``arrays``, ``primitives``, ``ops``, ``programs``.
"""
