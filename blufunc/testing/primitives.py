"""All rules of a primitive against its definition: ``check_primitive``.

Face, part of ``blufunc.testing``. In: a primitive and one example of a use. Out: a report, or an ``AssertionError``
that says which rule is wrong.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.check import check_jaxpr
from blufunc.core.ir.jaxpr import eval_jaxpr
from blufunc.core.primitives.c_form import CForm
from blufunc.core.primitives.linear_ops import instantiate
from blufunc.core.primitives.primitive import RULES, Primitive, unsupported
from blufunc.core.primitives.rule_errors import check_definition, check_values
from blufunc.core.primitives.sharding import Rule, rule_of
from blufunc.core.programs.stage import definition, stage
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.codegen import scalar_ops
from blufunc.testing.compare import assert_same, eps_of, random_like, values_of
from blufunc.testing.gradients import Problem, check_grads, check_options, pairing
from blufunc.testing.report import Report
from blufunc.transforms.autodiff.grad import jvp, vjp
from blufunc.transforms.autodiff.transpose import backward_pass
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr

SIZE = 3
"""Examples per batch."""


def rule_state(prim: Primitive, rule: str) -> tuple[str, str]:
    """``("present", "")``, ``("unsupported", reason)`` or ``("missing", why)``."""
    if rule in vars(prim) and not callable(vars(prim)[rule]):
        return "missing", "it is set on the instance, to what cannot be called"
    found = inspect.getattr_static(prim, rule)
    if isinstance(found, unsupported):
        if rule in vars(prim):
            return "missing", "unsupported(...) belongs in the class: on an instance it is not consulted"
        if len(found.reason) <= 10:
            return "missing", f"unsupported({found.reason!r}) gives no reason"
        return "unsupported", found.reason
    if (rule != "abstract" and prim.has_definition) or (rule == "impl" and prim.reference is not None):
        return "present", ""
    if found is vars(Primitive)[rule]:
        return "missing", f"define it in {type(prim).__qualname__}, or set it to unsupported('reason')"
    return "present", ""


def check_primitive(
    prim: Primitive, *args: Any, order: int = 2, wrt: Sequence[int] | None = None, **params: Any
) -> Report:
    """Check all rules of a primitive on one use, ``prim.bind(*args, **params)``.

    - Each of ``impl``, ``abstract``, ``jvp``, ``transpose`` and ``batch`` is there, or ``unsupported`` with a reason.
    - Results have the types that ``abstract`` says; ``impl`` writes to no argument, returns the same for the same,
      and new storage where the primitive promises it.
    - ``jit`` and ``make_jaxpr`` give the same as evaluation.
    - Derivatives agree with finite differences, forward and reverse, to ``order``.
    - A definition (``lower``) traces, and agrees with ``abstract`` and ``impl``. A C form compiles for the host, and
      agrees with ``impl``.
    - A shard rule fits the operands, and halves along each factor give the same.
    - Where it is linear in an operand, ``<f(x), y> = <x, transpose(y)>``.
    - ``vmap`` agrees with a loop over the examples: for every operand along every axis, and for every choice of
      operands that are batched; nested; and over derivatives.

    Args:
      args: the operands. float64 makes for sharp comparisons: ``bnp.asarray(x, "float64")``. In batches, operands
        that are differentiated are multiples of these, by 1 to 0.86; the elements of others are rearranged.
      order: up to which order to differentiate; 0 for what has a derivative by convention, as ``stop_gradient``,
        or results that are unique only up to a choice, as eigenvectors.
      wrt: the operands to differentiate with respect to; all floating and complex ones by default.
      params: its parameters.
    Raises:
      AssertionError: a rule is missing or wrong.
    """
    if not isinstance(prim, Primitive):
        raise errors.ArgumentError(
            f"check_primitive takes a primitive, not {prim!r:.60}.",
            where=source.here(),
            fix="their names end in _p: check_primitive(lax.sin_p, x)",
        )
    if not (order.__class__ is int and order == 0):
        check_options(order, ("fwd",), "check_primitive")
    values = values_of(args, f"the operands of {prim.name}")
    inexact = [i for i, x in enumerate(values) if dtypes.is_inexact(x.dtype)]
    if wrt is not None and not (isinstance(wrt, (tuple, list)) and all(i in inexact for i in wrt)):
        raise errors.ArgumentError(
            f"check_primitive: wrt is a tuple of positions of floating operands, not {wrt!r:.60}.",
            where=source.here(),
        )
    check = _Check(prim, values, params, order, inexact if wrt is None else list(wrt))
    for step in (
        check.rules, check.definition, check.types, check.staging, check.derivatives, check.linearity, check.batches,
        check.shards,
    ):  # fmt: skip
        try:
            step()
        except (errors.JaxprTypeError, errors.ShardingError) as e:  # a rule returned what no trace can use
            raise AssertionError(f"{prim.name}: {e}") from e
    return check.report


class _Check:
    """The checks of one use, and what they found."""

    def __init__(self, prim: Primitive, args: list[Any], params: dict, order: int, wrt: list[int]):
        self.prim, self.args, self.params, self.order, self.wrt = prim, args, params, order, wrt
        self.report = Report(prim.name)
        self.modes: tuple[str, ...] = ()

    def apply(self, *args: Any) -> list[Any]:
        """The results, always a list."""
        out = self.prim.bind(*args, **self.params)
        return list(out) if self.prim.multiple_results else [out]

    def passed(self, name: str, text: str) -> None:
        """Report what holds."""
        self.report.checked[name] = text

    # -- that the rules are there, and the definition ------------------------------------------

    def rules(self) -> None:
        """Each rule is present or declared not to exist."""
        missing = []
        for rule in RULES:
            state, text = rule_state(self.prim, rule)
            if state == "missing":
                missing.append(f"{rule} ({text})")
            elif state == "unsupported":
                self.report.unsupported[rule] = text
        if missing:
            raise AssertionError(f"{self.prim.name} lacks rules: {'; '.join(missing)}")
        self.passed("rules", ", ".join(r for r in RULES if r not in self.report.unsupported))

    def types(self) -> None:
        """``impl`` against ``abstract``, and what it promises of its arguments."""
        prim, name = self.prim, self.prim.name
        avals = tuple(x.aval for x in self.args)
        try:
            expected = prim.typed(avals, self.params)
        except errors.BlufuncError:
            raise
        except Exception as e:
            raise errors.ArgumentError(
                f"check_primitive: the abstract rule of {name} cannot take these operands and parameters: "
                f"{type(e).__name__}: {e}.",
                where=source.here(),
            ) from e
        expected = expected if prim.multiple_results else (expected,)
        try:
            outs = self.apply(*self.args) if prim.reference is not None else self._from_impl()
        except (AssertionError, errors.BlufuncError):
            raise
        except Exception as e:
            raise AssertionError(f"{name}: impl raises {type(e).__name__}: {e}") from e
        check_values(prim, outs, expected)
        self.passed("types", f"impl and abstract agree: {', '.join(map(str, expected))}")

    def _from_impl(self) -> list[Any]:
        """The results of ``impl`` itself."""
        prim, name = self.prim, self.prim.name
        buffers = [np.array(x) for x in self.args]
        before = [b.copy() for b in buffers]
        with np.errstate(all="ignore"):
            out, repeated = (prim.impl(*buffers, **self.params) for _ in range(2))
        outs = list(out) if prim.multiple_results else [out]
        for i, (b, v) in enumerate(zip(buffers, before, strict=True)):
            if b.tobytes() != v.tobytes():
                raise AssertionError(f"{name}: impl writes to operand {i}")
        if not prim.effects:
            for x, y in zip(outs, repeated if prim.multiple_results else [repeated], strict=True):
                if np.asarray(x).tobytes() != np.asarray(y).tobytes():
                    raise AssertionError(f"{name}: impl returns something else the second time")
        if prim.fresh:
            for i, (x, b) in enumerate(itertools.product(outs, buffers)):
                if np.shares_memory(np.asarray(x), b):
                    raise AssertionError(
                        f"{name}: impl returns storage of operand {i % len(buffers)}, and fresh=True promises new"
                    )
        return outs

    def definition(self) -> None:
        """The definition against ``abstract`` and ``impl``."""
        if not self.prim.has_definition:
            return
        jaxpr = definition(self.prim, [x.aval for x in self.args], self.params)
        if self.prim.has_impl:
            check_definition(self.prim, eval_jaxpr(jaxpr, self.args), self._from_impl())
        agrees = "abstract and impl agree with it" if self.prim.has_impl else "abstract agrees with it"
        self.passed("definition", f"{agrees}: {len(jaxpr.eqns)} equations")

    def shards(self) -> None:
        """The shard rule: on halves along each factor, the same."""
        prim, avals = self.prim, [x.aval for x in self.args]
        outs = self.apply(*self.args)
        if prim.shard is None or hasattr(prim.shard, "reason"):
            return
        rule = rule_of(prim, avals, [x.aval for x in outs], self.params)
        if rule.special or rule.trusted or rule.partial or prim.effects:
            return  # the partitioner computes these on shares in ways of its own
        sides = (*rule.operands, *rule.results)
        # a part of a dimension is no slice of it
        parts = {f for dims in sides for fs in dims for f in fs if len(fs) > 1}
        halved = [f for f, n in enumerate(rule.sizes) if n and n % 2 == 0 and f not in parts]
        for f in halved:
            axes = [dims.index((f,)) if (f,) in dims else None for dims in sides]
            n = len(avals)
            halves = [self._on_half(rule, k, axes[:n], axes[n:], outs) for k in (0, 1)]
            joined = []
            for a, b, d in zip(*halves, axes[n:], strict=True):
                how = {"sum": np.add, "max": np.maximum, "min": np.minimum}.get(rule.reduced.get(f, ""))
                joined.append(np.concatenate([a, b], d) if d is not None else a if how is None else how(a, b))
            what = f"{prim.name}: the shard rule, computed on halves of factor {f}"
            assert_same([from_numpy(x) for x in joined], list(outs), what)
        self.passed("shard", f"halves along {len(halved)} of {len(rule.sizes)} factors give the same")

    def _on_half(self, rule: Rule, k: int, ins: Sequence, results: Sequence, outs: Sequence[Any]) -> list:
        """The results on half ``k`` of the operands, each split along an axis or whole."""
        pairs = zip(map(np.asarray, self.args), ins, strict=True)
        operands = [x if d is None else np.split(x, 2, d)[k] for x, d in pairs]
        params = self.params
        if rule.params is not None:
            shapes = [list(y.shape) for y in outs]
            for shape, d in zip(shapes, results, strict=True):
                shape[d or 0 : (d or 0) + (d is not None)] = [] if d is None else [shape[d] // 2]
            params = rule.params(dict(params), [x.shape for x in operands], [*map(tuple, shapes)])
        out = self.prim.bind(*map(from_numpy, operands), **params)
        return [np.asarray(y) for y in (out if self.prim.multiple_results else [out])]

    def staging(self) -> None:
        """``jit`` and ``make_jaxpr``."""
        jaxpr = make_jaxpr(self.apply)(*self.args)
        check_jaxpr(jaxpr)
        if not any(e.prim is self.prim for e in jaxpr.eqns):
            raise AssertionError(f"{self.prim.name}: bind leaves no equation of it in a jaxpr")
        want = self.apply(*self.args)
        assert_same(jit(self.apply)(*self.args), want, f"{self.prim.name}: jit")
        self.passed("jit", "the same as evaluation, and its jaxpr is well typed")
        if isinstance(self.prim.lower, CForm):
            self._compile(want)

    def _compile(self, want: list[Any]) -> None:
        """The C form, compiled for the host, against ``impl``."""
        name, avals = self.prim.name, [x.aval for x in self.args]
        if toolchain.find() is None:
            self.report.unsupported["C form"] = toolchain.why_none()
            return
        if not scalar_ops.known(self.prim, self.params, [a.dtype for a in avals]):
            self.report.unsupported["C form"] = f"it has no template for {', '.join(map(str, avals))}"
            return
        flags = config.host_compiler, config.check
        # under check, a program that does not compile raises
        config.host_compiler, config.check = "always", True
        try:
            found = jit(lambda *args: self.apply(*args))(*self.args)
        except errors.CompileError as e:
            raise AssertionError(f"{name}: the C form (lower=) does not compile: {e}") from e
        finally:
            config.host_compiler, config.check = flags
        tol = eps_of(*want) ** 0.5
        assert_same(found, want, f"{name}: the C form (lower=), compiled", tol, tol)
        self.passed("C form", "compiles, and agrees with impl")

    # -- derivatives ---------------------------------------------------------------------------

    @property
    def differentiable(self) -> bool:
        """True if there is a derivative to check: floats in, floats out."""
        return bool(self.wrt) and any(dtypes.is_inexact(x.dtype) for x in self.apply(*self.args))

    @property
    def point(self) -> tuple:
        """The operands to differentiate with respect to."""
        return tuple(self.args[i] for i in self.wrt)

    def of_point(self) -> Callable:
        """The primitive as a function of those."""

        def use(*xs):
            chosen = dict(zip(self.wrt, xs, strict=True))
            return self.apply(*[chosen.get(i, x) for i, x in enumerate(self.args)])

        use.__name__ = self.prim.name
        return use

    def derivatives(self) -> None:
        """Forward and reverse mode against finite differences."""
        if "jvp" in self.report.unsupported or not self.order:
            return
        if not self.differentiable:
            self.passed("derivatives", "none: it does not go from floats to floats")
            return
        for mode, name in (("fwd", "jvp"), ("rev", "vjp")):
            try:
                check_grads(self.of_point(), self.point, 1, (mode,))
            except (errors.GradError, errors.UnsupportedError) as e:
                if not _declared(e):
                    raise AssertionError(f"{self.prim.name}: {name} raises {type(e).__name__}: {e}") from e
                self.report.unsupported[name] = e.what
                continue
            self.modes = (*self.modes, mode)
            self.passed(name, "agrees with finite differences")
        if self.order > 1 and self.modes:
            try:
                check_grads(self.of_point(), self.point, self.order, self.modes)
            except (errors.GradError, errors.UnsupportedError) as e:
                if not _declared(e):
                    raise AssertionError(f"{self.prim.name}: order {self.order} raises {e}") from e
                self.report.unsupported[f"order {self.order}"] = e.what
            else:
                self.passed(f"order {self.order}", f"agrees with finite differences: {', '.join(self.modes)}")

    def linearity(self) -> None:
        """The transpose rule where it applies: the dot-product test."""
        if not self.order or not self.differentiable:
            return
        transposed, otherwise = [], []
        for k, x in zip(self.wrt, self.point, strict=True):
            only = lambda v, k=k: self.apply(*[v if i == k else a for i, a in enumerate(self.args)])
            if not _is_linear(only, x):
                continue
            try:
                self._dot_product(only, k, x)
            except errors.GradError as e:
                if not _declared(e) and "rev" not in self.modes:
                    raise AssertionError(
                        f"{self.prim.name} is linear in operand {k}, and transposing it raises {e}"
                    ) from e
                otherwise.append(k)
            else:
                transposed.append(k)
        if transposed:
            self.passed("transpose", f"<f(x), y> = <x, f^T(y)> in operand {', '.join(map(str, transposed))}")
        if otherwise and "transpose" not in self.report.unsupported:
            self.report.unsupported["transpose"] = (
                f"of operand {', '.join(map(str, otherwise))}: reverse mode goes through its derivative"
            )

    def _dot_product(self, f: Callable, k: int, x: Any) -> None:
        rng = np.random.default_rng(k)
        v = random_like(x, rng)
        outs = f(v)
        if not all(dtypes.is_inexact(y.dtype) for y in outs):
            return
        cts = [random_like(y, rng) for y in outs]
        (back,) = backward_pass(stage(f, [x.aval]), [None], cts)
        back = instantiate(back)
        if not back.aval.same_type(x.aval):
            raise AssertionError(
                f"{self.prim.name}: the cotangent of operand {k} is {back.aval}, not {x.aval}"
            )
        (got, size), (want, _) = pairing([back], [v]), pairing(cts, outs)
        allowed = 1000 * eps_of(x, *outs) * max(size, 1.0)
        if not abs(got - want) <= allowed:
            raise AssertionError(
                f"{self.prim.name}: transpose in operand {k} is wrong: <x, f^T(y)> = {got:.9g}, <f(x), y> = "
                f"{want:.9g}, off by {abs(got - want):.3g} (allowed: {allowed:.3g})"
            )

    # -- batches -------------------------------------------------------------------------------

    def batches(self) -> None:
        """``vmap`` against a loop."""
        if "batch" in self.report.unsupported:
            return
        if not self.args:
            self.passed("vmap", "nothing to map: it has no operands")
            return
        name, examples = self.prim.name, [variants(x, SIZE, i in self.wrt) for i, x in enumerate(self.args)]
        ways = list(batchings([x.ndim for x in self.args]))
        for in_axes in ways:
            compare_vmap(self.apply, examples, in_axes, f"vmap of {name}")
        front = (0,) * len(self.args)
        compare_vmap(self.apply, [xs[:1] for xs in examples], front, f"vmap of {name} over one example")
        grids = [[np.stack(variants(x, 2, i in self.wrt)) for x in xs] for i, xs in enumerate(examples)]
        compare_vmap(vmap(self.apply), grids, front, f"vmap of vmap of {name}")
        self.passed("vmap", f"agrees with a loop for {len(ways)} choices of batched operands and axes")
        self._batches_of_derivatives(examples)

    def _batches_of_derivatives(self, examples: list[list[np.ndarray]]) -> None:
        if not self.modes:
            return
        rng = np.random.default_rng(0)
        problem = Problem(self.of_point(), self.point, "check_primitive")
        tangents = [random_like(x, rng) for x in problem.point]
        cts = [random_like(x, rng) for x in problem(*problem.point)]
        chosen = [examples[i] for i in self.wrt]
        front = (0,) * len(chosen)
        if "fwd" in self.modes:
            compare_vmap(
                lambda *xs: list(jvp(problem, xs, tangents)[1]),
                chosen,
                front,
                f"vmap of jvp of {self.prim.name}",
            )
        if "rev" in self.modes:
            compare_vmap(
                lambda *xs: list(vjp(problem, *xs)[1](cts)), chosen, front, f"vmap of vjp of {self.prim.name}"
            )
        self.passed("vmap of derivatives", f"agrees with a loop: {', '.join(self.modes)}")


def _declared(error: errors.BlufuncError) -> bool:
    """True if an error comes from a rule declared unsupported."""
    return re.match(r"\S+ has no (jvp|transpose|batch): ", error.what) is not None


def _is_linear(f: Callable, x: Any) -> bool:
    """True if ``f`` is linear on random values, and not constant."""
    rng = np.random.default_rng(0)
    call = lambda v: [np.asarray(y) for y in f(from_numpy(np.asarray(v).astype(x.dtype)))]
    tol = min(1e4 * eps_of(x), 0.1)
    moved = False
    with np.errstate(all="ignore"):
        for scale in (1, -2.5, 10, -10):
            a, b = (np.asarray(random_like(x, rng)) for _ in range(2))
            pairs = list(zip(call(scale * a - b), call(a), call(b), strict=True))
            if not all(dtypes.is_inexact(both.dtype) for both, _, _ in pairs):
                return False
            if not all(np.allclose(both, scale * fa - fb, rtol=tol, atol=tol) for both, fa, fb in pairs):
                return False
            moved = moved or any(np.any(fa) for _, fa, _ in pairs)
    return moved


def variants(x: Any, n: int, scale: bool = True) -> list[np.ndarray]:
    """Examples like ``x``: its multiples if ``scale``, else rearranged elements."""
    x = np.asarray(x)
    if scale and dtypes.is_inexact(x.dtype):
        return [np.asarray(x * (1 - 0.07 * k)).astype(x.dtype) for k in range(n)]
    return [np.roll(x.reshape(-1), k).reshape(x.shape) for k in range(n)]


def batchings(ranks: Sequence[int]) -> Iterator[tuple[int | None, ...]]:
    """In-axes to try: each operand alone along every axis, then combinations.

    Of up to four operands, every combination.
    """
    n = len(ranks)
    for i, rank in enumerate(ranks):
        for d in range(rank + 1):
            yield tuple(d if j == i else None for j in range(n))
    several = [c for r in range(2, n + 1) for c in itertools.combinations(range(n), r)]
    for choice in several if n <= 4 else several[:6] + several[-1:]:
        yield tuple(0 if i in choice else None for i in range(n))
        yield tuple((0 if i % 2 else ranks[i]) if i in choice else None for i in range(n))


def compare_vmap(
    f: Callable, examples: Sequence[Sequence[Any]], in_axes: tuple[int | None, ...], what: str
) -> None:
    """Compare ``vmap`` with a loop over the examples of each argument."""
    args, loops = [], []
    for xs, d in zip(examples, in_axes, strict=True):
        arrays = [from_numpy(np.asarray(x)) for x in xs]
        args.append(arrays[0] if d is None else from_numpy(np.stack([np.asarray(x) for x in xs], d)))
        loops.append(arrays if d is not None else arrays[:1] * len(arrays))
    try:
        got = vmap(f, in_axes=in_axes)(*args)
    except errors.BlufuncError as e:
        raise AssertionError(f"{what}, in_axes={in_axes}, raises {type(e).__name__}: {e}") from e
    loop = [f(*example) for example in zip(*loops, strict=True)]
    want = [from_numpy(np.stack([np.asarray(x) for x in column])) for column in zip(*loop, strict=True)]
    assert_same(list(got), want, f"{what}, in_axes={in_axes}")
