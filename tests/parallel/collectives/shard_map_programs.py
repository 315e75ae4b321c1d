"""Random programs of ``shard_map``, and the same programs on one device.

A program is a tree of statements on vectors of ``S`` elements. ``Shards`` runs it as a user writes it: in the function
of a ``shard_map``, with collectives, loops, branches and derivatives inside. ``Whole`` runs it on one device, on arrays
[A, B, S] of the values of all ranks, with A or B of 1 where a value is the same on all ranks along that axis. There
the derivative with respect to such an array is what the derivative inside of a ``shard_map`` means: that of an
invariant argument is the sum over the ranks.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import AbstractMesh, P, lax

S = 4
AXES = ("a", "b")


@dataclass
class Stmt:
    """One statement: an operation on earlier values of its body, by index."""

    kind: str
    args: tuple[int, ...]
    options: dict = field(default_factory=dict)
    bodies: tuple = ()


@dataclass
class Program:
    """A body on three vectors and a matrix; sizes of the mesh, and manual axes."""

    sizes: tuple[int, int]
    manual: tuple[str, ...]
    body: list[Stmt]

    def __str__(self) -> str:
        return f"mesh {self.sizes}, manual {self.manual}\n" + shown(self.body)


def shown(body, indent="  ") -> str:
    lines = []
    for s in body:
        lines.append(f"{indent}{s.kind}{s.args} {s.options or ''}".rstrip())
        lines += [shown(b, indent + "    ") for b in s.bodies]
    return "\n".join(lines)


# -- generation ------------------------------------------------------------------------------------

LOCAL = ("tanh", "mul", "add", "matmul", "roll")
COLLECTIVE = (
    "psum", "pmean", "pmax", "ppermute", "all_gather", "psum_scatter", "all_to_all", "index", "pcast", "psum_groups",
    "pmax_groups", "all_gather_groups", "all_to_all_groups", "psum_scatter_groups",
)  # fmt: skip
CUSTOM = ("vjp_psum", "vjp_local", "vjp_scale", "jvp_psum", "vjp_gather", "vjp_grad")
NESTING = (
    "scan",
    "fori",
    "while",
    "cond",
    "choose",
    "switch",
    "checkpoint",
    "jit",
    "grad",
    "hvp",
    "vmap",
    "named_vmap",
)


def program(seed: int) -> Program:
    """The program of a seed."""
    rng = np.random.default_rng([27, seed])
    sizes = [(2, 2), (4, 1), (2, 1), (4, 2)][rng.choice(4, p=[0.5, 0.2, 0.2, 0.1])]
    manual = AXES if sizes[1] == 1 or rng.random() < 0.6 else ("a",)
    return Program(sizes, manual, _body(rng, sizes, manual, 0, 4, True))


def _body(rng, sizes, manual, depth, n_values, talk) -> list[Stmt]:
    """A list of statements; ``talk``: whether they may hold collectives."""
    body = []
    for _ in range(int(rng.integers(1 + (depth == 0), 4 if depth == 0 else 3))):
        body.append(_statement(rng, sizes, manual, depth, n_values + len(body), talk))
    return body


def _statement(rng, sizes, manual, depth, n, talk) -> Stmt:
    recent = lambda: int(max(rng.integers(0, n), rng.integers(0, n)))
    draw = rng.random()
    inner = partial(_body, rng, sizes, depth=depth + 1)
    if depth < 3 and draw < (0.55, 0.4, 0.25)[depth]:
        nested = talk and sizes[1] > 1 and "b" not in manual
        kinds = [k for k in NESTING if talk or k != "cond"]  # its predicate is a sum over the ranks
        kind = str(rng.choice([*kinds, *(["shard_map"] * 4 if nested else [])]))
        if kind == "shard_map":
            options = {"sums": bool(rng.random() < 0.5)}
            return Stmt(
                kind, (recent(),), options, (inner(manual=(*manual, "b"), n_values=n + 1, talk=talk),)
            )
        count = 2 if kind in ("cond", "choose", "switch") else 1
        may = talk and kind != "choose"
        bodies = tuple(inner(manual=manual, n_values=n + 1, talk=may) for _ in range(count))
        options = {"steps": int(rng.integers(1, 4)), "which": int(rng.integers(0, 2))}
        return Stmt(kind, (recent(), recent()), options, bodies)
    if talk and draw < 0.85:
        if rng.random() < 0.25:
            return Stmt(str(rng.choice(CUSTOM)), (recent(), recent()), {"axis": str(rng.choice(manual))})
        kind = str(rng.choice(COLLECTIVE))
        axis = str(rng.choice(manual))
        options = {"axis": axis}
        size = sizes[AXES.index(axis)]
        if kind in ("psum", "pmean", "pmax") and len(manual) == 2 and rng.random() < 0.4:
            options["axis"] = AXES
        if kind == "ppermute":
            order = rng.permutation(size)
            options["perm"] = [(i, int(order[i])) for i in range(size) if rng.random() < 0.8]
        if kind.endswith("groups"):
            order = list(map(int, rng.permutation(size)))
            cut = size // 2 if size > 1 else 1
            uneven = kind.startswith(("psum_g", "pmax")) and size > 2 and rng.random() < 0.4
            cut = 1 if uneven else cut
            options["groups"] = [g for g in (order[:cut], order[cut:]) if g]
        return Stmt(kind, (recent(),), options)
    return Stmt(str(rng.choice(LOCAL)), (recent(), recent()))


# -- what both interpreters share ------------------------------------------------------------------


class Interpreter:
    """Runs bodies; ``x @ m`` and everything that concerns ranks is of the subclasses."""

    def __init__(self, program: Program):
        self.program = program
        self.size = dict(zip(AXES, program.sizes, strict=True))
        self.manual = program.manual  # where the interpreter is

    def run(self, body, env, m):
        """The sum of the last two values, so that most statements count."""
        env = list(env)
        for s in body:
            values = [env[i] for i in s.args]
            env.append(getattr(self, s.kind)(*values[: self.arity(s.kind)], s, env, m))
        return 0.5 * env[-1] + 0.25 * env[-2]

    def arity(self, kind):
        return 2 if kind in ("mul", "add", "cond", "choose", "vjp_local", "vjp_grad") else 1

    def inner(self, s, env, m, k=0):
        """A body as a function of one value."""
        return lambda x: self.run(s.bodies[k], [*env, x], m)

    def over_b(self, f, x):
        """``f(x)`` where ``b`` is manual, too."""
        before, self.manual = self.manual, AXES
        try:
            return f(x)
        finally:
            self.manual = before

    def tanh(self, x, s, env, m):
        return bnp.tanh(x) + 0.3

    def mul(self, x, y, s, env, m):
        return bnp.sin(x) * y

    def add(self, x, y, s, env, m):
        return x - 0.5 * y

    def matmul(self, x, s, env, m):
        return bnp.tanh(self.times(x, m))

    def roll(self, x, s, env, m):
        return bnp.roll(x, 1, -1) * 0.9

    def vjp_local(self, x, y, s, env, m):
        return bnp.sin(x) * bnp.cos(y)

    def vjp_scale(self, x, s, env, m):
        return 0.7 * x

    def grad(self, x, s, env, m):
        f = self.inner(s, env, m)
        return bf.grad(lambda c: bnp.sin(f(c)).sum())(x)

    def hvp(self, x, s, env, m):
        f = self.inner(s, env, m)
        g = bf.grad(lambda c: bnp.sin(f(c)).sum())
        return 0.1 * bf.grad(lambda c: (bnp.tanh(g(c)) * 0.5).sum())(x)


class Shards(Interpreter):
    """The program in the function of a ``shard_map``."""

    def function(self, mesh=None):
        """The function of whole arrays, on simulated ranks or a mesh of devices."""
        manual = self.program.manual
        both = tuple(a for a in AXES if a in manual)
        other = P("b") if "b" in manual else P()
        specs = P(both), P("a"), other, P()

        def f(x, y, z, m):
            env = [x, y, z, 0.1 * x]
            return lax.psum(self.run(self.program.body, env, m), both) / 8

        mesh = mesh or AbstractMesh(self.program.sizes, AXES)
        return bf.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), axis_names=set(manual))

    def times(self, x, m):
        return x @ m

    def psum(self, x, s, env, m):
        return lax.psum(x, s.options["axis"]) / 2

    def pmean(self, x, s, env, m):
        return lax.pmean(x, s.options["axis"])

    def pmax(self, x, s, env, m):
        return lax.pmax(x, s.options["axis"])

    def ppermute(self, x, s, env, m):
        return lax.ppermute(x, s.options["axis"], s.options["perm"])

    def all_gather(self, x, s, env, m):
        rows = lax.all_gather(x, s.options["axis"], tiled=True).reshape(-1, S)
        return (rows * bnp.arange(1.0, len(rows) + 1)[:, None].astype(x.dtype)).sum(0) / 4

    def psum_scatter(self, x, s, env, m):
        axis = s.options["axis"]
        return bnp.tile(lax.psum_scatter(x, axis, tiled=True), self.size[axis]) / 2

    def all_to_all(self, x, s, env, m):
        return lax.all_to_all(x, s.options["axis"], 0, 0, tiled=True)

    def index(self, x, s, env, m):
        return x * (1 + 0.1 * lax.axis_index(s.options["axis"]).astype(x.dtype))

    def pcast(self, x, s, env, m):
        axis = s.options["axis"]
        return x if axis in bf.typeof(x).vma else lax.pcast(x, axis, to="varying")

    def psum_groups(self, x, s, env, m):
        return lax.psum(x, s.options["axis"], axis_index_groups=s.options["groups"]) / 2

    def pmax_groups(self, x, s, env, m):
        return lax.pmax(x, s.options["axis"], axis_index_groups=s.options["groups"])

    def all_gather_groups(self, x, s, env, m):
        rows = lax.all_gather(x, s.options["axis"], axis_index_groups=s.options["groups"])
        return (rows * bnp.arange(1.0, len(rows) + 1)[:, None].astype(x.dtype)).sum(0) / 4

    def all_to_all_groups(self, x, s, env, m):
        return lax.all_to_all(x, s.options["axis"], 0, 0, axis_index_groups=s.options["groups"], tiled=True)

    def psum_scatter_groups(self, x, s, env, m):
        groups = s.options["groups"]
        out = lax.psum_scatter(x, s.options["axis"], axis_index_groups=groups, tiled=True)
        return bnp.tile(out, len(groups[0])) / 2

    # -- custom rules: each is the derivative of the function itself

    def vjp_psum(self, x, s, env, m):
        axis = s.options["axis"]

        @bf.custom_vjp
        def f(x):
            return lax.psum(bnp.sin(x), axis) / 2

        f.defvjp(lambda x: (f(x), x), lambda x, ct: (bnp.cos(x) * lax.pcast(ct, axis, to="varying") / 2,))
        return f(x)

    def vjp_local(self, x, y, s, env, m):
        @bf.custom_vjp
        def f(x, y):
            return bnp.sin(x) * bnp.cos(y)

        def bwd(kept, ct):
            x, y = kept
            return bnp.cos(x) * bnp.cos(y) * ct, -bnp.sin(x) * bnp.sin(y) * ct

        f.defvjp(lambda x, y: (f(x, y), (x, y)), bwd)
        return f(x, y)

    def vjp_scale(self, x, s, env, m):
        """A rule that sums by itself where its argument is invariant."""
        axis = s.options["axis"]

        @bf.custom_vjp
        def f(x):
            return 0.7 * lax.pcast(x, axis, to="varying")

        def bwd(invariant, ct):
            return (0.7 * (lax.psum(ct, axis) if invariant else ct),)

        invariant = axis not in bf.typeof(x).vma
        f.defvjp(lambda x: (f(x), invariant), bwd)
        return f(x)

    def jvp_psum(self, x, s, env, m):
        axis = s.options["axis"]

        @bf.custom_jvp
        def f(x):
            return lax.psum(bnp.sin(x), axis) / 2

        @f.defjvp
        def _(primals, tangents):
            (x,), (t,) = primals, tangents
            return f(x), lax.psum(bnp.cos(x) * t, axis) / 2

        return f(x)

    def vjp_gather(self, x, s, env, m):
        axis = s.options["axis"]

        @bf.custom_vjp
        def f(x):
            return lax.all_gather(x, axis, tiled=True)

        f.defvjp(lambda x: (f(x), None), lambda _, ct: (lax.psum_scatter(ct, axis, tiled=True),))
        rows = f(x).reshape(-1, S)
        return (rows * bnp.arange(1.0, len(rows) + 1)[:, None].astype(x.dtype)).sum(0) / 4

    def vjp_grad(self, x, y, s, env, m):
        """A rule that takes a gradient."""
        g = lambda x, y: (bnp.sin(x) * y).sum()

        @bf.custom_vjp
        def f(x, y):
            return g(x, y)

        def bwd(kept, ct):
            return bf.vjp(g, *kept)[1](ct)

        f.defvjp(lambda x, y: (f(x, y), (x, y)), bwd)
        return f(x, y) * bnp.ones_like(x)

    # -- bodies

    def scan(self, x, s, env, m):
        f = self.inner(s, env, m)
        last, ys = lax.scan(lambda c, _: (f(c), c * 0.5), x, None, length=s.options["steps"])
        return last + ys.sum(0)

    def fori(self, x, s, env, m):
        f = self.inner(s, env, m)
        return lax.fori_loop(0, s.options["steps"], lambda i, c: f(c), x)

    def _while(self, x, s, env, m):
        f, steps = self.inner(s, env, m), s.options["steps"]
        step = lambda c: (c[0] + 1, f(c[1]))
        return lax.while_loop(lambda c: c[0] < steps, step, (0, x), max_steps=3)[1]

    def cond(self, x, p, s, env, m):
        total = lax.psum(p.sum(), self.manual)
        return lax.cond(total > 0, self.inner(s, env, m), self.inner(s, env, m, 1), x)

    def choose(self, x, p, s, env, m):
        return lax.cond(p[0] > 0.1, self.inner(s, env, m), self.inner(s, env, m, 1), x)

    def switch(self, x, s, env, m):
        return lax.switch(s.options["which"], [self.inner(s, env, m), self.inner(s, env, m, 1)], x)

    def checkpoint(self, x, s, env, m):
        return bf.checkpoint(self.inner(s, env, m))(x)

    def jit(self, x, s, env, m):
        return bf.jit(self.inner(s, env, m))(x)

    def vmap(self, x, s, env, m):
        return bf.vmap(self.inner(s, env, m))(bnp.stack([x, 0.5 * x])).sum(0)

    def named_vmap(self, x, s, env, m):
        f = self.inner(s, env, m)
        return bf.vmap(lambda r: lax.pmean(f(r), "v") * r, axis_name="v")(bnp.stack([x, 0.5 * x])).sum(0)

    def shard_map(self, x, s, env, m):
        f, sums = self.inner(s, env, m), s.options["sums"]

        def inner(x):
            y = self.over_b(f, x)
            return lax.psum(y, "b") if sums else y

        out = P() if sums else P("b")
        rows = bnp.concatenate([x * (1 + 0.5 * k) for k in range(self.size["b"])])
        y = bf.shard_map(inner, in_specs=P("b"), out_specs=out, axis_names={"b"})(rows)
        return y.reshape(-1, S).sum(0) / 2


setattr(Shards, "while", Shards._while)


class Whole(Interpreter):
    """The program on one device, on arrays [A, B, S]."""

    def function(self):
        size_a, size_b = self.program.sizes
        manual_b = "b" in self.program.manual

        def f(x, y, z, m):
            x = x.reshape(size_a, size_b if manual_b else 1, S)
            y = y.reshape(size_a, 1, S)
            z = z.reshape(1, size_b if manual_b else 1, S)
            out = self.run(self.program.body, [x, y, z, 0.1 * x], m[None, None])
            return self.sum_over(out, self.program.manual)[0, 0] / 8

        return f

    def place(self, axis):
        return AXES.index(axis)

    def spread(self, x, axes):
        """With the values of all ranks along some axes."""
        axes = (axes,) if isinstance(axes, str) else axes
        shape = list(x.shape)
        for a in axes:
            shape[self.place(a)] = self.size[a]
        return bnp.broadcast_to(x, shape)

    def sum_over(self, x, axes):
        axes = (axes,) if isinstance(axes, str) else axes
        return self.spread(x, axes).sum(tuple(map(self.place, axes)), keepdims=True)

    def ranks(self, x, axis):
        """The values of each rank along an axis, [n, ...], all of the others in place."""
        return bnp.moveaxis(self.spread(x, axis), self.place(axis), 0)

    def back(self, rows, axis):
        return bnp.moveaxis(rows, 0, self.place(axis))

    def times(self, x, m):
        return (x[..., None, :] @ m)[..., 0, :]

    def psum(self, x, s, env, m):
        return self.sum_over(x, s.options["axis"]) / 2

    def pmean(self, x, s, env, m):
        axes = (s.options["axis"],) if isinstance(s.options["axis"], str) else s.options["axis"]
        return self.sum_over(x, axes) / int(np.prod([self.size[a] for a in axes]))

    def pmax(self, x, s, env, m):
        axes = (s.options["axis"],) if isinstance(s.options["axis"], str) else s.options["axis"]
        return self.spread(x, axes).max(tuple(map(self.place, axes)), keepdims=True)

    def ppermute(self, x, s, env, m):
        axis = s.options["axis"]
        rows, sources = self.ranks(x, axis), {dst: src for src, dst in s.options["perm"]}
        nothing = bnp.zeros_like(rows[0])
        return self.back(
            bnp.stack([rows[sources[i]] if i in sources else nothing for i in range(len(rows))]), axis
        )

    def gathered(self, rows, members):
        """For each rank the weighted sum that ``all_gather`` of its group makes."""
        return bnp.stack([sum((j + 1.0) * rows[k] for j, k in enumerate(ms)) / 4 for ms in members])

    def all_gather(self, x, s, env, m):
        axis = s.options["axis"]
        n = self.size[axis]
        return self.back(self.gathered(self.ranks(x, axis), [range(n)] * n), axis)

    def psum_scatter(self, x, s, env, m):
        axis = s.options["axis"]
        n = self.size[axis]
        return self.back(self.scattered(self.ranks(x, axis), [list(range(n))] * n), axis)

    def scattered(self, rows, members):
        out = []
        for i, ms in enumerate(members):
            size = S // len(ms)
            at = ms.index(i) * size
            out.append(bnp.tile(sum(rows[k] for k in ms)[..., at : at + size], len(ms)) / 2)
        return bnp.stack(out)

    def all_to_all(self, x, s, env, m):
        axis = s.options["axis"]
        n = self.size[axis]
        return self.back(self.exchanged(self.ranks(x, axis), [list(range(n))] * n), axis)

    def exchanged(self, rows, members):
        out = []
        for i, ms in enumerate(members):
            size = S // len(ms)
            at = ms.index(i) * size
            out.append(bnp.concatenate([rows[k][..., at : at + size] for k in ms], -1))
        return bnp.stack(out)

    def index(self, x, s, env, m):
        axis = s.options["axis"]
        shape = [1, 1, 1]
        shape[self.place(axis)] = self.size[axis]
        return x * (1 + 0.1 * bnp.arange(self.size[axis]).reshape(shape).astype(x.dtype))

    def pcast(self, x, s, env, m):
        return self.spread(x, s.options["axis"])

    def members(self, s):
        group_of = {i: g for g in s.options["groups"] for i in g}
        return [group_of[i] for i in range(self.size[s.options["axis"]])]

    def psum_groups(self, x, s, env, m):
        rows = self.ranks(x, s.options["axis"])
        return self.back(
            bnp.stack([sum(rows[k] for k in ms) / 2 for ms in self.members(s)]), s.options["axis"]
        )

    def pmax_groups(self, x, s, env, m):
        rows = self.ranks(x, s.options["axis"])
        tops = [bnp.stack([rows[k] for k in ms]).max(0) for ms in self.members(s)]
        return self.back(bnp.stack(tops), s.options["axis"])

    def all_gather_groups(self, x, s, env, m):
        axis = s.options["axis"]
        return self.back(self.gathered(self.ranks(x, axis), self.members(s)), axis)

    def all_to_all_groups(self, x, s, env, m):
        axis = s.options["axis"]
        return self.back(self.exchanged(self.ranks(x, axis), self.members(s)), axis)

    def psum_scatter_groups(self, x, s, env, m):
        axis = s.options["axis"]
        return self.back(self.scattered(self.ranks(x, axis), self.members(s)), axis)

    def vjp_psum(self, x, s, env, m):
        return self.sum_over(bnp.sin(x), s.options["axis"]) / 2

    jvp_psum = vjp_psum
    vjp_gather = all_gather

    def vjp_scale(self, x, s, env, m):
        return 0.7 * self.spread(x, s.options["axis"])

    def vjp_grad(self, x, y, s, env, m):
        return (bnp.sin(x) * y).sum(-1, keepdims=True) * bnp.ones_like(x)

    def fixed(self, f, x):
        """A carry with the values of all ranks that it has after some step."""
        while True:
            after = bf.eval_shape(f, x).shape
            shape = np.broadcast_shapes(x.shape, after)
            if shape == x.shape:
                return x
            x = bnp.broadcast_to(x, shape)

    def steps(self, x, s, env, m):
        f = self.inner(s, env, m)
        carry, seen = self.fixed(f, x), []
        for _ in range(s.options["steps"]):
            seen.append(carry)
            carry = bnp.broadcast_to(f(carry), carry.shape)
        return carry, seen

    def scan(self, x, s, env, m):
        carry, seen = self.steps(x, s, env, m)
        return carry + 0.5 * sum(seen)

    def fori(self, x, s, env, m):
        return self.steps(x, s, env, m)[0]

    _while = fori

    def joined(self, p, one, other):
        """Of two branches, with the values of all ranks of either."""
        shape = np.broadcast_shapes(one.shape, other.shape)
        return bnp.where(p, bnp.broadcast_to(one, shape), bnp.broadcast_to(other, shape))

    def cond(self, x, p, s, env, m):
        total = self.sum_over(p.sum(-1, keepdims=True), self.manual)[0, 0, 0]
        one, other = (self.inner(s, env, m, k)(x) for k in range(2))
        return self.joined(total > 0, one, other)

    def choose(self, x, p, s, env, m):
        """Ranks choose by themselves: all that a branch reads differs between them."""
        holds = p[..., :1] > 0.1
        axes = [a for a in AXES if holds.shape[self.place(a)] > 1]
        env, x = [self.spread(v, axes) for v in env], self.spread(x, axes)
        m = bnp.broadcast_to(m, (*np.broadcast_shapes(m.shape[:2], holds.shape[:2]), S, S))
        one, other = (self.inner(s, env, m, k)(x) for k in range(2))
        return self.joined(holds, one, other)

    def switch(self, x, s, env, m):
        outs = [self.inner(s, env, m, k)(x) for k in range(2)]
        return bnp.broadcast_to(outs[s.options["which"]], np.broadcast_shapes(*(o.shape for o in outs)))

    def checkpoint(self, x, s, env, m):
        return self.inner(s, env, m)(x)

    jit = checkpoint

    def vmap(self, x, s, env, m):
        f = self.inner(s, env, m)
        return f(x) + f(0.5 * x)

    def named_vmap(self, x, s, env, m):
        f = self.inner(s, env, m)
        rows = [x, 0.5 * x]
        mean = sum(map(f, rows)) / 2
        return sum(mean * r for r in rows)

    def shard_map(self, x, s, env, m):
        f, n = self.inner(s, env, m), self.size["b"]
        y = self.over_b(f, bnp.concatenate([x * (1 + 0.5 * k) for k in range(n)], 1))
        return self.sum_over(y, "b") / 2


setattr(Whole, "while", Whole._while)


# -- comparison ------------------------------------------------------------------------------------


def arguments(program: Program) -> tuple:
    """Three vectors and a matrix in float64, of whole arrays."""
    rng = np.random.default_rng([28, *program.sizes])
    a, b = program.sizes
    b = b if "b" in program.manual else 1
    vectors = [rng.normal(size=n * S) for n in (a * b, a, b)]
    return tuple(bnp.asarray(x, dtype="float64") for x in (*vectors, rng.normal(size=(S, S)) / 2))


def derivatives(f, args, order: int) -> list:
    """The value, and by ``order`` the gradient and a derivative along it."""

    def total(*xs):
        out = f(*xs)
        return (out * np.arange(1.0, S + 1)).sum(), out

    if order == 0:
        return [f(*args)]
    (_, value), found = bf.value_and_grad(total, (0, 1, 2, 3), has_aux=True)(*args)
    if order > 1:
        gradient = bf.grad(total, (0, 3), has_aux=True)
        bent = lambda *xs: sum(bnp.tanh(g).sum() for g in gradient(*xs)[0])
        found = (*found, *bf.grad(bent, (0, 1, 3))(*args))
    return [value, *found]


def difference(program: Program, order: int, on_devices: bool = False) -> float:
    """The largest difference between both, relative to the largest value.

    Args:
      on_devices: whether arrays lie on a mesh, along whose automatic axes the program is partitioned.
    """
    args = arguments(program)
    if on_devices:
        mesh = bf.make_mesh(program.sizes, AXES)
        specs = P(AXES), P(AXES), P("b"), P(None, "b")
        placed = [bf.device_put(x, bf.NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]
        f = Shards(program).function(mesh)
        got = bf.jit(lambda *xs: derivatives(f, xs, order))(*placed)
    else:
        got = derivatives(Shards(program).function(), args, order)
    want = derivatives(Whole(program).function(), args, order)
    scale = [max(1.0, float(np.abs(w).max())) for w in want]
    return max(float(np.abs(np.asarray(g) - w).max()) / k for g, w, k in zip(got, want, scale, strict=True))
