"""Search of layouts: shardings of arguments, by planning candidates.

Above ``reports`` and the recipes. ``groups`` finds what is decided, ``strategies`` proposes, ``activations`` annotates
values between tensor-parallel regions, ``program`` plans, ``search`` chooses, and ``found`` reports. ``stages``
predicts pipelines, and ``stage_search`` tries numbers of stages and microbatches.
"""
