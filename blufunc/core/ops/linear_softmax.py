"""The contract of ``linear_softmax`` between its definition and its kernels: its name, and where it is exact.

Core operations. ``nn/vocabulary_loss_call.py`` has the definition, ``kernels/backends/cuda/library/softmax_gemm.py``
the kernel. Both take the exponentials of a row's logits less ``near``, an estimate of the logit of its class, and
recompute rows for which that is too far off.
"""

NAME = "linear_softmax"

FAR = 40
"""How far above ``near`` logits may be: exponentials are below 2.4e17 then, and sums of products with them finite."""

BELOW = 30
"""How far below ``near``, which is not rounded, the logit of the class may be: from 8192 on it can be farther."""
