"""Contract of ``linear_softmax`` between definition and kernels: exact range.

Core operations. ``nn/vocabulary_loss_call.py`` has the definition,
``kernels/backends/cuda/library/softmax_gemm.py`` the kernel. Both compute ``exp(logits - near)``, where
``near`` estimates the logit of a row's class, and recompute rows for which the estimate is too far off.
"""

NAME = "linear_softmax"

FAR = 40
"""Max logit above ``near``: exponentials stay below 2.4e17, their sums finite."""

BELOW = 30
"""Max distance of the class logit below ``near``, exceedable from 8192 on."""
