"""``shard_map``: a function of shards that every rank of a mesh runs.

Parallel, stages 1, 2 and 8. In: a function of local shapes, and the specs of its arguments and results. Out: one
``shard_map`` equation on global values, which holds the local jaxpr with typed collectives (``axis_types``). Its
derivatives and batches are ``shard_map`` equations of the transformed local jaxpr, whose specs follow the operands: a
tangent has the spec of its primal, a cotangent the same with unreduced and reduced swapped.

On one process it runs eagerly on arrays: it splits them by their specs, each rank runs the compiled local jaxpr in a
thread (``runtime/simulated``), and the results are assembled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from itertools import compress
from typing import Any, ParamSpec, TypeVar, overload

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, eval_jaxpr
from blufunc.core.ir.trace import Body, new_trace, state
from blufunc.core.primitives.linear_ops import move_dim, reshape
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.primitives.tangents import is_linear, is_nonzero, zero
from blufunc.core.programs import simplify
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.parallel.collectives import typed_rules  # noqa: F401  (adds the types of custom derivatives)
from blufunc.parallel.collectives.axis_casts import Types
from blufunc.parallel.collectives.axis_types import typed
from blufunc.parallel.collectives.primitives import (
    equations,
    keep_first_p,
    mesh_all_gather_p,
    pcast_p,
    psum_invariant_p,
    shard_slice_p,
)
from blufunc.parallel.collectives.typed_trace import TypedTrace
from blufunc.parallel.mesh.mesh import AbstractMesh, AxisSizes, ManualMesh, Mesh, current_mesh, manual_mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec, names_of
from blufunc.parallel.mesh.spec_trees import broadcast, check_rank
from blufunc.parallel.runtime.sharded_buffer import assemble
from blufunc.parallel.runtime.simulated import run_ranks
from blufunc.transforms.arguments import FlatFunction, as_values, check_callable, labels_of, name_of
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.autodiff.linearize import linearize_jaxpr, split_jaxpr
from blufunc.transforms.autodiff.transpose import transpose_jaxpr
from blufunc.transforms.batching.batch import Axis, MeshAxis, batch_jaxpr

P = ParamSpec("P")
R = TypeVar("R")

Specs = tuple[PartitionSpec, ...]
_WHOLE = PartitionSpec()


class _ShardMap(Primitive):
    """Every rank of ``mesh`` runs ``jaxpr``, of local shapes and without constants.

    Params: jaxpr; mesh, a ``Mesh`` or ``AbstractMesh``; in_specs and out_specs, one per operand and result; name; auto,
    the axes over which ``partition`` may shard the body, for which it is a global program. Where the body is not
    partitioned, ranks along them compute the same.
    """

    name, kind, multiple_results = "shard_map", "mesh", True

    def effects_of(self, params):
        return params["jaxpr"].effects

    def abstract(self, *avals, jaxpr: Jaxpr, mesh, in_specs: Specs, out_specs: Specs, name: str, auto):
        for local, spec, aval in zip(jaxpr.in_avals, in_specs, avals, strict=True):
            shape = NamedSharding(mesh, spec).shard_shape(aval.shape)
            if shape != local.shape or local.dtype != aval.dtype:
                raise errors.ShapeError(f"shard_map: the body takes {local} where the operands give {aval}.")
        return [_global_type(v, mesh, s) for v, s in zip(jaxpr.out_avals, out_specs, strict=True)]

    def sharding_of(self, n, *, mesh, out_specs: Specs, **params):
        return NamedSharding(mesh, out_specs[n])

    def shown(self, params):
        jaxpr = with_local_types(params["jaxpr"], params["mesh"], params["in_specs"])
        shown = {**params, "jaxpr": jaxpr}
        if not params["auto"]:
            del shown["auto"]
        return shown

    def reference(self, compile, *, jaxpr: Jaxpr, mesh, in_specs: Specs, out_specs: Specs, name: str, auto):
        if isinstance(mesh, Mesh) and mesh.spans_processes:
            raise errors.ShardingError(
                f"shard_map of {name} got no array on mesh({mesh}), which spans several processes.",
                where=source.here(),
                why="a program runs where its arguments are.",
                fix="put them there: bf.device_put(x, NamedSharding(mesh, spec))",
            )
        program = jaxpr.memoised(
            "mesh program",
            lambda: backend.host_device().backend.compile(jaxpr, (False,) * len(jaxpr.invars)),
        )

        whole = [_global_type(v, mesh, s) for v, s in zip(jaxpr.out_avals, out_specs, strict=True)]

        def run(buffers):
            parts = [divide(b, mesh, s) for b, s in zip(buffers, in_specs, strict=True)]
            locals_ = run_ranks(mesh, lambda rank: program([p[rank] for p in parts]))
            columns = zip(out_specs, whole, zip(*locals_, strict=True), strict=True)
            return [
                assemble(NamedSharding(mesh, spec), aval.shape, aval.dtype, parts.__getitem__)
                for spec, aval, parts in columns
            ]

        return run

    # -- transforms ----------------------------------------------------------------------------

    def call(self, jaxpr: Jaxpr, args: Sequence, in_specs: Sequence, out_specs: Sequence, params) -> list:
        """Apply a transformed local jaxpr; its constants are replicated."""
        closed, consts = jaxpr.hoist()
        specs = (*(_WHOLE,) * len(consts), *in_specs)
        return self.bind(*consts, *args, **_with(params, closed, specs, out_specs))

    def jvp(self, primals, tangents, **params):
        jaxpr, in_specs, out_specs = params["jaxpr"], params["in_specs"], params["out_specs"]
        nonzeros = tuple(map(is_nonzero, tangents))
        derived, out_nonzeros = jvp_jaxpr(jaxpr, nonzeros, (False,) * len(jaxpr.outvars))
        outs = self.call(
            derived,
            [*primals, *compress(tangents, nonzeros)],
            [*in_specs, *compress(in_specs, nonzeros)],
            [*out_specs, *compress(out_specs, out_nonzeros)],
            params,
        )
        n = len(out_nonzeros)
        return outs[:n], _with_zeros(outs[:n], outs[n:], out_nonzeros)

    def linearize(self, trace, primals, tangents, **params):
        nonzeros = tuple(map(is_nonzero, tangents))
        primal, linear, out_nonzeros, _ = linearize_jaxpr(params["jaxpr"], nonzeros)
        n = len(out_nonzeros)
        in_specs, out_specs = params["in_specs"], params["out_specs"]
        outs, second = self._two_maps(
            primal, linear, primals, in_specs, out_specs, [*compress(tangents, nonzeros)],
            [*compress(in_specs, nonzeros)], [*compress(out_specs, out_nonzeros)], params,
        )  # fmt: skip
        return outs[:n], _with_zeros(outs, trace.tangents.process(self, *second), out_nonzeros)

    def split(self, trace, args, **params):
        """Two maps, if operands mix values and tangents."""
        in_specs, out_specs = params["in_specs"], params["out_specs"]
        sides = tuple(map(trace.is_tangent, args))
        values = tuple(not t for t in sides)
        primal, linear, flags = split_jaxpr(params["jaxpr"], sides, (False,) * len(out_specs))
        results = [not f for f in flags]
        with_parent = state.trace
        try:
            state.trace = trace.parent
            outs, second = self._two_maps(
                primal, linear,
                [*compress(args, values)], [*compress(in_specs, values)], [*compress(out_specs, results)],
                [*compress(args, sides)], [*compress(in_specs, sides)], [*compress(out_specs, flags)], params,
            )  # fmt: skip
        finally:
            state.trace = with_parent
        results = iter(outs), iter(trace.tangents.process(self, *second))
        return [next(results[t]) for t in flags]

    def _two_maps(
        self, primal: Jaxpr, linear: Jaxpr, args: Sequence, in_specs: Sequence, out_specs: Sequence,
        tangents: Sequence, tangent_specs: Sequence, tangent_out_specs: Sequence, params: dict,
    ) -> tuple[list, tuple]:  # fmt: skip
        """Run the primal half of a split body on ``args``, and prepare the linear half.

        Returns:
          the results of the first without the residuals; operands and parameters of the second.
        """
        mesh = params["mesh"]
        n = len(out_specs)
        closed, consts = primal.hoist()
        specs = (*(_WHOLE,) * len(consts), *in_specs)
        operands = [*consts, *args]
        halves, residual_specs, places = closed.memoised(
            ("mesh residuals", linear, mesh, specs), lambda: _residuals(closed, linear, n, mesh, specs)
        )
        first, second = halves
        results = self.bind(*operands, **_with(params, first, specs, (*out_specs, *residual_specs)))
        rest = iter(zip(results[n:], residual_specs, strict=True))
        residuals = [(operands[i], specs[i]) if i is not None else next(rest) for i in places]
        ins = [*(r for r, _ in residuals), *tangents]
        second_specs = (*(s for _, s in residuals), *tangent_specs)
        return results[:n], (ins, _with(params, second, second_specs, tangent_out_specs))

    def transpose(self, cts, *args, **params):
        in_specs, out_specs = params["in_specs"], params["out_specs"]
        linear = tuple(map(is_linear, args))
        nonlinear = tuple(not lin for lin in linear)
        nonzeros = tuple(map(is_nonzero, cts))
        derived, ct_nonzeros = transpose_jaxpr(params["jaxpr"], linear, nonzeros)
        outs = iter(
            self.call(
                derived,
                [*compress(args, nonlinear), *compress(cts, nonzeros)],
                [*compress(in_specs, nonlinear), *map(_cotangent, compress(out_specs, nonzeros))],
                [_cotangent(s) for s in compress(compress(in_specs, linear), ct_nonzeros)],
                params,
            )
        )
        for a, nz in zip(compress(args, linear), ct_nonzeros, strict=True):
            if nz:
                a.add(next(outs))

    def batch(self, axis, args, dims, **params):
        jaxpr, mesh = params["jaxpr"], params["mesh"]
        over = axis.mesh_axes
        entry = None if not over else over[0] if len(over) == 1 else tuple(over)
        batched = tuple(d is not None for d in dims)
        in_specs = [
            s.with_entries([entry, *s]) if b else s for s, b in zip(params["in_specs"], batched, strict=True)
        ]
        size = _local_batch(axis, mesh, jaxpr) if over else axis.size
        derived, out_batched = batch_jaxpr(jaxpr, Axis(size, axis.name), batched)
        out_specs = [
            s.with_entries([entry, *s]) if b else s
            for s, b in zip(params["out_specs"], out_batched, strict=True)
        ]
        if over:  # batched values vary over axes that the casts of the body do not know
            closed, consts = derived.hoist()
            ins = [_types(s, mesh) for s in ((_WHOLE,) * len(consts) + tuple(in_specs))]
            closed, _ = typed(closed, mesh.abstract, ins, [_types(s, mesh) for s in out_specs])
            derived = closed.replace(
                invars=closed.invars[len(consts) :], constvars=closed.invars[: len(consts)], consts=consts
            )
        ins = [a if d is None else move_dim(a, d, 0) for a, d in zip(args, dims, strict=True)]
        return self.call(derived, ins, in_specs, out_specs, params), [0 if b else None for b in out_batched]

    def drop_outputs(self, eqn: Eqn, reads: list[bool]) -> Eqn:
        """Drop results that are not read, and operands that only they need."""
        body = eqn.params["jaxpr"]
        jaxpr: Jaxpr = body.memoised(("drop", tuple(reads)), lambda: simplify.dce(body, reads))
        used = simplify.used(jaxpr)
        keep = [v in used for v in jaxpr.invars]
        jaxpr = body.memoised(
            ("drop", tuple(reads), "args"),
            lambda: jaxpr.replace(invars=[*compress(jaxpr.invars, keep)], arg_names=()),
        )
        params = _with(
            eqn.params,
            jaxpr,
            [*compress(eqn.params["in_specs"], keep)],
            [*compress(eqn.params["out_specs"], reads)],
        )
        return Eqn(
            eqn.prim, [*compress(eqn.invars, keep)], [*compress(eqn.outvars, reads)], params, eqn.source
        )


shard_map_p = _ShardMap()


def with_local_types(jaxpr: Jaxpr, mesh: AxisSizes, specs: Specs) -> Jaxpr:
    """A body whose printed types show the axes over which values vary.

    Bodies that transforms make need no types, and some have none: they are printed without.
    """
    try:
        made, _ = typed(jaxpr, mesh.abstract, [_types(s, mesh) for s in specs])
    except (errors.ShardingError, errors.UnsupportedError):
        return jaxpr
    same = [e.prim for e in equations(made)] == [e.prim for e in equations(jaxpr)]
    return made if same else jaxpr  # else types need casts, which this program does not have


def _residuals(primal: Jaxpr, linear: Jaxpr, n: int, mesh: AxisSizes, specs: Specs) -> tuple:
    """The halves of a split body, with residuals in a form that can lie on the mesh.

    A residual that is an operand stays one. Other varying residuals get a leading dimension over the ranks they vary
    on; invariant and reduced residuals stay as they are, so that their derivatives are right.

    Returns:
      the halves; the specs of the residuals that the first half returns, from result ``n`` on; for each residual the
      index of the operand that it is, or None.
    """
    abstract = mesh.abstract
    typed_primal, types = typed(primal, abstract, [_types(s, mesh) for s in specs])
    operands: dict[Any, int] = {v: i for i, v in enumerate(primal.invars)}
    places = [operands.get(v) for v in primal.outvars[n:]]
    kinds = [t for t, place in zip(types[n:], places, strict=True) if place is None]
    residual_specs = tuple(_residual_spec(t, abstract) for t in kinds)

    def first(*args):
        outs = eval_jaxpr(typed_primal, args)
        residuals = [x for x, place in zip(outs[n:], places, strict=True) if place is None]
        return [*outs[:n], *(_stacked(x, t, abstract) for x, t in zip(residuals, kinds, strict=True))]

    def second(*args):
        m = len(places)
        rest = iter(kinds)
        values = [
            x if place is not None else _unstacked(x, next(rest), abstract)
            for x, place in zip(args[:m], places, strict=True)
        ]
        return eval_jaxpr(linear, [*values, *args[m:]])

    one = stage(first, primal.in_avals, primal.name)
    stacked = iter(one.out_avals[n:])
    avals = [primal.in_avals[i] if i is not None else next(stacked) for i in places]
    two = stage(second, [*avals, *linear.in_avals[len(places) :]], linear.name)
    return (one, two), residual_specs, places


def _residual_spec(types: Types, mesh: AbstractMesh) -> PartitionSpec:
    own = tuple(a for a, t in zip(mesh.axis_names, types, strict=True) if t in "VU")
    reduced = [a for a, t in zip(mesh.axis_names, types, strict=True) if t == "R"]
    return PartitionSpec(*((own,) if own else ()), reduced=reduced)


def _stacked(x: Any, types: Types, mesh: AbstractMesh) -> Any:
    """A residual as saved: with a leading dimension over ranks it varies on."""
    x = _recast(x, types, mesh, "U", "V")
    return reshape(x, (1, *x.aval.shape)) if set(types) & {"V", "U"} else x


def _unstacked(x: Any, types: Types, mesh: AbstractMesh) -> Any:
    """The inverse of ``_stacked``."""
    x = reshape(x, x.aval.shape[1:]) if set(types) & {"V", "U"} else x
    return _recast(x, types, mesh, "V", "U")


def _recast(x: Any, types: Types, mesh: AbstractMesh, src: str, dst: str) -> Any:
    """Cast ``x`` from ``src`` to ``dst`` over the axes on which it is unreduced."""
    axes = tuple(a for a, t in zip(mesh.axis_names, types, strict=True) if t == "U")
    if not axes:
        return x
    return pcast_p.bind(x, axes=axes, sizes=tuple(mesh.shape[a] for a in axes), src=src, dst=dst)


def _with(params: dict, jaxpr: Jaxpr, in_specs: Sequence, out_specs: Sequence) -> dict:
    """The parameters with another body."""
    return {**params, "jaxpr": jaxpr, "in_specs": tuple(in_specs), "out_specs": tuple(out_specs)}


def _with_zeros(outs: Sequence, ts: Sequence, nonzeros: Sequence[bool]) -> list:
    rest = iter(ts)
    return [next(rest) if nz else zero(p.aval) for p, nz in zip(outs, nonzeros, strict=False)]


def _cotangent(spec: PartitionSpec) -> PartitionSpec:
    """The spec of the cotangent of a value."""
    return PartitionSpec(*spec, unreduced=spec.reduced, reduced=spec.unreduced)


def _local_batch(axis: Axis, mesh: AxisSizes, jaxpr: Jaxpr) -> int:
    """The number of elements per rank of a mapped axis that is sharded over mesh axes."""
    for name in axis.mesh_axes:
        if name not in mesh.shape:
            raise errors.ShardingError(
                f"vmap: spmd_axis_name names {name!r}, which the mesh ({mesh}) does not have.",
                where=source.here(),
                fix="use an axis of the mesh",
            )
    if axis.name is not None and axis.name in jaxpr.named_axes:
        raise errors.UnsupportedError(
            f"a collective over {axis.name!r}, a mapped axis that is sharded over mesh axes.",
            where=source.here(),
            fix="use lax.psum over the mesh axes",
        )
    parts = mesh.size_of(axis.mesh_axes)
    if axis.size % parts:
        raise errors.ShardingError(
            f"vmap over {axis.size} elements cannot be sharded over {axis.mesh_axes}, of {parts} ranks.",
            where=source.here(),
            fix=f"a multiple of {parts} elements, or vmap without spmd_axis_name",
        )
    return axis.size // parts


def _types(spec: PartitionSpec, mesh: AxisSizes) -> Types:
    """The type over each axis of a value with a spec."""

    def letter(axis: str) -> str:
        if axis in spec.unreduced:
            return "U"
        if axis in spec.reduced:
            return "R"
        return "V" if axis in spec.axes else "I"

    return tuple(map(letter, mesh.axis_names))


def _global_type(local: ShapedArray, mesh: AxisSizes, spec: PartitionSpec) -> ShapedArray:
    parts = NamedSharding(mesh, spec).parts(local.ndim)  # type: ignore[arg-type]
    return ShapedArray(tuple(n * k for n, k in zip(local.shape, parts, strict=True)), local.dtype)


# -- running on one process ------------------------------------------------------------------------


def divide(x: np.ndarray, mesh: AxisSizes, spec: PartitionSpec) -> list[np.ndarray]:
    """Split ``x`` into shards; of unreduced ones the first rank gets all."""
    parts = []
    for rank, index in enumerate(NamedSharding(mesh, spec).indices(x.shape)):  # type: ignore[arg-type]
        part = x[index]
        if spec.unreduced and any(mesh.coordinates(rank)[a] for a in spec.unreduced):
            part = np.zeros_like(part)
        parts.append(np.array(part, order="C"))
    return parts


# -- the function of users -------------------------------------------------------------------------


@overload
def shard_map(
    fun: Callable[P, R],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Any = None,
    out_specs: Any,
    check_vma: bool = True,
    axis_names: Collection[str] | None = None,
) -> Callable[P, R]: ...
@overload
def shard_map(
    fun: None = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Any = None,
    out_specs: Any,
    check_vma: bool = True,
    axis_names: Collection[str] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def shard_map(
    fun: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Any = None,
    out_specs: Any,
    check_vma: bool = True,
    axis_names: Collection[str] | None = None,
) -> Any:
    """Run ``fun`` on every rank of a mesh, on its shards of the arguments.

    Inside, collectives of ``lax`` work over the mesh axes. Over each axis a value is varying or invariant. Where both
    are operands, the invariant one is cast, so that derivatives sum over the ranks as they must.

    Args:
      fun: a function of pytrees of arrays, of the shapes of shards. Without it, a decorator is returned.
      mesh: the mesh; the current one (``with mesh:``) by default. An ``AbstractMesh`` runs on simulated ranks.
      in_specs: for each argument a ``PartitionSpec``, or a pytree prefix of them; a dimension that a spec does not
        shard is whole on every rank. None: those of the shardings of the arguments.
      out_specs: a pytree prefix of the results: how their shards make up the whole. A result must be the same over
        the axes that its spec does not mention.
      check_vma: check the latter (default). If False, you are responsible for it.
      axis_names: the axes that are manual, over which the function sees shards; default all. Over the others it is a
        global program, which the compiler partitions. Inside of another ``shard_map``, the default is those that are
        not manual yet.
    Returns:
      a function of global arrays.
    Raises (when called):
      ArgumentError: ``axis_names`` are not names.
      ShardingError: the specs do not fit the arguments, results or mesh; a result varies over an axis that its spec
        does not mention; an operation cannot take the types of its operands over an axis.
      TreeError: the specs are not a prefix of arguments or results.
    """
    if fun is None:
        return functools.partial(
            shard_map,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=check_vma,
            axis_names=axis_names,
        )
    check_callable(fun, "shard_map")
    if mesh is not None and not isinstance(mesh, AxisSizes):
        raise errors.ArgumentError(
            f"shard_map takes a mesh, not {mesh!r:.60}.",
            where=source.here(),
            fix="mesh=bf.make_mesh((8,), ('x',))",
        )
    if not isinstance(check_vma, bool):
        raise errors.ArgumentError(
            f"shard_map: check_vma is True or False, not {check_vma!r:.60}.", where=source.here()
        )

    @functools.wraps(fun)
    def mapped(*args):
        around = manual_mesh()
        where = _mesh_of(mesh, around, fun)
        names = _manual_axes(axis_names, where, around, fun)
        leaves, in_tree = tree.flatten((args, {}))
        labels = functools.cache(lambda: labels_of(fun, in_tree))
        values = as_values(leaves, lambda i: f"the argument {labels()[i]}")
        if in_specs is None:
            specs = [_spec_of(v, where, names, labels()[i]) for i, v in enumerate(values)]
        else:
            entries = tuple(in_specs) if isinstance(in_specs, list) else in_specs
            specs = _broadcast(entries, args, fun, "in_specs")
        for s in specs:
            _check_manual(s, names, where, fun, "in_specs")
        avals = [
            _local(v.aval, s, where, labels()[i]) for i, (v, s) in enumerate(zip(values, specs, strict=True))
        ]
        body = _Function(FlatFunction(fun, in_tree), where, names, out_specs, labels(), check_vma)
        if around is not None:
            outs = nested(body, values, specs)
        else:
            jaxpr = body.trace(avals, specs)
            used = {a for e in equations(jaxpr) for a in e.params.get("axes", ()) if isinstance(a, str)}
            auto = tuple(a for a in where.axis_names if a not in names and a not in used)
            params = {"mesh": where, "name": name_of(fun), "auto": auto}
            outs = shard_map_p.call(jaxpr, values, specs, body.specs, params)
        return tree.unflatten(body.flat.out_tree, outs)

    return mapped


def _mesh_of(mesh: AxisSizes | None, around: ManualMesh | None, fun: Callable) -> AxisSizes:
    """The mesh of a call: the given, the surrounding or the current one."""
    if around is not None:
        if mesh is not None and mesh.shape != around.mesh.shape:
            raise errors.ShardingError(
                f"shard_map of {name_of(fun)} over the mesh ({mesh}), inside of another over ({around.mesh}).",
                where=source.here(),
                fix="leave mesh= out, and name in axis_names the axes that are manual inside",
            )
        return around.mesh
    where = mesh if mesh is not None else current_mesh()
    if where is None:
        raise errors.ArgumentError(
            f"shard_map of {name_of(fun)} has no mesh.",
            where=source.here(),
            fix="shard_map(f, mesh=mesh, ...), or call it inside of `with mesh:`",
        )
    return where


def _manual_axes(
    axis_names: Collection[str] | None, mesh: AxisSizes, around: ManualMesh | None, fun: Callable
) -> frozenset[str]:
    """The axes that become manual."""
    already = around.axes if around is not None else frozenset()
    free = frozenset(mesh.axis_names) - already
    names = _names(axis_names, fun) or free
    wrong = sorted(names - free, key=str)
    if wrong or not names:
        which = f"names {wrong[0]!r} as manual" if wrong else "has no axis left"
        raise errors.ShardingError(
            f"shard_map of {name_of(fun)} {which}, and the axes that can be are "
            f"{', '.join(map(repr, sorted(free))) or 'none'}.",
            where=source.here(),
            why="those of a shard_map around it are manual already." if already else None,
            fix="axis_names={'x'}, of axes of the mesh; an inner shard_map takes those that the outer leaves out",
        )
    return names


def _names(axis_names: Any, fun: Callable) -> frozenset[str]:
    """The names that a call gives."""
    given = [axis_names] if isinstance(axis_names, str) else () if axis_names is None else axis_names
    if not isinstance(given, Collection) or not all(isinstance(a, str) for a in given):
        raise errors.ArgumentError(
            f"shard_map of {name_of(fun)}: axis_names are names of mesh axes, not {axis_names!r:.60}.",
            where=source.here(),
            why="it says over which axes the function sees shards.",
            fix="axis_names={'x'}, or leave it out for all axes",
        )
    return frozenset(given)


def _check_manual(
    spec: PartitionSpec, names: frozenset[str], mesh: AxisSizes, fun: Callable, which: str
) -> None:
    """Raise ShardingError if a spec names an axis that is not manual."""
    for axis in (*spec.axes, *spec.unreduced, *spec.reduced):
        if axis in mesh.shape and axis not in names:
            raise errors.ShardingError(
                f"shard_map of {name_of(fun)}: {which} hold {spec}, and {axis!r} is not among its axis_names.",
                where=source.here(),
                why="over other axes the function sees the whole, which the compiler shards.",
                fix=f"leave {axis!r} out of the spec, or name it in axis_names",
            )


def _spec_of(x: Any, mesh: AxisSizes, names: frozenset[str], label: str) -> PartitionSpec:
    """The spec of an argument with a sharding, over the manual axes."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape != mesh.shape:
        raise errors.ShardingError(
            f"shard_map: in_specs is None, and the argument {label} has no sharding on the mesh ({mesh}).",
            where=source.here(),
            fix="give in_specs, or put the argument on the mesh: bf.device_put(x, NamedSharding(mesh, spec))",
        )
    entries = [tuple(a for a in names_of(e) if a in names) or None for e in sharding.spec]
    return PartitionSpec(*entries)


