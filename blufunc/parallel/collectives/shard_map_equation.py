"""The equation of a ``shard_map``: its transforms, and its run on one process.

Parallel, stages 1 and 8, below ``shard_map.py``. In: a local jaxpr with typed collectives, and the specs of its
operands and results. Out: for each transform, ``shard_map`` equations of the transformed local jaxpr, whose specs
follow the operands: a tangent has the spec of its primal, a cotangent the same with unreduced and reduced swapped.

On one process it runs eagerly on arrays: it splits them by their specs, each rank runs the compiled local jaxpr in a
thread (``runtime/simulated``), and the results are assembled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, eval_jaxpr
from blufunc.core.ir.trace import state
from blufunc.core.primitives.linear_ops import move_dim, reshape
from blufunc.core.primitives.primitive import Primitive
from blufunc.core.primitives.tangents import is_linear, is_nonzero, zero
from blufunc.core.programs import simplify
from blufunc.core.programs.stage import stage
from blufunc.parallel.collectives.axis_casts import Types
from blufunc.parallel.collectives.axis_types import typed
from blufunc.parallel.collectives.primitives import equations, pcast_p
from blufunc.parallel.mesh.mesh import AbstractMesh, AxisSizes, Mesh
from blufunc.parallel.mesh.sharding import NamedSharding
from blufunc.parallel.mesh.spec import PartitionSpec
from blufunc.parallel.runtime.sharded_buffer import assemble
from blufunc.parallel.runtime.simulated import run_ranks
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.autodiff.linearize import linearize_jaxpr, split_jaxpr
from blufunc.transforms.autodiff.transpose import transpose_jaxpr
from blufunc.transforms.batching.batch import Axis, batch_jaxpr

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
        jaxpr = with_localtypes_of_spec(params["jaxpr"], params["mesh"], params["in_specs"])
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
            ins = [types_of_spec(s, mesh) for s in ((_WHOLE,) * len(consts) + tuple(in_specs))]
            closed, _ = typed(closed, mesh.abstract, ins, [types_of_spec(s, mesh) for s in out_specs])
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


def with_localtypes_of_spec(jaxpr: Jaxpr, mesh: AxisSizes, specs: Specs) -> Jaxpr:
    """A body whose printed types show the axes over which values vary.

    Bodies that transforms make need no types, and some have none: they are printed without.
    """
    try:
        made, _ = typed(jaxpr, mesh.abstract, [types_of_spec(s, mesh) for s in specs])
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
    typed_primal, types = typed(primal, abstract, [types_of_spec(s, mesh) for s in specs])
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


def types_of_spec(spec: PartitionSpec, mesh: AxisSizes) -> Types:
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
