"""Search of layouts: shardings of arguments, by planning candidates.

Above ``reports``. ``groups`` finds what is decided, ``strategies`` proposes, ``program`` plans, ``search`` chooses, and
``found`` reports.
"""