class _Function:
    """A function of shards, traced under the manual axes ``names``.

    Attributes:
      specs: of its flat results, once it ran.
    """

    def __init__(
        self,
        flat: FlatFunction,
        mesh: AxisSizes,
        names: frozenset[str],
        out_specs: Any,
        labels: Sequence[str],
        check_vma: bool,
    ):
        self.flat, self.mesh, self.names = flat, mesh, names
        self.out_specs, self.labels, self.check_vma = out_specs, labels, check_vma
        self.name = name_of(flat.fun)
        self.specs: list[PartitionSpec] = []

    def trace(self, avals: Sequence[ShapedArray], specs: Sequence[PartitionSpec]) -> Jaxpr:
        """The local jaxpr, with casts."""
        trace = TypedTrace(self.mesh.abstract)
        line, scopes = source.replay.line, source.open_scopes(())
        source.replay.line = None
        try:
            with new_trace(trace):
                ins = [
                    trace.typed_parameter(aval, _types(spec, self.mesh), label)
                    for aval, spec, label in zip(avals, specs, self.labels, strict=True)
                ]
                return trace.finish(self.run(trace, ins), self.name, self.labels)
        finally:
            source.replay.line = line
            source.open_scopes(scopes)

    def run(self, trace: TypedTrace, ins: Sequence[Any]) -> list[Any]:
        """The results on shards, of the types that their specs claim."""
        mesh, context = self.mesh, state.context
        around = manual_mesh()
        manual = self.names | (around.axes if around is not None else frozenset())
        named = [MeshAxis(a, n) for a, n in mesh.shape.items() if a in self.names]
        state.context = (*context, *named, ManualMesh(mesh, manual))
        try:
            outs = self.flat(*ins)
            skeleton = tree.unflatten(self.flat.out_tree, [0] * self.flat.out_tree.num_leaves)
            self.specs = _broadcast(self.out_specs, skeleton, self.flat.fun, "out_specs")
            paths = treepath.leaf_paths(self.flat.out_tree)
            for i, (x, spec) in enumerate(zip(outs, self.specs, strict=True)):
                _check_manual(spec, self.names, mesh, self.flat.fun, "out_specs")
                what = f"the result{paths[i]} of {self.name}"
                outs[i] = self._claimed(trace, x, spec, what)
            return outs
        finally:
            state.context = context

    def _claimed(self, trace: TypedTrace, x: Any, spec: PartitionSpec, what: str) -> Any:
        """A result cast to the types that its spec claims."""
        mesh = self.mesh
        check_rank(mesh, spec, x.aval.ndim, lambda: f"shard_map: the spec of {what}")
        atom = trace.atom(x)
        have = trace.typer.type_of(atom)
        letters = zip(mesh.axis_names, have, _types(spec, mesh), strict=True)
        required = tuple(w if a in self.names else h for a, h, w in letters)
        for axis, h, w in zip(mesh.axis_names, have, required, strict=True):
            if h == "V" and w == "I" and not self.check_vma:
                atom = trace.typer.convert(atom, [axis], "V", "I")
            elif (h, w) in (("V", "I"), ("V", "R")):
                raise errors.ShardingError(
                    f"shard_map: {what} varies over {axis!r}, and its spec {spec} does not say so.",
                    where=source.here(),
                    why="the ranks along that axis may have different values, of which only one would be kept.",
                    fix=f"lax.psum or lax.pmean over {axis!r}, or a spec that shards a dimension along it",
                )
            elif h == "U" and w != "U":
                raise errors.ShardingError(
                    f"shard_map: {what} is unreduced over {axis!r}, and its spec {spec} does not say so.",
                    where=source.here(),
                    fix=f"lax.psum(x, {axis!r}), or P(..., unreduced={{{axis!r}}})",
                )
            elif w == "U" and h == "V":
                raise errors.ShardingError(
                    f"shard_map: {what} varies over {axis!r}, and its spec {spec} says that it is unreduced.",
                    where=source.here(),
                    fix=f"lax.pcast(x, {axis!r}, to='unreduced'), if its value is the sum over the ranks",
                )
        return trace.tracer_of(trace.typer.cast(atom, required))


