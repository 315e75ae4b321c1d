"""C++ and CUDA sources from files, and the preludes of generated kernels.

Kernels, stage 6. In: the path of a ``.h`` or ``.cuh`` file in ``blufunc/kernels``. Out: its source, whole or in parts,
after constants. A part begins with a line ``//# name``; what precedes the first part is for readers only. Files are C++
that an editor and ``clang-format`` understand: sizes and flags reach them as constants that are declared first, never
by formatting strings.

A **prelude** declares the functions that a generated kernel uses, and no others: a whole prelude would take a compiler
longer than the kernel does. Functions have one name on both machines, so that a kernel's arithmetic is written once:
``bf_p`` for the elementwise primitive ``p``, ``to_float`` and ``from_float<T>`` for storage types, ``c64`` and
``c128``. ``DEVICE`` and ``HOST`` say whose parts declare them.
"""

from __future__ import annotations

import functools
import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from blufunc import errors

# -- files ------------------------------------------------------------------------------------------

_PACKAGE = "blufunc.kernels"
_HEAD = re.compile(r"^//# (.*)\n", re.MULTILINE)

Constant = bool | int | str


@functools.cache
def parts(path: str) -> Mapping[str, str]:
    """Parts of a file in their order, by the words of their first lines.

    Args:
      path: of the file, from ``blufunc/kernels`` on.
    """
    data = pkgutil.get_data(_PACKAGE, path)
    assert data is not None, path
    return MappingProxyType(split(data.decode()))


def split(text: str) -> dict[str, str]:
    """Parts of a source in their order, by the words of their first lines."""
    _, *found = _HEAD.split(text)
    return {name: part.strip() + "\n" for name, part in zip(found[::2], found[1::2], strict=True)}


def source(path: str, *names: str, **constants: Constant) -> str:
    """Source of some parts of a file, or of all, after the constants that it needs.

    Args:
      path: of the file, from ``blufunc/kernels`` on.
      names: of parts; none for the whole file.
      constants: as of ``declared``.
    """
    found = parts(path)
    return declared(**constants) + "\n".join(found[name] for name in names or found)


def declared(**constants: Constant) -> str:
    """Declarations: integers and booleans as ``constexpr``, strings as macros."""
    return "".join(f"{_declaration(name, value)}\n" for name, value in constants.items())


def _declaration(name: str, value: Constant) -> str:
    if isinstance(value, str):
        return f"#define {name} {value}"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    return f"constexpr int {name} = {value};"


# -- preludes ---------------------------------------------------------------------------------------

_NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', re.DOTALL)  # comments and strings
_WORD = re.compile(r"[A-Za-z_]\w*")
_COMPLEX = "complex"
"""Last word of the head of a part that only kernels with complex numbers take."""
_COMPLEX_TYPES = frozenset({"Complex", "c64", "c128"})


@dataclass(frozen=True)
class Part:
    """A piece of a prelude.

    Attributes:
      names: what it declares.
      for_complex: whether only kernels that use one of ``c64``, ``c128`` and ``Complex`` take it.
      source: C++.
      uses: the names of other parts in the source.
    """

    names: tuple[str, ...]
    for_complex: bool
    source: str
    uses: frozenset[str]


