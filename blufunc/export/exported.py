"""``export``: a traced program as an object, as bytes, and back.

A face over ``programs.py`` and ``files.py``, and ``jit``. In: a jitted function and the types of its arguments. Out: an
``Exported``, which every transform takes as it takes the function, and its bytes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.arrays.backend import default_device
from blufunc.core.arrays.memories import move_to
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, subjaxprs
from blufunc.core.pytree import paths, tree
from blufunc.export import files, programs, structures
from blufunc.export.values import Unreadable
from blufunc.parallel.mesh.mesh import AbstractMesh, Mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.transforms.arguments import as_values, labels_of, struct_of
from blufunc.transforms.autodiff.grad import vjp as vjp_of
from blufunc.transforms.control_flow.calls import jit_p
from blufunc.transforms.staging.jit import Jitted, dynamic_tree, jit

PLATFORMS = ("cpu", "cuda")
"""The platforms that a program may run on, by default all."""


class Exported:
    """A program with the types of its arguments.

    The result of ``export`` and of ``deserialize``.

    Attributes:
      fun_name: the name of the function.
      in_tree: the structure of ``(args, kwargs)``; out_tree: that of the result.
      in_avals, out_avals: the types of their leaves.
      platforms: where calls may run.
      jaxpr: the program, with its constants.
      version: the version of blufunc that exported it.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        in_tree: tree.TreeDef,
        out_tree: tree.TreeDef,
        platforms: Sequence[str],
        version: str,
    ):
        self.jaxpr, self.in_tree, self.out_tree = jaxpr, in_tree, out_tree
        self.platforms, self.version = tuple(platforms), version
        self._closed, self._consts = jaxpr.hoist()

    @property
    def fun_name(self) -> str:
        """The name of the function."""
        return self.jaxpr.name

    @property
    def in_avals(self) -> tuple[ShapedArray, ...]:
        """The types of the leaves of the arguments."""
        return tuple(self.jaxpr.in_avals)

    @property
    def out_avals(self) -> tuple[ShapedArray, ...]:
        """The types of the leaves of the result."""
        return tuple(self.jaxpr.out_avals)

    @property
    def effects(self) -> frozenset[str]:
        """The effects of the program: none, as callbacks are not exported."""
        return self.jaxpr.effects

    @property
    def nr_devices(self) -> int:
        """The number of devices of its meshes, or 1."""
        return max([mesh.size for mesh in _meshes(self.jaxpr)], default=1)

    @property
    def in_shardings(self) -> tuple[NamedSharding | None, ...]:
        """The sharding that the program gives each argument, or None."""
        reshards = [e for e in reversed(self.jaxpr.eqns) if e.prim.name == "reshard"]
        return self._shardings(self.jaxpr.invars, {e.invars[0]: e for e in reshards})

    @property
    def out_shardings(self) -> tuple[NamedSharding | None, ...]:
        """The sharding that the program gives each result, or None."""
        laid_out = [e for e in self.jaxpr.eqns if e.prim.name in ("reshard", "sharding_constraint")]
        return self._shardings(self.jaxpr.outvars, {e.outvars[0]: e for e in laid_out})

    def _shardings(self, atoms: Sequence[Any], eqns: dict[Any, Any]) -> tuple[NamedSharding | None, ...]:
        concrete = {m.abstract: m for m in _meshes(self.jaxpr) if isinstance(m, Mesh)}
        found: list[NamedSharding | None] = []
        for atom in atoms:
            params: Any = eqns[atom].params if atom in eqns else {"mesh": None}
            mesh: Any = concrete.get(params["mesh"], params["mesh"])  # constraints have no devices
            found.append(None if mesh is None else NamedSharding(mesh, params["spec"]))
        return tuple(found)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program, eagerly or inside of any transform.

        Args:
          args, kwargs: of the structure ``in_tree``, and the types ``in_avals``.
        Returns:
          the result, of the structure ``out_tree``.
        Raises:
          TreeError: the structure is another one.
          ShapeError, DtypeError: the type of an argument is another one.
          UnsupportedError: an argument is on a device of a platform that is not in ``platforms``.
        """
        leaves, in_tree = tree.flatten((args, kwargs))
        if in_tree != self.in_tree:
            raise errors.TreeError(
                f"the exported {self.fun_name} is called with arguments of another structure.",
                where=source.here(),
                why="; ".join(
                    paths.diff(self.in_tree, in_tree, "the exported arguments", "the arguments")[:5]
                ),
                fix="pass arguments of the structure in_tree",
            )
        values = as_values(leaves, lambda i: f"the argument {self._label(i)} of {self.fun_name}")
        for i, (x, want) in enumerate(zip(values, self.in_avals, strict=True)):
            if not x.aval.same_type(want):
                self._refuse(i, x.aval, want)
            if isinstance(x, ConcreteArray) and x.aval.ndim and x.device.platform not in self.platforms:
                raise errors.UnsupportedError(
                    f"{self.fun_name} was exported for {', '.join(self.platforms)}, and {self._label(i)} is on "
                    f"{x.device}.",
                    where=source.here(),
                    fix="export it without platforms=, or move the argument",
                )
        outs = jit_p.bind(*self._consts, *values, jaxpr=self._closed, name=self.fun_name)
        return tree.unflatten(self.out_tree, outs)

    def _label(self, i: int) -> str:
        return str(self.jaxpr.arg_names[i]) if self.jaxpr.arg_names else f"leaf {i}"

    def _refuse(self, i: int, got: ShapedArray, want: ShapedArray) -> NoReturn:
        error: type[errors.BlufuncError]
        if got.shape != want.shape:
            error, fix = errors.ShapeError, "pad the argument, or export the function for these shapes too"
        elif got.dtype != want.dtype:
            error, fix = errors.DtypeError, f"x.astype('{want.dtype.name}')"
        else:
            error, fix = errors.ArgumentError, move_to(want.memory, "x")
        raise error(
            f"the exported {self.fun_name} takes {want} for {self._label(i)}, not {got}.",
            where=source.here(),
            why="an exported program has the types that it was traced for.",
            fix=fix,
        )

    def has_vjp(self) -> bool:
        """True: a jaxpr can be differentiated."""
        return True

    def vjp(self) -> Exported:
        """The program of the cotangents, itself an exported program.

        Its arguments are the leaves of the arguments, then a cotangent for each leaf of the result; its results are
        cotangents of the leaves of the arguments, ``float0`` zeros for those that are integers.
        """
        n = len(self.in_avals)
        flat = lambda *xs: jit_p.bind(*self._consts, *xs, jaxpr=self._closed, name=self.fun_name)

        def cotangents(*xs: Any) -> tuple:
            _, pull = vjp_of(flat, *xs[:n])
            return tuple(pull(list(xs[n:])))

        cotangents.__name__ = f"vjp_{self.fun_name}"
        types = [*self.in_avals, *(a.tangent() for a in self.out_avals)]
        made = export(jit(cotangents), platforms=self.platforms)
        return made(*[struct_of(a) for a in types])

    def serialize(self, vjp_order: int = 0) -> bytearray:
        """The bytes of the program, for ``deserialize`` in any process.

        Args:
          vjp_order: a number from 0 on. The bytes hold the jaxpr, of which every derivative exists, whatever it is.
        Raises:
          ArgumentError: ``vjp_order`` is not such a number.
          UnsupportedError: the program holds what no file can; the error names the line.
        """
        if not isinstance(vjp_order, int) or isinstance(vjp_order, bool) or vjp_order < 0:
            raise errors.ArgumentError(
                f"serialize: vjp_order={vjp_order!r:.60} is no order.", where=source.here(), fix="vjp_order=0"
            )
        return files.to_bytes(*self.document())

    def document(self) -> tuple[programs.Document, dict[str, Any]]:
        """The program as tables and constants, and what is said about it."""
        about = {
            "version": self.version,
            "platforms": list(self.platforms),
            "in_tree": structures.encoded(self.in_tree),
            "out_tree": structures.encoded(self.out_tree),
        }
        return programs.encoded(self.jaxpr), about

    def as_text(self) -> str:
        """The jaxpr as text."""
        return str(self.jaxpr)

    def mlir_module(self) -> NoReturn:
        """An error: programs are jaxprs, and not StableHLO."""
        raise errors.UnsupportedError(
            "an exported program has no MLIR module.",
            where=source.here(),
            why="it is a jaxpr, which is compiled for the device that runs it.",
            fix="exported.as_text()",
        )

    def __str__(self) -> str:
        ins = ", ".join(f"{self._label(i)}: {a}" for i, a in enumerate(self.in_avals))
        outs = ", ".join(map(str, self.out_avals))
        head = (
            f"{self.fun_name}({ins}) -> {outs}  # for {', '.join(self.platforms)}, by blufunc {self.version}"
        )
        return f"{head}\n{self.jaxpr}"

    def __repr__(self) -> str:
        return f"<exported {self.fun_name}>"


def _meshes(jaxpr: Jaxpr) -> Iterator[Mesh | AbstractMesh]:
    for eqn in jaxpr.eqns:
        yield from (m for m in eqn.params.values() if isinstance(m, (Mesh, AbstractMesh)))
        for inner in subjaxprs(eqn.params):
            yield from _meshes(inner)


@dataclass(frozen=True)
class DisabledSafetyCheck:
    """A check of JAX's export, without counterpart: programs run everywhere.

    Attributes:
      name: what is not checked.
    """

    name: str

    @classmethod
    def platform(cls) -> DisabledSafetyCheck:
        """The check of the platform that a program was exported for."""
        return cls("platform")

    @classmethod
    def custom_call(cls, target_name: str) -> DisabledSafetyCheck:
        """The check of calls of a target."""
        return cls(f"custom_call:{target_name}")


def export(
    fun_jit: Any, *, platforms: Sequence[str] | None = None, disabled_checks: Sequence[Any] = ()
) -> Callable[..., Exported]:
    """A function that traces ``fun_jit`` for the types of its arguments.

        exported = export.export(bf.jit(f))(x, bf.ShapeDtypeStruct((3,), "float32"))
        blob = exported.serialize()
        export.deserialize(blob).call(x, y)   # in a process without the source of f

    Args:
      fun_jit: a function under ``jit``. Its static arguments become part of the program, and are left out of calls.
      platforms: where the program may run, of ``cpu`` and ``cuda``; default all. One program serves all of them.
      disabled_checks: ``DisabledSafetyCheck``, without effect: there are no such checks.
    Returns:
      a function of arrays, or ``ShapeDtypeStruct``, that returns an ``Exported``.
    Raises:
      ArgumentError: ``fun_jit`` is not jitted, or a platform is unknown.
      UnsupportedError: ``disabled_checks`` are something else.
    """
    if not isinstance(fun_jit, Jitted):
        raise errors.ArgumentError(
            f"export takes a function under jit, not {fun_jit!r:.60}.",
            where=source.here(),
            fix="export.export(bf.jit(f))(*args)",
        )
    if any(not isinstance(check, DisabledSafetyCheck) for check in disabled_checks):
        raise errors.UnsupportedError(
            f"export: disabled_checks={disabled_checks!r:.60}.",
            where=source.here(),
            why="what a program cannot hold is always an error.",
            fix="leave it out, or give DisabledSafetyCheck, which have no effect",
        )
    chosen = _platforms(platforms)

    @functools.wraps(fun_jit.fun)
    def traced(*args: Any, **kwargs: Any) -> Exported:
        found = fun_jit.trace(*args, **kwargs)
        closed, consts = found.entry.jaxpr, found.entry.consts
        n = len(consts)
        labels = labels_of(fun_jit.fun, found.in_tree)
        jaxpr = closed.replace(
            invars=closed.invars[n:], constvars=closed.invars[:n], consts=consts, arg_names=labels
        )
        exported = Exported(jaxpr, dynamic_tree(found.in_tree), found.entry.out_tree, chosen, _version())
        exported.document()  # what no file can hold is an error now
        return exported

    return traced


def _version() -> str:
    return sys.modules["blufunc"].__version__  # the facade, which no module imports


def _platforms(platforms: Any) -> tuple[str, ...]:
    if platforms is None:
        return PLATFORMS
    listed = [platforms] if isinstance(platforms, str) else list(platforms)
    named = ["cuda" if p == "gpu" else p for p in listed]
    unknown = [p for p in named if p not in PLATFORMS]
    if unknown or not named:
        raise errors.ArgumentError(
            f"export: platforms={platforms!r:.60}.",
            where=source.here(),
            fix=f"platforms={PLATFORMS}, or some of these",
        )
    return tuple(dict.fromkeys(named))


def deserialize(blob: Any) -> Exported:
    """The program of bytes that ``Exported.serialize`` wrote.

    No code of the file runs. A program with shardings needs a mesh: the current one (``with mesh:``) if it has the
    axes of the program's, else one of the first devices.

    Args:
      blob: the bytes.
    Raises:
      ArgumentError: ``blob`` is not bytes.
      DataError: the bytes are damaged, or of another version.
      UnsupportedError: the program has a primitive or a class that this process does not have.
      ShardingError: there are fewer devices than its meshes have.
    """
    document, about = files.from_bytes(blob)
    try:
        jaxpr = programs.decoded(document)
        in_tree, out_tree = structures.decoded(about["in_tree"]), structures.decoded(about["out_tree"])
        return Exported(jaxpr, in_tree, out_tree, about["platforms"], about["version"])
    except errors.BlufuncError:
        raise
    except (Unreadable, LookupError, TypeError, ValueError, AttributeError, ImportError) as error:
        raise errors.DataError(
            "the exported program cannot be read",
            where=source.here(),
            why=f"blufunc {about.get('version')!r:.40} wrote it, and this is {_version()}: {error}",
            fix="load it with that version, or export it again with this one",
        ) from error


def symbolic_shape(shape_spec: Any, **options: Any) -> NoReturn:
    """An error: a program is of arrays of fixed sizes."""
    raise errors.UnsupportedError(
        f"export.symbolic_shape({shape_spec!r:.60}).",
        where=source.here(),
        why="programs have the sizes that they were traced for, and are compiled for these.",
        fix="export one program for each size, or for the largest and pad to it",
    )


symbolic_args_specs = symbolic_shape


def is_symbolic_dim(d: Any) -> bool:
    """False: sizes are integers."""
    return False


def default_export_platform() -> str:
    """The platform of the default device."""
    return default_device().platform