def nested(body: _Function, values: Sequence[Any], specs: Sequence[PartitionSpec]) -> list[Any]:
    """Run a ``shard_map`` inside of another.

    Over its axes, all ranks of the outer one hold the same values.

    Arguments are sliced at the index of the rank, and results are gathered, so it needs no equation of its own.
    """

    def run(*xs):
        trace: Any = state.trace  # a TypedTrace
        ins = [_entered(x, s, body.mesh) for x, s in zip(xs, specs, strict=True)]
        outs = body.run(trace, ins)
        return [_left(x, s, body.mesh) for x, s in zip(outs, body.specs, strict=True)]

    avals = [v.aval for v in values]
    jaxpr = state.trace.typed_body(Body(run, avals, values, body.name, body.labels))
    return eval_jaxpr(jaxpr, values)


def _entered(x: Any, spec: PartitionSpec, mesh: AxisSizes) -> Any:
    """The shard of a value that is the same on all ranks."""
    for dim, entry in enumerate(spec.for_rank(x.aval.ndim)):
        if entry is not None:
            x = shard_slice_p.bind(x, **_over(names_of(entry), mesh), src="I", dst="V", dim=dim)
    for axis in (*spec.unreduced, *spec.reduced):
        prim, dst = (keep_first_p, "U") if axis in spec.unreduced else (pcast_p, "R")
        x = prim.bind(x, **_over((axis,), mesh), src="I", dst=dst)
    return x


