"""Convolutions as one of three kinds, in the layout of libraries.

Kernels, before stage 5, for devices that have them. In: a jaxpr with ``conv_general_dilated``. Out: one with
``convolution`` (``ops/convolution.py``), and movement around it. Derivatives of a convolution are convolutions with
strides and dilations swapped. They are recognized by their parameters:

    weight   the second operand is larger than the result along spatial axes, or the batch is in groups
    input    the first operand has holes, or the kernel is reversed, and windows are adjacent
    forward  all others; holes become zeros first

Padding that libraries do not take (negative, or beyond what a gradient needs) becomes slices and pads. 16-bit and TF32
convolutions have their features last, whatever the program's layout; others stay as written if features come second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.convolution import conv_general_dilated_p
from blufunc.core.ops.elementwise import convert_p
from blufunc.core.ops.shape import rev_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, dce, rewrite
from blufunc.kernels.ops.convolution import Convolution
from blufunc.kernels.precision import is_tf32, resolved
from blufunc.kernels.rewrites.convolutions import forms
from blufunc.kernels.rewrites.convolutions.building import Builder
from blufunc.kernels.rewrites.convolutions.features_last import with_features_last

DTYPES = (dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.float64)
"""Dtypes of convolutions that have these forms."""


Library = Callable[[Convolution], bool]


def with_convolutions(jaxpr: Jaxpr, origins: Origins, library: Library = lambda c: True) -> Jaxpr:
    """The jaxpr with convolutions in their best form.

    Args:
      library: whether a library computes a convolution fast; default: all.
    """
    if not any(map(_is_canonical, jaxpr.eqns)):
        return jaxpr
    found = _Forms(jaxpr, origins, library)
    made = dce(rewrite(jaxpr, found.step, origins), origins=origins)
    return with_features_last(made, found.results, origins)


def _is_canonical(eqn: Eqn) -> bool:
    if eqn.prim is not conv_general_dilated_p or is_replaced(conv_general_dilated_p, "impl"):
        return False
    atoms = (*eqn.invars, *eqn.outvars)
    if any(a.aval.dtype not in DTYPES or not a.aval.size or a.__class__ is Literal for a in atoms):
        return False
    return eqn.invars[0].aval.dtype == eqn.invars[1].aval.dtype


class _Slide(NamedTuple):
    """How the kernel slides along an axis, and the sizes of all three arrays."""

    stride: int
    low: int
    high: int
    holes: int
    dilation: int
    size: int
    kernel: int
    n: int


def slides_of(eqn: Eqn) -> list[_Slide]:
    """The slides along all spatial axes."""
    p, d = eqn.params, eqn.params["dimension_numbers"]
    lhs, rhs, out = (v.aval.shape for v in (*eqn.invars, *eqn.outvars))
    found = []
    for i, (low, high) in enumerate(p["padding"]):
        sizes = lhs[d.lhs_spec[2 + i]], rhs[d.rhs_spec[2 + i]], out[d.out_spec[2 + i]]
        how = p["window_strides"][i], low, high, p["lhs_dilation"][i], p["rhs_dilation"][i]
        found.append(_Slide(*how, *sizes))
    return found


def kind_of(eqn: Eqn, reversed_kernel: bool) -> str:
    """The kind of a convolution, whose kernel may be a reversed array."""
    slides, p = slides_of(eqn), eqn.params
    larger = math.prod(s.kernel for s in slides) > math.prod(s.n for s in slides)
    if p["batch_group_count"] > 1 or (p["feature_group_count"] == 1 and larger):
        return "weight"
    adjacent = all(s.stride == 1 for s in slides)
    holes = any(s.holes > 1 for s in slides)
    return "input" if adjacent and (holes or reversed_kernel) else "forward"


class _Forms:
    """Rewrites the convolutions of a jaxpr.

    Attributes:
      results: their results, features last, before they are transposed for the program.
    """

    def __init__(self, jaxpr: Jaxpr, origins: Origins, library: Library):
        self.library = library
        self.makers: dict[Any, Eqn] = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.origins, self.b = origins, Builder()
        self.results: set[Var] = set()

    def step(self, eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        if not _is_canonical(eqn):
            return [eqn.with_invars(invars)]
        self.b.begin(eqn, self.origins.get(eqn))
        plain = self.without_reversal(eqn, eqn.invars[1])
        kind = kind_of(eqn, plain is not None)
        if not _leaves_elements(eqn, kind):
            return [*self.b.eqns, eqn.with_invars(invars)]
        made = {"forward": self.forward, "input": self.input, "weight": self.weight}[kind]
        given = invars if kind != "input" or plain is None else [invars[0], plain]
        out = made(eqn, given, plain is not None)
        alias(eqn.outvars[0], out)
        return self.b.eqns

    def without_reversal(self, eqn: Eqn, kernel: Any) -> Atom | None:
        """The array that a kernel is, reversed along all spatial axes; None for others."""
        spatial = {d for d in eqn.params["dimension_numbers"].rhs_spec[2:] if kernel.aval.shape[d] > 1}
        maker = self.makers.get(kernel)
        converted = maker is not None and maker.prim is convert_p
        if converted:
            maker = self.makers.get(maker.invars[0])  # type: ignore[union-attr]
        if maker is None or maker.prim is not rev_p or {*maker.params["dimensions"]} != spatial:
            return None
        return self.b.convert(maker.invars[0], kernel.aval.dtype)

    # -- kinds -----------------------------------------------------------------------------------------

    def forward(self, eqn: Eqn, invars: Sequence[Any], reversed_kernel: bool) -> Var:
        b, d, slides = self.b, eqn.params["dimension_numbers"], slides_of(eqn)
        x, w = invars
        layout = _Layout(eqn)
        x, w = layout.ordered(b, x, d.lhs_spec), layout.ordered(b, w, d.rhs_spec)
        config = [(min(s.low, 0), min(s.high, 0), 0) for s in slides]
        pads = tuple(_even(s, max(s.low, 0), max(s.high, 0)) for s in slides)
        if any(s.holes > 1 for s in slides):
            config, pads = [(s.low, s.high, s.holes - 1) for s in slides], ((0, 0),) * len(slides)
        x = b.pad(x, layout.config(config))
        how = _How(tuple(s.stride for s in slides), pads, tuple(s.dilation for s in slides))
        groups = eqn.params["feature_group_count"]
        shape = layout.shape(x.aval.shape[0], w.aval.shape[0], [s.n for s in slides])
        out = self.emit("forward", eqn, (x, w), how, groups, shape, layout)
        self.results.add(out)
        return layout.back(b, out, d.out_spec)

    def input(self, eqn: Eqn, invars: Sequence[Any], reversed_kernel: bool) -> Var:
        b, d, slides = self.b, eqn.params["dimension_numbers"], slides_of(eqn)
        y, w = invars
        layout, groups = _Layout(eqn), eqn.params["feature_group_count"]
        y = layout.ordered(b, y, d.lhs_spec)
        if not reversed_kernel:
            w = b.rev(w, d.rhs_spec[2:])
        # from features of the result (in groups), features of the first operand of a group
        w = _exchanged(b, w, d.rhs_spec, groups)
        w = layout.ordered(b, w, (0, 1, *range(2, w.aval.ndim)))
        pads, sizes, around = [], [], []
        for s in slides:
            (front, back), (low, high) = _read_of_result(s)
            pads.append((low, low if high < low < high + s.holes else high))
            sizes.append(s.n - front - back)
            around.append((front, back, 0))
        how = _How(tuple(s.holes for s in slides), tuple(pads), tuple(s.dilation for s in slides))
        features = groups * w.aval.shape[layout.features]
        shape = layout.shape(y.aval.shape[0], features, sizes)
        out = b.pad(self.emit("input", eqn, (y, w), how, groups, shape, layout), layout.config(around))
        self.results.add(out)
        return layout.back(b, out, d.out_spec)

    def weight(self, eqn: Eqn, invars: Sequence[Any], reversed_kernel: bool) -> Var:
        b, d, slides = self.b, eqn.params["dimension_numbers"], slides_of(eqn)
        x, y = invars
        layout, groups = _Layout(eqn), eqn.params["batch_group_count"]
        x_spec, y_spec = ((s[1], s[0], *s[2:]) for s in (d.lhs_spec, d.rhs_spec))
        swapped = _is_swapped(slides)
        if swapped:
            x, y, x_spec, y_spec = y, x, y_spec, x_spec
            slides = [_swapped_slide(s) for s in slides]
        x, y = layout.ordered(b, x, x_spec), layout.ordered(b, y, y_spec)
        pads, config = [], []
        for s in slides:
            (before, after), (low, high) = _read_of_first(s)
            pads.append((low, low if high < low < high + s.dilation else high))
            config.append((-before, -after, s.holes - 1))
        x = b.pad(x, layout.config(config))
        how = _How(tuple(s.dilation for s in slides), tuple(pads), tuple(s.stride for s in slides))
        features = x.aval.shape[layout.features] // groups
        shape = layout.shape(y.aval.shape[layout.features], features, [s.n for s in slides])
        w = self.emit("weight", eqn, (x, y), how, groups, shape, layout)
        w = layout.plain(b, w)  # output features, input features of a group, spatial axes
        if swapped:
            w = b.rev(_exchanged(b, w, tuple(range(w.aval.ndim)), groups), range(2, w.aval.ndim))
        order = [0] * w.aval.ndim
        for axis, at in zip((1, 0, *range(2, w.aval.ndim)), d.out_spec, strict=True):
            order[at] = axis
        return b.transpose(w, order)

    def emit(
        self,
        kind: str,
        eqn: Eqn,
        operands: Sequence[Any],
        how: _How,
        groups: int,
        shape: Any,
        layout: _Layout,
    ) -> Any:
        """A convolution in its best form."""
        params = {
            "kind": kind,
            "strides": how.strides,
            "padding": tuple(map(tuple, how.padding)),
            "dilation": how.dilation,
            "groups": groups,
            "shape": tuple(shape),
            "dtype": eqn.outvars[0].aval.dtype,
            "precision": eqn.params["precision"],
            "features_last": layout.last,
        }
        return forms.put(self.b, operands, params, self.library)


def _read_of_result(s: _Slide) -> tuple[tuple[int, int], tuple[int, int]]:
    """Results at both ends that an input gradient does not read, and its padding."""
    low = (s.kernel - 1) * s.dilation - s.low
    front, low = max(-low, 0), max(low, 0)
    high = (s.size - 1) * s.holes + (s.kernel - 1) * s.dilation + 1 - (s.n - front) - low
    back = -high if -high >= s.holes else 0
    return (front, back), (low, max(high, 0))


def _read_of_first(s: _Slide) -> tuple[tuple[int, int], tuple[int, int]]:
    """Elements at both ends that no weight gradient reads, and its padding."""
    size = (s.size - 1) * s.holes + 1
    high = (s.kernel - 1) * s.dilation + (s.n - 1) * s.stride + 1 - size - s.low
    after = -high if -high >= s.dilation else 0
    return (max(-s.low, 0), after), (max(s.low, 0), max(high, 0))


def _is_swapped(slides: Sequence[_Slide]) -> bool:
    """True for the weight gradient of a transposed convolution: the holes are first."""
    return any(s.holes > 1 for s in slides) and all(s.dilation == 1 for s in slides)


def _swapped_slide(s: _Slide) -> _Slide:
    """The slide with its operands swapped."""
    low = (s.n - 1) * s.stride - s.low
    return s._replace(low=low, holes=1, dilation=s.holes, size=s.kernel, kernel=s.size)


def _leaves_elements(eqn: Eqn, kind: str) -> bool:
    """True unless all windows along an axis are of padding, which libraries refuse."""
    slides = slides_of(eqn)
    if kind == "input":
        return all(s.n > sum(_read_of_result(s)[0]) for s in slides)
    if kind == "weight":
        slides = [_swapped_slide(s) for s in slides] if _is_swapped(slides) else slides
        return all((s.size - 1) * s.holes + 1 > sum(_read_of_first(s)[0]) for s in slides)
    if any(s.holes > 1 for s in slides):
        return all((s.size - 1) * s.holes + 1 + s.low + s.high > 0 for s in slides)
    return all(s.size + min(s.low, 0) + min(s.high, 0) > 0 for s in slides)


def _even(s: _Slide, low: int, high: int) -> tuple[int, int]:
    """Padding with ``high`` like ``low`` if that adds no result; libraries prefer it."""
    size = s.size + min(s.low, 0) + min(s.high, 0)
    rest = size + low + high - (s.kernel - 1) * s.dilation - 1
    return low, low if high < low and (rest + low - high) // s.stride == rest // s.stride else high


class _How(NamedTuple):
    """Strides, padding and dilation along all spatial axes."""

    strides: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]


class _Layout:
    """The layout of a convolution's arrays: features last, or second.

    Attributes:
      last: whether features are last.
      features: their axis.
    """

    def __init__(self, eqn: Eqn):
        d, dtype = eqn.params["dimension_numbers"], eqn.invars[0].aval.dtype
        rank = eqn.invars[0].aval.ndim
        tensor_cores = dtype.itemsize == 2 or (
            dtype == dtypes.float32 and is_tf32(resolved(eqn.params["precision"]))
        )
        second = all(min(s[:2]) == 0 and max(s[:2]) == 1 for s in (d.lhs_spec, d.out_spec))
        self.last = tensor_cores or not second
        self.features = rank - 1 if self.last else 1

    def ordered(self, b: Builder, x: Any, spec: Sequence[int]) -> Any:
        """``x`` in this layout; ``spec``: its batch, feature and spatial axes."""
        first, features, *spatial = spec
        return b.transpose(x, (first, *spatial, features) if self.last else (first, features, *spatial))

    def shape(self, first: int, features: int, sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of an array in this layout."""
        return (first, *sizes, features) if self.last else (first, features, *sizes)

    def config(self, spatial: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Padding of all axes."""
        none = [(0, 0, 0)]
        return [*none, *spatial, *none] if self.last else [*none, *none, *spatial]

    def plain(self, b: Builder, x: Any) -> Any:
        """``x`` with features second."""
        last = x.aval.ndim - 1
        return b.transpose(x, (0, last, *range(1, last))) if self.last else x

    def back(self, b: Builder, x: Any, spec: Sequence[int]) -> Any:
        """An array of this layout with its axes where ``spec`` says."""
        last = x.aval.ndim - 1
        own = (0, last, *range(1, last)) if self.last else tuple(range(last + 1))
        order = [0] * (last + 1)
        for axis, at in zip(own, spec, strict=True):
            order[at] = axis
        return b.transpose(x, order)


def _exchanged(b: Builder, w: Any, spec: Sequence[int], groups: int) -> Any:
    """A kernel (groups of o, i, ...) as (groups of i, o of a group, ...)."""
    w = b.transpose(w, spec)
    o, i, *spatial = w.aval.shape
    rest = range(3, 3 + len(spatial))
    if groups == 1:
        return b.transpose(w, (1, 0, *range(2, w.aval.ndim)))
    w = b.transpose(b.reshape(w, (groups, o // groups, i, *spatial)), (0, 2, 1, *rest))
    return b.reshape(w, (groups * i, o // groups, *spatial))
