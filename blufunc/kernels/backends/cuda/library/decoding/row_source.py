"""CUDA C++ that computes the rows of a GEMM of few rows.

Kernels, stage 6, below ``skinny_gemm.py``. In: a ``Rows`` and the dtypes of its arrays. Out: the structure ``Rows`` of
``include/skinny_gemm.cuh``: a warp takes a row, and goes over its terms once per pass, 8 of a lane at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.kernels.backends.cuda.render import device_functions
from blufunc.kernels.codegen.scopes import indented
from blufunc.kernels.ops.row_gemm import Rows


@dataclass(frozen=True)
class _Array:
    """An array in memory: its elements are ``name``, and ``pointer`` is a member.

    Attributes:
      place: the element at term ``k`` of row ``m``; empty for a scalar.
    """

    name: str
    pointer: str
    kind: str
    place: str


def structure(rows: Rows, wide: Sequence[bool]) -> str:
    """The functions of an element, and the structure with a loop for each.

    Args:
      wide: of each array, whether it is of float32, not of the dtype of the rows.
    """
    places = {"matrix": "m * K + k", "vector": "k", "scalar": ""}
    arrays = [
        _Array(f"a{i}", f"r{i}", "float" if w else "element", places[kind])
        for i, (kind, w) in enumerate(zip(rows.kinds, wide, strict=True))
    ]
    members = [f"const {a.kind} *{a.pointer};" for a in arrays]
    functions, body, sums = [], list[str](), list[str]()
    for n, (one, monoids) in enumerate(zip([*rows.passes, rows.result], [*rows.monoids, ()], strict=True)):
        results = [f"v{i}" for i in range(len(one.outvars))]
        known = [*(a.name for a in arrays), *sums]
        functions.append(device_functions.function(one, f"pass_{n}", 0, known, results))
        body += _pass(n, one, arrays, sums, monoids)
        sums += _sums(n, monoids)
    numbers = [f"const float {a.name} = *{a.pointer};" for a in arrays if not a.place]
    compute = [
        "inline void compute(element *to) const {",
        "  const int lane = threadIdx.x % 32;",
        *indented(numbers),
        "  for (int m = threadIdx.x / 32; m < M; m += WARPS) {",
        *indented(indented(body)),
        "  }",
        "}",
    ]
    return "\n".join([*functions, "struct Rows {", *indented([*members, *compute]), "};"]) + "\n"


def _sums(n: int, monoids: Sequence[str]) -> list[str]:
    """The variables of what a pass reduces."""
    return [f"s{n}_{i}" for i in range(len(monoids))]


def _pass(
    n: int, function: Jaxpr, arrays: Sequence[_Array], known: Sequence[str], monoids: Sequence[str]
) -> list[str]:
    """The loop over a row that reduces numbers or, without any, stores the result."""
    read = {v for e in function.eqns for v in e.invars} | set(function.outvars)
    given = zip(arrays, function.invars, strict=False)
    loaded = [a for a, v in given if a.place and v in read]
    elements = [f"{a.name}[j]" if a in loaded else "0.0f" if a.place else a.name for a in arrays]
    sums, kinds = _sums(n, monoids), [f"Row{monoid.capitalize()}" for monoid in monoids]
    results = [f"v{i}" for i in range(len(monoids))]
    call = f"pass_{n}({', '.join(['Tables{}', *elements, *known, *(results or ['x[j]'])])});"
    joins = [f"{s} = {kind}::join({s}, {v});" for s, kind, v in zip(sums, kinds, results, strict=True)]
    each = " ".join([f"float {', '.join(results)};", call, *joins]) if monoids else call
    return [
        *(f"float {s} = {kind}::start();" for s, kind in zip(sums, kinds, strict=True)),
        "#pragma unroll 4",
        "for (int k = lane * 8; k < K; k += 256) {",
        *(f"  float {a.name}[8];" for a in loaded),
        *(f"  load_elements({a.name}, {a.pointer} + {a.place});" for a in loaded),
        *([] if monoids else ["  float x[8];"]),
        "#pragma unroll",
        f"  for (int j = 0; j < 8; ++j) {{ {each} }}",
        *([] if monoids else ["  store_elements(to + m * ROW + k, x);"]),
        "}",
        *(f"{s} = reduced<{kind}>({s});" for s, kind in zip(sums, kinds, strict=True)),
    ]
