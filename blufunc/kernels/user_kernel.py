"""Source of user-written CUDA kernels: from a body to a translation unit.

Kernels, stage 6 for hand-written kernels. In: the body of a kernel, which names its arguments and results, and their
types. Out: the ``CudaSource`` that the executor compiles and launches. Sizes and types are constants in the source, so
that the compiler knows them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray

Dims = tuple[int, int, int]


@dataclass(frozen=True)
class CudaSource:
    """A kernel and its launch configuration.

    Its parameters are pointers: to each operand in order, then to each result in order, all row-major and contiguous.
    Results are not initialised.

    Attributes:
      text: a complete translation unit of CUDA C++.
      entry: the name of the one ``extern "C" __global__`` function in it.
      grid: blocks along x, y and z. Where one is 0 there is nothing to launch.
      block: threads of a block along x, y and z.
      shared: bytes of dynamic shared memory per block; default 0.
      resident: whether blocks loop with a grid stride: then at most one block per SM is launched in x; default False.
    """

    text: str
    entry: str
    grid: Dims
    block: Dims
    shared: int = 0
    resident: bool = False


@dataclass(frozen=True)
class Accessor:
    """An object with ``operator[]`` in place of a pointer argument of a kernel.

    Attributes:
      parameters: the kernel parameters that it reads; for a result, its pointer is the last.
      local: its declaration in the kernel.
      text: the source of its class.
    """

    parameters: tuple[str, ...]
    local: str
    text: str


C_TYPES: dict[np.dtype, str] = {
    dtypes.bool_: "bool",
    dtypes.int8: "signed char",
    dtypes.int16: "short",
    dtypes.int32: "int",
    dtypes.int64: "long long",
    dtypes.uint8: "unsigned char",
    dtypes.uint16: "unsigned short",
    dtypes.uint32: "unsigned int",
    dtypes.uint64: "unsigned long long",
    dtypes.float8_e4m3fn: "__nv_fp8_e4m3",
    dtypes.float8_e5m2: "__nv_fp8_e5m2",
    dtypes.float16: "__half",
    dtypes.bfloat16: "__nv_bfloat16",
    dtypes.float32: "float",
    dtypes.float64: "double",
    dtypes.complex64: "float2",
    dtypes.complex128: "double2",
}
"""CUDA's types of array elements; complex ones are pairs, ``.x`` and ``.y``."""

_HEADERS = {"__nv_fp8": "cuda_fp8.h", "__half": "cuda_fp16.h", "__nv_bfloat16": "cuda_bf16.h"}
"""Headers of types, included only if used: they are slow to compile."""

_LARGEST_INT = 2**31 - 1
_WORD = re.compile(r"[A-Za-z_]\w*")


def write(
    entry: str,
    body: str,
    inputs: Sequence[tuple[str, ShapedArray]],
    outputs: Sequence[tuple[str, ShapedArray]],
    *,
    grid: Dims,
    block: Dims,
    shared: int,
    preamble: str,
    line: str,
    body_line: tuple[str, int] | None = None,
    accessors: Mapping[str, Accessor] = MappingProxyType({}),
    extras: Sequence[str] = (),
    declared: Callable[[str], str] = str,
) -> CudaSource:
    """The source of a kernel.

    The constants (``names_for``) that the body names are defined before its braces, so that it may redefine them.

    Args:
      entry: the kernel's name.
      body: statements of CUDA C++.
      inputs, outputs: the names and types of its arguments.
      grid, block, shared: as in ``CudaSource``.
      preamble: source that precedes the kernel: device functions, includes.
      line: where the kernel is defined, ``file.py:12 (function)``; compiler errors name it.
      body_line: file and line at which the body begins, if known: compiler errors then name the exact line.
      accessors: the accessor of each argument or result that is computed in the kernel.
      extras: parameters between arguments and results.
      declared: adds the declarations that the accessors' classes need.
    """
    threads = int(np.prod(grid, dtype=object)) * int(np.prod(block, dtype=object))
    used = set(_WORD.findall(body))
    pointers = {n: f"const {C_TYPES[a.dtype]}* __restrict__ {n}" for n, a in inputs}
    pointers |= {n: f"{C_TYPES[a.dtype]}* __restrict__ {n}" for n, a in outputs}
    parameters = [
        p for n, _ in inputs for p in (accessors[n].parameters if n in accessors else [pointers[n]])
    ]
    parameters += extras
    parameters += [accessors[n].parameters[-1] if n in accessors else pointers[n] for n, _ in outputs]
    classes = "struct Tables {};\n" + "".join(a.text for a in accessors.values())
    constants = names_for([*inputs, *outputs], threads)
    lines = [f"{text};" for name, text in constants.items() if name in used]
    lines += [a.local for a in accessors.values()]
    body = textwrap.indent(_with_lines(body, body_line), " " * 8)
    head = f'extern "C" __global__ void __launch_bounds__({int(np.prod(block))})\n{entry}('
    pieces = [
        *_includes(" ".join([*parameters, *[a.text for a in accessors.values()], preamble, body])),
        *([declared(classes)] if accessors else []),
        *([f"// at {line}", textwrap.dedent(preamble).strip("\n")] if preamble else []),
        head + ",\n    ".join(parameters) + ")",
        "{",
        *textwrap.indent("\n".join(lines), "    ").splitlines(),
        "    {",
        f"        // at {line}",
        body,
        "    }",
        "}",
    ]
    return CudaSource("\n".join(pieces) + "\n", entry, grid, block, shared)


def _with_lines(body: str, first: tuple[str, int] | None) -> str:
    """The dedented body, each line with a comment that names the user's line."""
    lines = textwrap.dedent(body).split("\n")
    if first is not None and "/*" not in body and 'R"' not in body:
        file, number = first
        lines = [
            f"{text}  // at {file}:{number + k}" if text.strip() and not text.endswith("\\") else text
            for k, text in enumerate(lines)
        ]
    return "\n".join(lines).strip("\n")


def names_for(arrays: Sequence[tuple[str, ShapedArray]], threads: int) -> dict[str, str]:
    """The names that a body may use besides its arguments, and their declarations.

    ``i`` is the index of the thread in the grid, along x. For an argument ``x``: ``x_dtype`` is its element type,
    ``x_ndim`` its number of axes, ``x_size`` its number of elements, ``x_shape_0`` the size of axis 0, and so on. They
    are ``int`` if every index fits, else ``long long``.
    """
    wide = max(threads, *(a.size for _, a in arrays)) > _LARGEST_INT
    index = "long long" if wide else "int"
    found = {"i": f"const {index} i = {'(long long)' if wide else ''}blockIdx.x * blockDim.x + threadIdx.x"}
    for name, aval in arrays:
        found[f"{name}_dtype"] = f"typedef {C_TYPES[aval.dtype]} {name}_dtype"
        found[f"{name}_ndim"] = f"constexpr int {name}_ndim = {aval.ndim}"
        found[f"{name}_size"] = f"constexpr {index} {name}_size = {aval.size}"
        for axis, size in enumerate(aval.shape):
            found[f"{name}_shape_{axis}"] = f"constexpr {index} {name}_shape_{axis} = {size}"
    return found


def _includes(text: str) -> list[str]:
    return [f"#include <{header}>" for word, header in _HEADERS.items() if word in text]
