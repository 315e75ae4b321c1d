"""CUDA kernels that users write: from a body and the types of its arguments to a complete source.

Kernels, stage 6 for what is written by hand: in goes the body of a kernel, a text in which arguments and results are
known by name, out goes the ``CudaSource`` that the executor compiles and launches. Sizes and types are those of the
arguments at hand, written into the source as constants, so that the compiler knows them.
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
    """A kernel, and how to launch it.

    Its parameters are pointers: to each operand in order, then to each result in order, all row-major and
    contiguous. Results are not initialised.

    Attributes:
      text: a complete translation unit of CUDA C++.
      entry: the name of the one ``extern "C" __global__`` function in it.
      grid: blocks along x, y and z. Where one is 0 there is nothing to launch.
      block: threads of a block along x, y and z.
      shared: bytes of dynamic shared memory of a block.
      resident: whether blocks go on, by the size of the grid, to what blocks behind it would do: then no more are
        launched along x than there are multiprocessors.
    """

    text: str
    entry: str
    grid: Dims
    block: Dims
    shared: int = 0
    resident: bool = False


@dataclass(frozen=True)
class Accessor:
    """What a kernel has in the place of the pointer to an argument or result: an object with ``operator[]``.

    Attributes:
      parameters: the parameters of the kernel that it is made of; of a result, its pointer is the last.
      local: its declaration in the kernel.
      text: the code of its class.
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
"""How CUDA calls the elements of arrays; complex numbers are pairs, ``.x`` and ``.y``."""

_HEADERS = {"__nv_fp8": "cuda_fp8.h", "__half": "cuda_fp16.h", "__nv_bfloat16": "cuda_bf16.h"}
"""What declares a type; included where it is used, as each costs the compiler more than a kernel does."""

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

    Of the constants (``names_for``) those are defined that the body names, before the body and outside of its braces,
    so that it may use the names for something else.

    Args:
      entry: the kernel's name.
      body: statements of CUDA C++.
      inputs, outputs: the names and types of its arguments.
      preamble: what stands before the kernel: device functions, includes.
      line: where the kernel is defined, ``file.py:12 (function)``; the compiler's errors are reported with it.
      body_line: the file and the number of the line that the body begins on, where it is known: then they are reported
        with the very line.
      accessors: for arguments and results that are computed inside of the kernel, what the body has of their names.
      extras: parameters between arguments and results.
      declared: the classes of accessors with what they need before them.
    """
    threads = int(np.prod(grid, dtype=object)) * int(np.prod(block, dtype=object))
    used = set(_WORD.findall(body))
    parameters: list[str] = []
    for n, a in inputs:
        plain = (f"const {C_TYPES[a.dtype]}* __restrict__ {n}",)
        parameters += accessors[n].parameters if n in accessors else plain
    parameters += extras
    for n, a in outputs:
        parameters.append(
            accessors[n].parameters[-1] if n in accessors else f"{C_TYPES[a.dtype]}* __restrict__ {n}"
        )
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
    """The body from the margin, each of its lines with the user's line, where a comment can be."""
    lines = textwrap.dedent(body).split("\n")
    if first is not None and "/*" not in body and 'R"' not in body:
        file, number = first
        lines = [
            f"{text}  // at {file}:{number + k}" if text.strip() and not text.endswith("\\") else text
            for k, text in enumerate(lines)
        ]
    return "\n".join(lines).strip("\n")


def names_for(arrays: Sequence[tuple[str, ShapedArray]], threads: int) -> dict[str, str]:
    """The names that a body may use beside its arguments, and their declarations.

    ``i`` is the number of the thread among all of the grid, along x. For an argument ``x``: ``x_dtype`` is the type of
    its elements, ``x_ndim`` the number of its axes, ``x_size`` that of its elements, ``x_shape_0`` the size of axis 0,
    and so on. They are ``int`` where no index can be larger, ``long long`` otherwise.
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
