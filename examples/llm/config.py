"""The configuration: sizes and choices in which the models differ.

The first module; it imports nothing of blufunc. ``architectures.py`` makes one from a ``config.json``, and ``model.py``
reads it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

Rope = tuple[tuple[str, Any], ...]
"""Items of ``rope_parameters``, which ``nn.rope`` takes as a dict.

A tuple, because a ``Config`` is hashable.
"""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and choices of a model.

    Frozen, hence hashable: may be a static argument of ``jit``.

    Attributes:
      architecture: a name of ``architectures.TABLE``; of importance for files only.
      vocab, width, layers, hidden, context: tokens, features, layers, hidden units of an MLP, positions.
      heads, key_heads, features: query heads, the key heads that they share, features of a head.
      norm: "rms" or "layer", with ``eps``.
      mlp: "swiglu" or "gelu".
      rope: rotary positions: the items of ``rope_parameters``; None: learned ones, added to the embeddings.
      qkv_bias, out_bias, mlp_bias: biases of these projections.
      qk_norm: normalize queries and keys per head.
      windows: for each layer the number of positions that a query sees, itself included; None: all.
      tied: the embeddings are also the weights of the logits.
      experts, chosen: experts in the place of each MLP, and the number that a token visits; 0 experts: one MLP.
      balance: weight of the load-balancing loss of experts.
      bos, eos: tokens that begin and end a text.
      groups: the heads of a layer are in this many groups, each with its queries, keys and values in a row: 1, or the
        number of devices that heads are sharded over.
    """

    architecture: str
    vocab: int
    width: int
    layers: int
    heads: int
    key_heads: int
    features: int
    hidden: int
    context: int
    norm: str = "rms"
    eps: float = 1e-6
    mlp: str = "swiglu"
    rope: Rope | None = (("rope_theta", 10000.0), ("rope_type", "default"))
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    tied: bool = False
    experts: int = 0
    chosen: int = 2
    balance: float = 0.0
    bos: int | None = None
    eos: tuple[int, ...] = ()
    groups: int = 1

    def window(self, layer: int) -> int | None:
        """Positions that a query of this layer sees; None: all."""
        return self.windows[layer] if self.windows else None


TINY = Config(
    "llama", vocab=256, width=64, layers=2, heads=4, key_heads=2, features=16, hidden=128, context=256, tied=True
)  # fmt: skip
"""A Llama to try programs out with: 0.1 M parameters, whose tokens are bytes."""
