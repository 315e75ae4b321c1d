"""Rows for convolutions and window reductions, with elementwise definitions.

``tests/op_table/rows.py`` adds ``ROWS`` to its own.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from blufunc.core.ops import convolution, reduce_window
from blufunc.core.ops.convolution import ConvDimensionNumbers
from tests.op_table.row import FLOATS, KEY, NUMBERS, Arg, Op


def _spread(x, axes, pads, dilations, fill=0):
    """``x`` with holes and padding along ``axes``: element by element."""
    for axis, (low, high), d in zip(axes, pads, dilations, strict=True):
        n = x.shape[axis]
        size = low + high + ((n - 1) * d + 1 if n else 0)
        shape = list(x.shape)
        shape[axis] = size
        out = np.full(shape, fill, x.dtype)
        for i in range(n):
            if 0 <= low + i * d < size:
                out[(slice(None),) * axis + (low + i * d,)] = x[(slice(None),) * axis + (i,)]
        x = out
    return x


def _starts(size, window, stride, dilation):
    reach = (window - 1) * dilation + 1
    return range(0, max(size - reach + 1, 0), stride)


# -- convolutions ----------------------------------------------------------------------------------


def conv_ref(lhs, rhs, *, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
             feature_group_count, batch_group_count, **_):  # fmt: skip
    """The sum over input features and window positions, for each output alone."""
    d = dimension_numbers
    x = lhs.transpose(d.lhs_spec)
    w = rhs.transpose(d.rhs_spec)
    spatial = range(2, x.ndim)
    x = _spread(x, spatial, padding, lhs_dilation)
    batch, features = x.shape[0] // batch_group_count, w.shape[1]
    starts = [
        _starts(x.shape[a], w.shape[a], s, r)
        for a, s, r in zip(spatial, window_strides, rhs_dilation, strict=True)
    ]
    out = np.zeros((batch, w.shape[0], *map(len, starts)), x.dtype)
    for n, o in itertools.product(range(batch), range(w.shape[0])):
        feature_group = o // (w.shape[0] // feature_group_count)
        example = n + batch * (o // (w.shape[0] // batch_group_count))
        seen = x[example, feature_group * features : (feature_group + 1) * features]
        for at in itertools.product(*[range(len(s)) for s in starts]):
            window = tuple(
                slice(s[i], s[i] + (k - 1) * r + 1, r)
                for s, i, k, r in zip(starts, at, w.shape[2:], rhs_dilation, strict=True)
            )
            out[(n, o, *at)] = np.sum(seen[(slice(None), *window)] * w[o])
    return out.transpose(np.argsort(d.out_spec))


def _conv(name, lhs, rhs, layout=None, strides=None, padding=None, lhs_dilation=None, rhs_dilation=None, features=1,
          batches=1, **kw):  # fmt: skip
    n = len(lhs) - 2
    params = {
        "window_strides": strides or (1,) * n,
        "padding": padding or ((0, 0),) * n,
        "lhs_dilation": lhs_dilation or (1,) * n,
        "rhs_dilation": rhs_dilation or (1,) * n,
        "dimension_numbers": layout or ConvDimensionNumbers(*[tuple(range(n + 2))] * 3),
        "feature_group_count": features,
        "batch_group_count": batches,
        "precision": None,
        "preferred_element_type": None,
    }
    return Op(
        convolution.conv_general_dilated_p,
        (Arg(lhs, -2, 2), Arg(rhs, -2, 2)),
        lambda x, w: conv_ref(x, w, **params),
        params,
        name,
        grad=2,
        dtypes=kw.pop("dtypes", ("float64",)),
        tol=4,
        **kw,
    )


_LAST = ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1))
_MIXED = ConvDimensionNumbers((2, 0, 3, 1), (3, 0, 2, 1), (1, 3, 0, 2))

CONVOLUTIONS = [
    _conv("plain", (2, 2, 5), (3, 2, 2), dtypes=(*NUMBERS, "float16", "complex64"), refuses=("bool", KEY)),
    _conv("no-axes", (2, 3), (4, 3)),
    _conv("features-last", (2, 5, 3), (2, 3, 4), _LAST, (2,), ((1, 2),), dtypes=FLOATS),
    _conv("mixed-axes", (2, 4, 2, 3), (2, 2, 2, 3), _MIXED, (1, 2), ((0, 1), (1, 0))),
    _conv("strides", (1, 2, 7), (2, 2, 3), None, (3,), ((2, 2),)),
    _conv("dilations", (1, 2, 4), (2, 2, 2), None, (2,), ((1, 2),), (3,), (2,)),
    _conv("cut-off", (1, 1, 6), (1, 1, 2), None, (1,), ((-1, -2),), (2,)),
    _conv("one-by-one", (2, 3, 2, 2), (2, 3, 1, 1)),
    _conv("depthwise", (2, 4, 4), (4, 1, 3), None, (1,), ((1, 1),), features=4),
    _conv("groups", (1, 6, 4), (20, 3, 2), None, (2,), ((1, 0),), features=2),
    _conv("groups-of-few", (2, 4, 3), (4, 2, 2), None, features=2),
    _conv("batch-groups", (4, 2, 4), (6, 2, 2), None, (1,), ((0, 1),), batches=2),
    _conv("three-axes", (1, 1, 3, 2, 3), (2, 1, 2, 2, 2)),
    _conv("nothing", (0, 2, 3), (3, 2, 2)),
    _conv("no-window-fits", (1, 2, 2), (3, 2, 4)),
]

# -- windows ---------------------------------------------------------------------------------------


def window_ref(f, identity):
    """``f`` of the elements of each window alone."""

    def ref(x, *, window_dimensions, window_strides, padding, base_dilation, window_dilation):
        x = _spread(x, range(x.ndim), padding, base_dilation, identity)
        starts = [
            _starts(*a) for a in zip(x.shape, window_dimensions, window_strides, window_dilation, strict=True)
        ]
        rows = []
        for at in itertools.product(*starts):
            window = tuple(
                slice(i, i + (w - 1) * d + 1, d)
                for i, w, d in zip(at, window_dimensions, window_dilation, strict=True)
            )
            rows.append(f(x[window]))
        return np.asarray(rows).reshape([len(s) for s in starts])

    return ref


_SLIDES = {
    "pairs": ((4, 4), {"window_dimensions": (2, 2), "window_strides": (2, 2)}),
    "overlapping": ((5, 4), {"window_dimensions": (3, 2), "padding": ((1, 1), (0, 1))}),
    "one-window": ((3, 5), {"window_dimensions": (3, 5)}),
    "long-windows": ((7,), {"window_dimensions": (6,), "window_strides": (1,)}),
    "every-other": ((5, 2), {"window_dimensions": (1, 1), "window_strides": (2, 1)}),
    "dilated-windows": ((6,), {"window_dimensions": (2,), "window_dilation": (3,), "padding": ((2, 0),)}),
    "holes": ((3, 2), {"window_dimensions": (2, 2), "base_dilation": (2, 3), "window_strides": (1, 2)}),
    "cut-off": ((6, 3), {"window_dimensions": (2, 1), "padding": ((-1, -2), (0, 0))}),
    "identity": ((2, 3), {"window_dimensions": (1, 1)}),
    "none-fits": ((2, 3), {"window_dimensions": (3, 1)}),
    "empty": ((0, 2), {"window_dimensions": (1, 1), "padding": ((1, 0), (0, 0))}),
}


def _windows(prim, f, identity, kinds, refuses, **kw):
    for name, (shape, slide) in _SLIDES.items():
        n = len(shape)
        params = {
            "window_strides": (1,) * n,
            "padding": ((0, 0),) * n,
            "base_dilation": (1,) * n,
            "window_dilation": (1,) * n,
            **slide,
        }
        yield Op(
            prim,
            (Arg(shape, -2, 2, distinct=kw.get("distinct", False)),),
            lambda x, p=params: window_ref(f, identity)(x, **p),
            params,
            name,
            grad=0 if name == "empty" and identity else kw.get("grad", 2),  # the value is infinite
            dtypes=kinds if name == "pairs" else ("float64",),
            refuses=refuses if name == "pairs" else (),
            out=kw.get("out"),
            linear=not identity,
            tol=2,
        )


def pick_ref(t, which, *, window_dimensions, **slide):
    """The element of each window at its position, 0 outside."""
    place = np.arange(1, t.size + 1).reshape(t.shape)
    flat = np.append(np.zeros(1, t.dtype), t)
    n = math.prod(window_dimensions)
    at = [
        window_ref(lambda w, k=k: w.reshape(-1)[k], 0)(place, window_dimensions=window_dimensions, **slide)
        for k in range(n)
    ]
    return np.take_along_axis(flat[np.stack(at).astype(np.int64)], which[None].astype(np.int64), 0)[0]


def place_ref(ct, which, *, shape, **slide):
    """The transpose of ``pick_ref``, by its matrix."""
    n = math.prod(shape)
    units = np.eye(n).reshape(n, *shape)
    picked = np.stack([pick_ref(unit, which, **slide) for unit in units]).reshape(n, -1)
    return (picked.astype(ct.dtype) @ ct.reshape(-1)).reshape(shape)


def _picks():
    for name, (shape, slide) in _SLIDES.items():
        n = len(shape)
        params = {
            "window_strides": (1,) * n,
            "padding": ((0, 0),) * n,
            "base_dilation": (1,) * n,
            "window_dilation": (1,) * n,
            **slide,
        }
        counts = reduce_window._counts(shape, **params)
        if not math.prod(shape):
            continue
        which = Arg(counts, 0, math.prod(params["window_dimensions"]) - 1, "int32")
        given = {"name": name, "grad": 2, "wrt": (0,), "linear": True, "tol": 2}
        kinds = (
            {"dtypes": ("float64", "bfloat16", "complex64")} if name == "pairs" else {"dtypes": ("float64",)}
        )
        pick, place = reduce_window.window_pick_p, reduce_window.window_place_p
        yield Op(
            pick, (Arg(shape), which), lambda t, w, p=params: pick_ref(t, w, **p), params, **given, **kinds
        )
        params = {**params, "shape": shape}
        yield Op(
            place,
            (Arg(counts), which),
            lambda ct, w, p=params: place_ref(ct, w, **p),
            params,
            **given,
            **kinds,
        )


_NOT_REAL = ("complex64", KEY)

WINDOWS = [
    *_windows(reduce_window.reduce_window_sum_p, np.sum, 0, (*NUMBERS, "complex64"), ("bool", KEY)),
    *_windows(reduce_window.reduce_window_max_p, np.max, -np.inf, FLOATS, _NOT_REAL, distinct=True),
    *_windows(reduce_window.reduce_window_min_p, np.min, np.inf, FLOATS, _NOT_REAL, distinct=True),
    *_windows(reduce_window.window_argmax_p, np.argmax, -np.inf, FLOATS, _NOT_REAL, distinct=True, grad=0, out="int32"),
    *_windows(reduce_window.window_argmin_p, np.argmin, np.inf, FLOATS, _NOT_REAL, distinct=True, grad=0, out="int32"),
    *_picks(),
]  # fmt: skip

ROWS: list[Op] = [*CONVOLUTIONS, *WINDOWS]
