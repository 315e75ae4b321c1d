"""LSTM layers with the packed weights of cuDNN, under JAX's names.

A face, above ``blufunc.lax``. A layer is a scan, which compiles into one kernel where its carry fits. Weights are one
vector: for each layer and direction the matrices of inputs and of states, then, in the same order, their biases. The
gates in a matrix are input, forget, cell and output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors, lax, nn, random
from blufunc.core.ir import source

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

__all__ = [
    "get_num_params_in_lstm",
    "init_lstm_weight",
    "lstm",
    "lstm_ref",
    "swap_lstm_gates",
    "unpack_lstm_weights",
]


def _shapes(input_size: int, hidden_size: int, num_layers: int, bidirectional: bool) -> list[tuple[int, ...]]:
    """The shapes of all matrices, then of all biases."""
    directions = 1 + bidirectional
    matrices = []
    for layer, _ in itertools.product(range(num_layers), range(directions)):
        width = input_size if layer == 0 else directions * hidden_size
        matrices += [(4 * hidden_size, width), (4 * hidden_size, hidden_size)]
    return [*matrices, *[(4 * hidden_size,)] * len(matrices)]


def get_num_params_in_lstm(input_size: int, hidden_size: int, num_layers: int, bidirectional: bool) -> int:
    """The number of weights of an LSTM."""
    return sum(map(math.prod, _shapes(input_size, hidden_size, num_layers, bidirectional)))


def init_lstm_weight(
    rng: ArrayLike, input_size: int, hidden_size: int, num_layers: int, bidirectional: bool
) -> Array:
    """Weights from the uniform distribution within ``hidden_size ** -0.5``."""
    bound = hidden_size**-0.5
    count = get_num_params_in_lstm(input_size, hidden_size, num_layers, bidirectional)
    return random.uniform(rng, (count,), minval=-bound, maxval=bound)


def _parts(weights: Any, *sizes: Any) -> list[Array]:
    shapes = _shapes(*sizes)
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    if weights.shape != (ends[-1],):
        raise errors.ShapeError(
            f"an LSTM of these sizes has {ends[-1]} weights in one vector, not {weights.shape}.",
            where=source.here(),
            fix="get_num_params_in_lstm(input_size, hidden_size, num_layers, bidirectional)",
        )
    return [weights[end - math.prod(s) : end].reshape(s) for end, s in zip(ends, shapes, strict=True)]


def unpack_lstm_weights(
    weights: ArrayLike, input_size: int, hidden_size: int, num_layers: int, bidirectional: bool
) -> tuple[dict[int, Array], dict[int, Array], dict[int, Array], dict[int, Array]]:
    """Matrices of inputs and states, and their biases, by layer and direction.

    Raises:
      ShapeError: ``weights`` has another number of elements.
    """
    parts = _parts(bnp.asarray(weights), input_size, hidden_size, num_layers, bidirectional)
    half = len(parts) // 2
    rows = parts[:half:2], parts[1:half:2], parts[half::2], parts[half + 1 :: 2]
    w_ih, w_hh, b_ih, b_hh = (dict(enumerate(row)) for row in rows)
    return w_ih, w_hh, b_ih, b_hh


def swap_lstm_gates(
    weights: ArrayLike, input_size: int, hidden_size: int, num_layers: int, bidirectional: bool
) -> Array:
    """The weights with the gates in the order input, forget, output, cell."""
    parts = _parts(bnp.asarray(weights), input_size, hidden_size, num_layers, bidirectional)
    swapped = []
    for part in parts:
        i, f, g, o = bnp.split(part, 4)
        swapped.append(bnp.concatenate([i, f, o, g]).reshape(-1))
    return bnp.concatenate(swapped)


def lstm(
    x: ArrayLike,
    h_0: ArrayLike,
    c_0: ArrayLike,
    weights: ArrayLike,
    seq_lengths: ArrayLike,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    precision: Any = None,
) -> tuple[Array, Array, Array]:
    """An LSTM over batches of sequences with packed weights.

    Args:
      x: inputs, of shape (batch, length, input_size).
      h_0, c_0: initial states, of shape (directions * num_layers, batch, hidden_size).
      weights: the vector that ``init_lstm_weight`` makes.
      seq_lengths: the length of each sequence; steps beyond it give zeros and keep the state.
      dropout: 0 only.
      precision: of the matmuls, as of ``lax.dot``.
    Returns:
      Outputs of shape (batch, length, directions * hidden_size), and the final states.
    Raises:
      UnsupportedError: ``dropout`` is not 0.
    """
    sizes = (input_size, hidden_size, num_layers, bidirectional)
    unpacked = unpack_lstm_weights(weights, *sizes)
    return lstm_ref(
        x,
        h_0,
        c_0,
        *unpacked,
        seq_lengths,
        input_size,
        hidden_size,
        num_layers,
        dropout,
        bidirectional,
        precision,
    )


def lstm_ref(
    x: ArrayLike,
    h_0: ArrayLike,
    c_0: ArrayLike,
    W_ih: Mapping[int, Any],
    W_hh: Mapping[int, Any],
    b_ih: Mapping[int, Any],
    b_hh: Mapping[int, Any],
    seq_lengths: ArrayLike,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    precision: Any = None,
) -> tuple[Array, Array, Array]:
    """As ``lstm``, with the weights that ``unpack_lstm_weights`` gives."""
    if dropout:
        raise errors.UnsupportedError(
            f"lstm with dropout={dropout}.", where=source.here(), fix="nn.dropout between layers of your own"
        )
    rows, h_0, c_0 = bnp.moveaxis(bnp.asarray(x), 1, 0), bnp.asarray(h_0), bnp.asarray(c_0)
    inside = bnp.arange(rows.shape[0])[:, None, None] < bnp.asarray(seq_lengths)[None, :, None]
    finals = []
    for layer in range(num_layers):
        outs = []
        for direction in range(1 + bidirectional):
            n = layer * (1 + bidirectional) + direction
            out, final = _one(
                rows, inside, (h_0[n], c_0[n]), W_ih[n], W_hh[n], b_ih[n] + b_hh[n], direction == 1, precision
            )
            outs.append(out)
            finals.append(final)
        rows = bnp.concatenate(outs, -1)
    h_n, c_n = (bnp.stack([f[i] for f in finals]) for i in (0, 1))
    return bnp.moveaxis(rows, 0, 1), h_n, c_n


def _one(
    rows: Array, inside: Array, state: tuple, w: Array, u: Array, bias: Array, backward: bool, precision: Any
) -> tuple[Array, tuple]:
    """One layer in one direction. Steps outside of a sequence change no state."""
    given = bnp.matmul(rows, w.T, precision=precision) + bias  # all steps in one matmul

    def step(carry, now):
        (h, c), (gates, valid) = carry, now
        i, f, g, o = bnp.split(gates + bnp.matmul(h, u.T, precision=precision), 4, -1)
        new_c = nn.sigmoid(f) * c + nn.sigmoid(i) * bnp.tanh(g)
        new_h = nn.sigmoid(o) * bnp.tanh(new_c)
        return (bnp.where(valid, new_h, h), bnp.where(valid, new_c, c)), bnp.where(valid, new_h, 0)

    final, outs = lax.scan(step, state, (given, inside), reverse=backward)
    return outs, final
