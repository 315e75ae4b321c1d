"""What stands before a generated CUDA kernel: the device functions that it uses, and no others.

Kernels, stage 6: in come the names that a kernel's text uses, out goes the text that declares them. The parts stand
in ``codegen/scalar_source``, ``codegen/complex_source``, ``reduce_source`` and ``backends/cuda/schedule/clusters``,
each below those that it needs, so that the parts chosen are in order as they stand. A whole prelude would take a
compiler longer than the kernel does.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from blufunc import errors
from blufunc.kernels.backends.cuda.render.reduce_source import COOPERATIVE
from blufunc.kernels.backends.cuda.schedule.clusters import CLUSTERS
from blufunc.kernels.codegen.complex_source import COMPLEX
from blufunc.kernels.codegen.scalar_source import SCALAR

_HEAD = re.compile(r"^//# (.*)\n", re.MULTILINE)
_NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', re.DOTALL)  # comments and strings
_WORD = re.compile(r"[A-Za-z_]\w*")
_GROUPS = {"complex": {"Complex", "c64", "c128"}}
"""The groups of parts, each with the names of which a kernel that has parts of the group uses one."""


@dataclass(frozen=True)
class Part:
    """A piece of the prelude.

    Attributes:
      names: what it declares.
      group: the key of ``_GROUPS`` that it is for; None for all kernels.
      text: C++.
      uses: the names of other parts in the text.
    """

    names: tuple[str, ...]
    group: str | None
    text: str
    uses: frozenset[str]


@functools.cache
def parts() -> tuple[Part, ...]:
    """All parts, in their order."""
    found = []
    for source in (SCALAR, COMPLEX, COOPERATIVE, CLUSTERS):
        heads = list(_HEAD.finditer(source))
        ends = [h.start() for h in heads[1:]] + [len(source)]
        for head, end in zip(heads, ends, strict=True):
            words = head[1].split()
            group = words.pop() if words[-1] in _GROUPS else None
            found.append((tuple(words), group, source[head.end() : end].strip() + "\n"))
    declared = frozenset(name for names, _, _ in found for name in names)
    return tuple(
        Part(names, group, text, (declared & _words(text)).difference(names)) for names, group, text in found
    )


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(_NO_CODE.sub("", text)))


@functools.cache
def names() -> frozenset[str]:
    """Everything that a prelude can declare."""
    return frozenset(name for part in parts() for name in part.names)


def used_names(source: str) -> set[str]:
    """The names of the prelude that the text of a kernel uses."""
    return set(names() & _words(source))


def prelude(wanted: Iterable[str]) -> str:
    """The text that declares ``wanted`` and what they need.

    Functions of complex numbers are declared for kernels that want one of ``c64``, ``c128`` and ``Complex`` too.

    Raises:
      UnsupportedError: there is no such name.
    """
    return "".join(part.text for part in chosen_parts(frozenset(wanted)))


@functools.lru_cache(1024)
def chosen_parts(wanted: frozenset[str]) -> tuple[Part, ...]:
    """The parts of ``prelude(wanted)``, in their order."""
    if unknown := wanted - names():
        raise errors.UnsupportedError(
            f"the CUDA prelude has no {', '.join(sorted(unknown))}.",
            why="a kernel is generated from operations with device code of their own.",
            fix="leave the operation to the library or the host (see cuda_prelude.names())",
        )
    needed, chosen = set(wanted), set()
    grown = True
    while grown:
        grown = False
        for i, part in enumerate(parts()):
            if i not in chosen and needed.intersection(part.names) and _in_group(part, needed):
                chosen.add(i)
                needed |= part.uses
                grown = True
    return tuple(parts()[i] for i in sorted(chosen))


def _in_group(part: Part, needed: set[str]) -> bool:
    return part.group is None or bool(_GROUPS[part.group] & needed)


def with_prelude(source: str) -> str:
    """A kernel's text behind the prelude that it needs."""
    return prelude(used_names(source)) + source
