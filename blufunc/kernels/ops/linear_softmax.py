"""Constants that the definition of ``linear_softmax`` and its kernels share.

Kernels, below all passes and backends. The definition, a matmul and the softmax of its rows, is in
``nn/vocabulary_loss_call.py``.
"""

from __future__ import annotations

NAME = "linear_softmax"
"""Of the operation."""

FAR = 40
"""How far above ``near`` logits may be: exponentials are below 2.4e17 then, and sums of products with them finite."""

BELOW = 30
"""How far below ``near``, which is not rounded, the logit of the class may be: from 8192 on it can be farther."""
