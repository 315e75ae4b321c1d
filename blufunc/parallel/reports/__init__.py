"""Communication and cost of programs on a mesh: ``bf.collectives``, ``bf.plan``, pictures of shardings.

In: programs and layouts. Out: tables. May import all of ``parallel`` but ``recipes``.
"""
