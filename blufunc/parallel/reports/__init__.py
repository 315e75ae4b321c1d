"""What a program on a mesh exchanges and costs: ``bf.collectives``, ``bf.plan``, pictures of shardings.

In: programs and layouts. Out: tables. May import all of ``parallel`` but ``recipes``.
"""