def _left(x: Any, spec: PartitionSpec, mesh: AxisSizes) -> Any:
    """The value of shards, on all ranks: the inverse of ``_entered``."""
    for axis in (*spec.unreduced, *spec.reduced):
        prim, src = (psum_invariant_p, "U") if axis in spec.unreduced else (pcast_p, "R")
        x = prim.bind(x, **_over((axis,), mesh), src=src, dst="I")
    for dim, entry in enumerate(spec.for_rank(x.aval.ndim)):
        if entry is not None:
            x = mesh_all_gather_p.bind(x, **_over(names_of(entry), mesh), src="V", dst="I", dim=dim)
    return x


def _over(axes: Sequence[str], mesh: AxisSizes) -> dict[str, Any]:
    return {"axes": tuple(axes), "sizes": tuple(mesh.shape[a] for a in axes)}


def _broadcast(specs: Any, whole: Any, fun: Callable, name: str) -> list[PartitionSpec]:
    """Specs with one entry per leaf."""
    found = broadcast(specs, whole, f"shard_map of {name_of(fun)}: {name}", "P() for replicated values")
    for s in found:
        if not isinstance(s, PartitionSpec):
            raise errors.ArgumentError(
                f"shard_map of {name_of(fun)}: {name} holds partition specs, not {s!r:.60}.",
                where=source.here(),
                fix="P('x'), or P() for replicated values",
            )
    return found


def _local(aval: ShapedArray, spec: PartitionSpec, mesh: AxisSizes, label: str) -> ShapedArray:
    """The type of the shards of an argument."""
    check_rank(mesh, spec, aval.ndim, lambda: f"shard_map: the spec of the argument {label}")
    shape = []
    for d, (n, entry) in enumerate(zip(aval.shape, spec.for_rank(aval.ndim), strict=True)):
        parts = mesh.size_of(names_of(entry))
        if n % parts:
            raise errors.ShardingError(
                f"shard_map: dimension {d} of the argument {label} ({aval}) cannot be sharded over {entry!r}, "
                f"of {parts} ranks.",
                where=source.here(),
                fix=f"pad it to a multiple of {parts}, or leave that dimension whole",
            )
        shape.append(n // parts)
    return aval.with_shape(tuple(shape))
