"""Random attention-like programs: recognition preserves their results.

Each case is a seed, which draws one option per row of ``OPTIONS``: layouts, sizes, scales, masks, spellings of the
softmax, and the transform or loop around it. Compared are ``jit`` and eager execution on the CPU, and the CPU with a
device that runs definitions, for the result and for gradients. A CUDA plan is drafted for both.
"""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, nn, tree
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from tests.emulation import fake_cuda
from tests.nn.attention.test_recognised import as_loss, planned

H = 16
OPTIONS = {
    "sizes": [(24, 24), (1, 24), (3, 24), (24, 32), (40, 24), (2, 20), (5, 8), (3, 1), (24, 24)],
    "batch": [1, 2, 2, 3],
    "heads": [(1, 1), (2, 1), (3, 1), (2, 2), (1, 2)],  # key heads, query heads per key head
    "query": ["bhgqd", "bqhgd", "bqhgd", "qbghd", "bghqd"],
    "key": ["bhkd", "bkhd", "bkhd", "bhdk", "kbhd"],
    "value": ["bhkd", "bkhd", "bkhd", "bdhk", "kbhd"],
    "scores": ["bhgqk", "bhgqk", "bhgkq", "bqhgk", "kqbhg"],
    "out": ["bhgqd", "bqhgd", "bqhgd", "dbqhg"],
    "swapped": [False, True],
    "dtype": ["bfloat16", "bfloat16", "bfloat16", "float16", "float32"],
    "wide": ["no", "preferred", "cast", "operands"],
    "scale": ["no", "times", "over", "query", "numpy", "array", "closed over", "argument", "negative"],
    "mask": [
        "no",
        "causal",
        "causal",
        "loop index",
        "loop index",
        "window",
        "closed over",
        "padding",
        "per head",
        "not",
        "unsigned",
        "infinite",
        "nothing seen",
    ],
    "hide": ["-inf", "-inf", "-1e9", "-1e4", "least", "added", "added -inf", "times", "where=", "subtracted"],
    "change": ["no", "no", "no", "cap", "bias", "scaled after", "index"],
    "softmax": ["nn", "nn", "shift", "stop_gradient", "no shift", "inverse", "wide", "custom axis"],
    "around": ["nothing", "fori", "fori", "scan", "outer scan", "vmap", "cond", "checkpoint", "jit", "while"],
    "default": ["", "cuda"],
}


def drawn(seed):
    """The options of a case."""
    rng = np.random.default_rng(seed)
    return {name: options[rng.integers(len(options))] for name, options in OPTIONS.items()}


def with_one_query(seed, options):
    """The options with one query, without an axis of its own if the seed is odd."""
    o = options | {"sizes": (1, 72)}
    if seed % 2:
        o |= {name: o[name].replace("q", "") for name in ("query", "scores", "out")}
        rng = np.random.default_rng((seed, 2))
        o["mask"] = rng.choice(["no", "loop index", "loop index", "padding", "per head"])
        o["change"] = rng.choice(["no", "no", "cap", "index"])
    return o


