"""Compiled attention kernels, ready to be put on a stream.

Kernels, stage 8, above ``kernels``, which describes them. In: addresses and strides, so that queries, keys and values
may be parts of one array. Out: launches. They allocate nothing and never wait for the host, so a graph can capture
them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.kernels.backends.cuda.driver import driver, modules, tensor_map
from blufunc.kernels.backends.cuda.driver.tensor_map import Mapped
from blufunc.kernels.backends.cuda.library.attention import mods as cuda_attention_mods
from blufunc.kernels.backends.cuda.library.attention.kernels import (
    FORWARD_KERNEL,
    IN_PARTS,
    NAMES,
    NO_CODE,
    Kernel,
    Shape,
    Strides,
    Tiling,
    boxes,
    gradient_kernels,
    operands_of,
    problem,
    refused,
    scratch_bytes,
    text_of,
)
from blufunc.kernels.backends.cuda.library.attention.mods import Code


@functools.lru_cache(256)
def _function(
    kernel: Kernel,
    dtype: np.dtype,
    features: int,
    causal: bool,
    tiling: Tiling,
    code: Code,
    parts: int,
    device: int,
) -> driver.Kernel:
    text = text_of(kernel, dtype, features, causal, tiling, code, parts)
    return modules.module(text, device, kernel.entry).kernel(kernel.entry)


def prepare(
    kernel: Kernel,
    shape: Shape,
    dtype: np.dtype,
    strides: Mapping[str, Strides],
    scale: float,
    causal: bool,
    device: int,
    tiling: Tiling | None = None,
    code: Code = NO_CODE,
    parts: int = 0,
) -> driver.Launch:
    """Launch of one kernel; the caller sets the addresses of ``operands_of`` it.

    Args:
      dtype: of the operands; float16 if there are ``parts``.
      strides: by name.
      tiling: overrides the kernel's own.
      code: source of the score and mask functions.
      parts: number of float16 parts per float32 element; 0 for elements of two bytes.
    Raises:
      UnsupportedError: ``refused`` says why, or the scale is not positive.
    """
    arch = driver.properties(device).arch
    reason = refused(shape, dtype, list(strides.values()), arch, parts)
    if reason is None and not scale > 0:
        reason = f"scale={scale} is not positive, and the greatest score is taken before it is scaled"
    if reason is not None:
        raise errors.UnsupportedError("there is no kernel for this attention.", why=reason)
    tiling = tiling or kernel.tiling(shape.features, arch, code, parts)
    function = _function(kernel, dtype, shape.features, causal, tiling, code, parts, device)
    arguments = [0] * len(operands_of(kernel, code, parts)) + [problem(kernel, shape, scale, strides, parts)]
    arguments += [bytes(tensor_map.BYTES)] * len(boxes(kernel, shape, strides, tiling))
    if kernel.body == cuda_attention_mods.TILES:
        rows, _ = kernel.tiles_of(shape, tiling)
        grid = cuda_attention_mods.lists(code, shape.batch, shape.heads, rows)
        return function.prepare((grid,), (tiling.threads,), 0, arguments)
    grid = kernel.blocks(shape, tiling, driver.properties(device).sm_count)
    shared = kernel.shared_bytes(shape.features, tiling, parts)
    return function.prepare((grid,), (tiling.launched,), shared, arguments)


class _Kernel:
    """One kernel of a call, preceded by the one that lists its tiles if it has a mask."""

    def __init__(
        self,
        kernel: Kernel,
        shape: Shape,
        dtype: np.dtype,
        strides: Mapping[str, Strides],
        scale: float,
        causal: bool,
        device: int,
        code: Code,
        parts: int,
    ):
        tiling = kernel.tiling(shape.features, driver.properties(device).arch, code, parts)
        options = shape, dtype, strides, scale, causal, device, tiling, code, parts
        self._lists = prepare(kernel.lists, *options) if code.masked else None
        self._launch = prepare(kernel, *options)
        self._plain = code is NO_CODE
        first = len(operands_of(kernel, code, parts)) + 1
        self._maps = [
            Mapped(first + i, kernel.operands.index(name), box)
            for i, (name, box) in enumerate(boxes(kernel, shape, strides, tiling).items())
        ]

    def __call__(self, pointers: Sequence[int], extras: Sequence[int], lists: int, stream: Any) -> None:
        """Put it on a stream.

        Args:
          pointers: addresses of the kernel's operands, and of their parts.
          extras: addresses of the batch and head indices, and of the tables; none without a ``Code``.
          lists: memory for its lists of tiles.
        """
        rest = [] if self._plain else [*extras[:2], lists, *extras[2:]]
        if self._lists is not None:
            self._lists.run(rest, stream)
        for of in self._maps:
            of.set(self._launch.arguments, pointers)
        self._launch.run([*pointers, *rest], stream)


class Forward:
    """``out = softmax(scale q k^T) v`` for each head.

    Args:
      shape: the sizes.
      dtype: bfloat16 or float16.
      strides: of q, k, v and out.
      scale: of the scores; positive.
      causal: whether query ``t`` sees keys 0 to ``t`` only.
      device: the index of the device.
      code: source of the score and mask functions.
      parts: number of float16 parts of q, k and v, if they and out are float32; 0 if they are of ``dtype``.
    Raises:
      UnsupportedError: ``refused`` says why, or the scale is not positive.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: np.dtype,
        strides: Sequence[Strides],
        scale: float,
        causal: bool,
        device: int,
        code: Code = NO_CODE,
        parts: int = 0,
    ):
        named = dict(zip(NAMES[:4], strides, strict=True))
        self._kernel = _Kernel(FORWARD_KERNEL, shape, dtype, named, scale, causal, device, code, parts)

    def __call__(
        self, pointers: Sequence[int], scratch: int, stream: Any, extras: Sequence[int] = ()
    ) -> None:
        """Put it on a stream.

        Args:
          pointers: addresses of q, k and v; with ``parts``, of their second parts, if any, and of their units,
            float32 (batch, key_heads); of out; and of lse, float32 (batch, heads, queries), which receives
            log-sum-exp of the scores.
          scratch: address of memory, whose size is the sum of ``kernels.scratch_bytes``.
          extras: with ``code``, addresses of the batch and head indices, int32, and of its tables.
        """
        *given, out, lse = pointers
        q, k, v, *split = given
        self._kernel((q, k, v, out, lse, *_padded(split, 3)), extras, scratch, stream)


