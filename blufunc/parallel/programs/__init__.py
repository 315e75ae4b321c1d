"""Arrays and programs on meshes: placement, ``shard``, ``reshard``, ``jit``.

In: global programs and arrays. Out: programs that all ranks run. May import ``parallel.partition`` and its imports.
"""