class Program:
    """A random function with attention.

    Its arguments are queries, keys, values, a boolean [batch, keys], a bias [queries, keys] and a scalar.
    """

    def __init__(self, seed, decoding=False):
        self.seed, self.o, features = seed, drawn(seed), H
        if decoding:
            self.o, features = with_one_query(seed, self.o), 64
        (T, S), (K, G) = self.o["sizes"], self.o["heads"]
        self.sizes = {"b": self.o["batch"], "h": K, "g": G, "q": T, "k": S, "d": features}
        # closed over as an array
        self.number = bnp.asarray(np.float32(0.25))
        self.table = bnp.asarray(np.random.default_rng(seed).random((T, S)) < 0.7).at[:, 0].set(True)

    def __call__(self, *args):
        around = getattr(self, "_" + self.o["around"].replace(" ", "_"))
        return around(*args)

    def _nothing(self, *args):
        return self.attend(3, *args)

    def _fori(self, q, *args):
        return lax.fori_loop(0, 3, lambda i, x: x * 0.5 + self.in_place(i, x, *args), q)

    def _while(self, q, *args):
        step = lambda state: (state[0] + 1, state[1] * 0.5 + self.in_place(state[0], state[1], *args))
        if self.differentiated:  # reverse mode has no while_loop
            return self._fori(q, *args)
        return lax.while_loop(lambda state: state[0] < 3, step, (bnp.asarray(0), q))[1]

    def _scan(self, q, *args):
        return lax.scan(lambda x, i: (self.in_place(i, x, *args), None), q, bnp.arange(3))[0]

    def _outer_scan(self, q, *args):
        """The index is a tracer of the outer loop, read in the inner one."""

        def outer(x, i):
            return lax.scan(lambda y, _: (self.in_place(i, y, *args), None), x, None, length=2)

        return lax.scan(outer, q, bnp.arange(2))[0]

    def _vmap(self, q, *args):
        return bf.vmap(lambda q, i: self.attend(i, q, *args))(bnp.stack([q, q * 0.5]), bnp.arange(2))

    def _cond(self, q, *args):
        return lax.cond(args[-1] > 0, lambda *xs: self.in_place(2, *xs), lambda q, *xs: q, q, *args)

    def _checkpoint(self, *args):
        return bf.checkpoint(lambda *xs: self.attend(2, *xs))(*args)

    def _jit(self, *args):
        return bf.jit(self.attend)(2, *args)

    differentiated = False

    def in_place(self, i, q, *args):
        """The result in the layout of the queries."""
        return bnp.einsum(f"{self.o['out']}->{self.o['query']}", self.attend(i, q, *args)).astype(q.dtype)

    # -- the attention -----------------------------------------------------------------------------

    def like_scores(self, x, axes):
        """An array of these axes, broadcastable to the scores."""
        x = bnp.einsum(f"{axes}->{''.join(a for a in self.o['scores'] if a in axes)}", x * 1) > 0
        return bnp.reshape(x, [self.sizes[a] if a in axes else 1 for a in self.o["scores"]])

    def attend(self, i, q, k, v, seen, bias, factor):
        o = self.o
        if o["scale"] == "query":
            q = q * 0.25
        how = {"preferred_element_type": "float32"} if o["wide"] == "preferred" else {}
        if o["wide"] == "operands":
            q, k = q.astype("float32"), k.astype("float32")
        sides = (k, q) if o["swapped"] else (q, k)
        names = (o["key"], o["query"]) if o["swapped"] else (o["query"], o["key"])
        scores = bnp.einsum(f"{names[0]},{names[1]}->{o['scores']}", *sides, **how)
        if o["wide"] == "cast":
            scores = scores.astype("float32")
        scores = self.changed(self.scaled(scores, factor), i, bias)
        scores, where = self.masked(scores, i, seen)
        weights = self.softmax(scores, where).astype(v.dtype)
        sides = (v, weights) if o["swapped"] else (weights, v)
        names = (o["value"], o["scores"]) if o["swapped"] else (o["scores"], o["value"])
        return bnp.einsum(f"{names[0]},{names[1]}->{o['out']}", *sides)

    def scaled(self, x, factor):
        kinds = {
            "times": lambda: x * 0.25,
            "over": lambda: x / 4,
            "numpy": lambda: x * np.asarray(0.25, x.dtype),
            "array": lambda: x * bnp.asarray(0.25, x.dtype),
            "closed over": lambda: (x * self.number).astype(x.dtype),
            "argument": lambda: (x * factor).astype(x.dtype),
            "negative": lambda: x * -0.25,
        }
        return kinds[self.o["scale"]]() if self.o["scale"] in kinds else x

    def changed(self, x, i, bias):
        if self.o["change"] == "cap":
            return 3 * bnp.tanh(x / 3)
        if self.o["change"] == "bias":
            axes = [self.sizes[a] if a in "qk" else 1 for a in self.o["scores"]]
            bias = bias if self.o["scores"].index("q") < self.o["scores"].index("k") else bias.T
            return x + bias.reshape(axes).astype(x.dtype)
        if self.o["change"] == "index":
            return x + bnp.asarray(i, x.dtype) * 0.25
        return x

    def mask(self, i, seen):
        T, S, K = (self.sizes[a] for a in "qkh")
        rows, columns = bnp.arange(T)[:, None], bnp.arange(S)
        kinds = {
            "causal": lambda: (rows >= columns, "qk"),
            "loop index": lambda: (columns <= i, "k"),
            "window": lambda: (((rows - columns < 4) & (columns <= rows)) | (columns == 0), "qk"),
            "closed over": lambda: (self.table, "qk"),
            "padding": lambda: (seen, "bk"),
            "per head": lambda: (columns <= bnp.arange(K)[:, None] + i, "hk"),
            "not": lambda: (~(columns > rows + 2), "qk"),
            "unsigned": lambda: (rows.astype("uint32") - columns.astype("uint32") >= 0, "qk"),
            "infinite": lambda: (rows.astype("float32") - columns < bnp.inf, "qk"),
            "nothing seen": lambda: (columns < rows, "qk"),
        }
        return kinds[self.o["mask"]]()

    def masked(self, x, i, seen):
        hide = self.o["hide"]
        if self.o["mask"] == "no":
            return x, None
        m = self.like_scores(*self.mask(i, seen))
        if hide == "where=":
            return x, m
        kinds = {
            "least": lambda: bnp.where(m, x, bnp.finfo(x.dtype).min),
            "added": lambda: x + bnp.where(m, 0, -1e9 if x.dtype != "float16" else -6e4).astype(x.dtype),
            "added -inf": lambda: x + bnp.where(m, 0.0, -bnp.inf).astype(x.dtype),
            "times": lambda: x + (1 - m.astype(x.dtype)) * bnp.asarray(-3e4, x.dtype),
            "subtracted": lambda: x - bnp.where(m, 0, bnp.asarray(3e4, x.dtype)),
        }
        if hide not in kinds:
            number = float(hide) if hide != "-1e9" or x.dtype != "float16" else -6e4  # its least is -65504
            kinds[hide] = lambda: bnp.where(m, x, number)
        x = kinds[hide]()
        return x * 0.5 if self.o["change"] == "scaled after" else x, None

    def softmax(self, x, where):
        axis, how = self.o["scores"].index("k"), self.o["softmax"]
        if how == "wide":
            x = x.astype("float32")
        if where is not None:
            return nn.softmax(x, axis, where=where)
        if how in ("nn", "wide"):
            return nn.softmax(x, axis)
        if how == "custom axis":
            return bnp.moveaxis(nn.softmax(bnp.moveaxis(x, axis, -1)), -1, axis)
        top = x.max(axis, keepdims=True)
        shift = {"no shift": 0, "stop_gradient": lax.stop_gradient(top)}.get(how, top)
        e = bnp.exp(x - shift)
        total = e.sum(axis, keepdims=True)
        return e * (1 / total) if how == "inverse" else e / total

    def operands(self):
        """The arguments, as NumPy arrays."""
        rng, o = np.random.default_rng((self.seed, 1)), self.o
        shapes = [[self.sizes[a] for a in o[name]] for name in ("query", "key", "value")]
        seen = rng.random((self.sizes["b"], self.sizes["k"])) < 0.7
        seen[:, 0] = True
        bias = rng.standard_normal((self.sizes["q"], self.sizes["k"])).astype(np.float32)
        of = [(rng.standard_normal(s) / 2).astype(bf.numpy.dtype(o["dtype"])) for s in shapes]
        return [*of, seen, bias, np.float32(0.25)]