class Backward:
    """The gradients of ``Forward``, bitwise deterministic.

    Args:
      shape, dtype, scale, causal, device, code, parts: as for ``Forward``; dout has parts, too.
      strides: of q, k, v, out, dout, dq, dk and dv.
      summed: whether to compute sums of the gradients of each ``ROWS_OF_SUM`` tokens, too; not with ``parts``.
    Raises:
      UnsupportedError: ``refused`` says why, or the scale is not positive.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: np.dtype,
        strides: Sequence[Strides],
        scale: float,
        causal: bool,
        device: int,
        code: Code = NO_CODE,
        parts: int = 0,
        summed: bool = False,
    ):
        assert not (summed and parts), "sums are of what is stored in two bytes"
        named = dict(zip(NAMES, strides, strict=True))
        options = (shape, dtype, named, scale, causal, device, code, parts)
        self._summed = summed
        arch = driver.properties(device).arch
        kernels = gradient_kernels(shape, arch, code, parts)
        self._kernels = [_Kernel(k.summed if summed else k, *options) for k in kernels]
        self._by_planes = kernels[0].by_planes
        self._bytes = scratch_bytes(False, shape, arch, code, parts)

    def __call__(
        self, pointers: Sequence[int], scratch: int, stream: Any, extras: Sequence[int] = ()
    ) -> None:
        """Put it on a stream.

        As ``Forward``, with pointers of q, k, v, out, lse, dout, the split, dq, dk, dv; then those of the sums of dq,
        dk and dv. Sums are float32, in rows like those of gradients: a batch entry has one for each ``ROWS_OF_SUM``
        tokens or part of them.
        """
        sums = list(pointers[-3:]) if self._summed else []
        *given, dq, dk, dv = pointers[: len(pointers) - len(sums)]
        q, k, v, out, lse, dout, *split = given
        if self._by_planes:
            self._kernels[0]((q, k, v, out, lse, dout, dq, dk, dv, scratch, *sums), (), 0, stream)
            return
        own, of_queries, _ = self._bytes
        split, lists = _padded(split, 4), scratch + own
        query, *keys = self._kernels
        query((q, k, v, out, lse, dout, dq, scratch, *split, *sums[:1]), extras, lists, stream)
        for kernel in keys:
            operands = (q, k, v, dout, dk, dv, scratch, *split, *sums[1:])
            kernel(operands, extras, lists + of_queries, stream)


def _padded(split: Sequence[int], operands: int) -> list[int]:
    """The addresses of second parts and units, 0 for each that is missing."""
    if not split:
        return []
    both = [split[n : n + operands] for n in range(0, len(split), operands)]
    both = [[0] * operands, *both][-2:]
    return [address for some in both for address in (*some, *[0] * (len(IN_PARTS) - operands))]