class Prelude:
    """The functions of one machine.

    Args:
      machine: its name in errors.
      files: paths of sources, each after those that it uses.
      overrides: paths of sources whose parts replace parts of ``files`` with the same names.
      absent: names that the machine does not have.
      fix: of the error for an unknown name.
      around: C++ before and after the declarations.
    """

    def __init__(
        self,
        machine: str,
        files: Sequence[str],
        fix: str,
        overrides: Sequence[str] = (),
        absent: Iterable[str] = (),
        around: tuple[str, str] = ("", ""),
    ):
        self._machine, self._fix, self._absent = machine, fix, frozenset(absent)
        self._files, self._overrides = tuple(files), tuple(overrides)
        self._around = around

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts, each after those that it uses."""
        own = _read(self._overrides)
        placed = {(name, is_complex) for names, is_complex, _ in own for name in names}
        shared = [
            part for part in _read(self._files)
            if not self._absent.intersection(part[0]) and not any((name, part[1]) in placed for name in part[0])
        ]  # fmt: skip
        declared = frozenset(name for names, _, _ in own + shared for name in names)
        found = tuple(
            Part(names, is_complex, source, (declared & _words(source)).difference(names))
            for names, is_complex, source in own + shared
        )
        return _in_order(found) if self._overrides else found

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """All names that the prelude can declare."""
        return frozenset(name for part in self.parts for name in part.names)

    def used_names(self, source: str) -> frozenset[str]:
        """Names of the prelude in the source of a kernel."""
        return self.names & _words(source)

    def source(self, requested: Iterable[str]) -> str:
        """C++ that declares some names and their dependencies.

        Functions of complex numbers are declared if one of ``c64``, ``c128`` and ``Complex`` is.

        Raises:
          UnsupportedError: a name is unknown.
        """
        before, after = self._around
        return before + "".join(part.source for part in self.chosen_parts(frozenset(requested))) + after

    @functools.lru_cache(2048)  # noqa: B019 - there are two preludes
    def chosen_parts(self, requested: frozenset[str]) -> tuple[Part, ...]:
        """The parts of ``source(requested)``, in their order."""
        if unknown := requested - self.names:
            raise errors.UnsupportedError(
                f"the {self._machine} prelude has no {', '.join(sorted(unknown))}.",
                why="a kernel can only use operations with C++ source in the prelude.",
                fix=self._fix,
            )
        needed, chosen, grown = set(requested), set(), True
        while grown:
            grown = False
            for part in self.parts:
                fits = not part.for_complex or needed & _COMPLEX_TYPES
                if part not in chosen and fits and needed.intersection(part.names):
                    chosen.add(part)
                    needed |= part.uses
                    grown = True
        return tuple(part for part in self.parts if part in chosen)

    def with_prelude(self, source: str) -> str:
        """A kernel's source after its prelude."""
        return self.source(self.used_names(source)) + source


def _read(files: Iterable[str]) -> list[tuple[tuple[str, ...], bool, str]]:
    """Names, kind and source of the parts of some files."""
    found = []
    for file in files:
        for head, source in parts(file).items():
            words = head.split()
            is_complex = words[-1] == _COMPLEX
            found.append((tuple(words[: len(words) - is_complex]), is_complex, source))
    return found


def _words(source: str) -> frozenset[str]:
    return frozenset(_WORD.findall(_NO_CODE.sub("", source)))


def _in_order(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Parts in dependency order, as templates require."""
    makers: dict[str, list[Part]] = {}
    for part in parts:
        for name in part.names:
            makers.setdefault(name, []).append(part)
    ordered: dict[Part, None] = {}
    entered: set[Part] = set()

    def visit(part: Part) -> None:
        if part in entered:
            return
        entered.add(part)
        for name in sorted(part.uses.union(part.names)):
            for maker in makers[name]:
                # overloads for real numbers precede those for complex ones, which call them
                if maker.for_complex <= part.for_complex:
                    visit(maker)
        ordered[part] = None

    for part in parts:
        visit(part)
    return tuple(ordered)


_SHARED = ("codegen/include/bf_scalar.h", "codegen/include/bf_complex.h")

DEVICE = Prelude(
    "CUDA",
    (*_SHARED, "backends/cuda/include/reduce.cuh", "backends/cuda/include/cluster.cuh"),
    fix="leave the operation to the library or the host (see codegen.source_files.DEVICE.names)",
)
"""Functions of CUDA devices."""

_HOST_AROUND = (
    "namespace {\n#define inline inline __attribute__((always_inline))\n",
    "#undef inline\n}\n",
)
"""A namespace that keeps libraries apart, of functions that are always inlined.
Beyond some 35 calls per kernel, GCC's limits on growth would leave calls, and loops with calls are not vectorized."""

HOST = Prelude(
    "host",
    _SHARED,
    fix="leave the operation to NumPy (see codegen.source_files.HOST.names)",
    overrides=tuple(f"backends/cpu/include/bf_{name}.h" for name in ("scalar", "math", "complex")),
    absent=(
        "bf_erfcx",
        "ptx_exp",
        "ptx_exp_ftz",
        "ptx_logistic",
        "ptx_max",
        "ptx_min",
        "ptx_rcp",
    ),  # libm has no erfcx
    around=_HOST_AROUND,
)
"""Functions of the host."""