def close(got, want, masked=False):
    """Leaves are equal up to the rounding of 16 bits.

    Args:
      masked: whether NaN is wanted where kernels may have a number, as in gradients of rows without a key.
    """
    for g, w in zip(tree.leaves(got), tree.leaves(want), strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert g.shape == w.shape and g.dtype == w.dtype
        known = ~np.isnan(w.astype(np.float64))
        g, w = (x[known].astype(np.float64) if masked else x.astype(np.float64) for x in (g, w))
        size = np.max(np.abs(w), initial=1e-4, where=~np.isnan(w))
        np.testing.assert_allclose(g, w, atol=6e-2 * size)


def wanted(program, args):
    """Result and gradients, eagerly and on the CPU."""
    program.differentiated = False
    out = program(*args)
    program.differentiated = True
    return out, bf.grad(as_loss(program), (0, 1, 2))(*args)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(64))
def test_random_attention_is_what_was_written(seed, monkeypatch):
    check(Program(seed), lambda: Program(seed), monkeypatch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(1000, 1064))
def test_random_decoding_is_what_was_written(seed, monkeypatch):
    check(Program(seed, decoding=True), lambda: Program(seed, decoding=True), monkeypatch)


def check(program, remade, monkeypatch):
    """Compare jit with eager execution, and the CPU with a fake device."""
    args = program.operands()
    both = bf.jit(lambda *xs: wanted(program, xs))
    on_host = list(map(bnp.asarray, args))
    want = wanted(program, on_host)
    close(both(*on_host), want)
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(config, "default_device", program.o["default"])
    program = remade()
    both = bf.jit(lambda *xs: wanted(program, xs))
    planned(both, *[bf.ShapeDtypeStruct(x.shape, x.dtype) for x in args])
    got = both(*[from_numpy(x, bf.devices("cuda")[0]) for x in args])
    close(got[0], want[0])
    close(got[1], want[1], masked=True)
