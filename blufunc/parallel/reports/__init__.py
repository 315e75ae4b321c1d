"""Communication and cost on a mesh: ``bf.collectives``, ``bf.plan``, pictures.

In: programs and layouts. Out: tables. May import all of ``parallel`` but ``recipes``.
"""
