"""Accessors: fused arguments and results of a user's CUDA kernel.

Kernels, stage 6. In: a ``FusedUserKernel``. Out: its ``CudaSource``, where accessors replace pointers: ``x[at]``
computes the element from the leaves, and ``out[at] = v`` computes what is stored from ``v``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blufunc.core.ir.avals import ShapedArray
from blufunc.kernels.backends.cuda.render.device_functions import function, plain
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.kernels.ops.fused_user_kernel import FusedUserKernel, Points, fused_user_kernel_p
from blufunc.kernels.user_kernel import C_TYPES, Accessor, CudaSource

_READER = """struct {name}_reader {{
    {members}
    inline {user} operator[](long long at) const {{
        {register} value;
        {name}_points(Tables(), {arguments}value);
        const {storage} stored = {stored};
        return reinterpret_cast<const {user} &>(stored);
    }}
}};
"""

_WRITER = """struct {name}_writer {{
    {members}
    struct Element {{
        const {name}_writer &all;
        long long at;
        inline void operator=({user} given) const {{
            {register} value;
            {name}_points(Tables(), {arguments}value);
            const {storage} stored = {stored};
            all.out[at] = reinterpret_cast<const {result} &>(stored);
        }}
    }};
    inline Element operator[](long long at) const {{ return {{*this, at}}; }}
}};
"""


def source_of(*avals: ShapedArray, kernel: FusedUserKernel) -> CudaSource:
    """The user's kernel with accessors."""
    typed = kernel.kernel
    rest = iter(avals)
    accessors = {}
    for n, (name, aval) in enumerate(typed.inputs):
        points = kernel.readers.get(n)
        leaves = [next(rest) for _ in (points.numbers if points else (None,))]
        if points is not None:
            accessors[name] = _reader(name, aval.dtype, points, leaves)
    extras = []
    for n, (name, aval) in enumerate(typed.outputs):
        points = kernel.writers.get(n)
        if points is not None:
            accessor = _writer(name, aval.dtype, points, [next(rest) for _ in points.numbers])
            extras += accessor.parameters[:-1]
            accessors[name] = accessor
    return typed.cuda_source(
        accessors, extras, lambda text: f"namespace fused {{\n{DEVICE.with_prelude(text)}}}\n"
    )


def _reader(name: str, dtype: np.dtype, points: Points, leaves: Sequence[ShapedArray]) -> Accessor:
    pointers = [f"{name}_leaf{i}" for i in range(len(leaves))]
    values = [_loaded(p, "", n, a) for p, n, a in zip(pointers, points.numbers, leaves, strict=True)]
    return _accessor(_READER, name, dtype, dtype, points, pointers, values, leaves, [])


def _writer(name: str, dtype: np.dtype, points: Points, leaves: Sequence[ShapedArray]) -> Accessor:
    pointers = [f"{name}_leaf{i}" for i in range(len(leaves))]
    values = [_loaded(p, "all.", n, a) for p, n, a in zip(pointers, points.numbers, leaves, strict=True)]
    stored = points.jaxpr.out_avals[0].dtype
    result = f"{C_TYPES[stored]} *out;"
    first = _in_register("given", dtype)
    return _accessor(_WRITER, name, dtype, stored, points, pointers, [first, *values], leaves, [result])


def _accessor(
    template: str,
    name: str,
    user: np.dtype,
    stored: np.dtype,
    points: Points,
    pointers: Sequence[str],
    values: Sequence[str],
    leaves: Sequence[ShapedArray],
    more: Sequence[str],
) -> Accessor:
    numbers = [f"n{i}" for i in range(len(values))]
    code = function(plain(points.jaxpr), f"{name}_points", 0, numbers, ["value"], indices=False)
    members = [f"const {C_TYPES[a.dtype]} *{p};" for p, a in zip(pointers, leaves, strict=True)]
    text = template.format(
        name=name,
        members="\n    ".join([*members, *more]),
        user=C_TYPES[user],
        register=scalar_ops.register_type(stored),
        storage=scalar_ops.storage_type(stored),
        result=C_TYPES[stored],
        arguments="".join(f"{v}, " for v in values),
        stored=scalar_ops.stored("value", stored),
    )
    kind = "writer" if more else "reader"
    parameters = [
        f"const {C_TYPES[a.dtype]} *__restrict__ {p}" for p, a in zip(pointers, leaves, strict=True)
    ]
    names = list(pointers)
    if more:
        parameters.append(f"{C_TYPES[stored]} *__restrict__ {name}_result")
        names.append(f"{name}_result")
    local = f"const fused::{name}_{kind} {name}{{{', '.join(names)}}};"
    return Accessor(tuple(parameters), local, code + text)


def _loaded(pointer: str, owner: str, number: bool, aval: ShapedArray) -> str:
    return _in_register(f"{owner}{pointer}[{'0' if number else 'at'}]", aval.dtype)


def _in_register(element: str, dtype: np.dtype) -> str:
    """An element of the user's type as a scalar of blufunc's."""
    return scalar_ops.loaded(f"reinterpret_cast<const {scalar_ops.storage_type(dtype)} &>({element})", dtype)


fused_user_kernel_p.cuda_source = source_of  # type: ignore[method-assign]
