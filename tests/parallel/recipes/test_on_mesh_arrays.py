"""Parallel functions in compiled programs, on arrays of a simulated mesh."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import NamedSharding, P, lax, nn, tree
from blufunc.parallel import recipes
from tests.parallel.exchanged import same
from tests.transforms.common import draw

B, T, N, H, V, C = 2, 16, 4, 8, 11, 8


def attention(routing):
    def step(q, k, v):
        out = bf.parallel.context_parallel_attention(q, k, v, "x", routing=routing, is_causal=True)
        return lax.psum((out**2).sum(), "x")

    def whole(*qkv):
        return (
            nn.dot_product_attention(*(bf.parallel.unzigzag(x, 4) for x in qkv), is_causal=True) ** 2
        ).sum()

    return step, whole, [draw(B, T, N, H)] * 3, [P(None, "x")] * 3


def experts():
    def expert(p, x):
        return bnp.tanh(x @ p)

    def step(p, router, x):
        out, balance = bf.parallel.mixture_of_experts(expert, p, router, x, axis="x")
        return lax.psum((out**2).sum(), "x") + balance

    def whole(p, router, x):
        out, balance = bf.parallel.mixture_of_experts(expert, p, router, x, groups=4)
        return (out**2).sum() + balance

    return step, whole, [draw(8, C, C), draw(C, 8), draw(8, 3, C)], [P("x"), P(), P("x")]


def products():
    def step(x, up, down):
        y = bf.parallel.all_gather_matmul(x, up, "x")
        return lax.psum((bf.parallel.matmul_reduce_scatter(bnp.tanh(y), down, "x") ** 2).sum(), "x")

    args = [draw(B, T, C), draw(C, 16), draw(16, C)]
    return (
        step,
        lambda x, u, d: ((bnp.tanh(x @ u) @ d) ** 2).sum(),
        args,
        [P(None, "x"), P(None, "x"), P("x")],
    )


def vocabulary():
    labels = np.arange(B * T).reshape(B, T) % V

    def step(table, x):
        x = x + bf.parallel.vocabulary_parallel_embedding(table, labels, "x")
        return bf.parallel.vocabulary_parallel_cross_entropy(x @ table.T, labels, "x", V).mean()

    def whole(table, x):
        return nn.softmax_cross_entropy_with_integer_labels((x + table[labels]) @ table[:V].T, labels).mean()

    return step, whole, [bf.parallel.pad_vocabulary(bnp.asarray(draw(V, C)), 4), draw(B, T, C)], [P("x"), P()]


def test_names_of_recipes_are_found_in_parallel():
    assert set(recipes.__all__) <= set(dir(bf.parallel))
    assert all(getattr(bf.parallel, name) is getattr(recipes, name) for name in recipes.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'zig'"):
        bf.parallel.zig


CASES = {
    **{f"attention by {r}": attention(r) for r in ("ring", "all_gather", "all_to_all")},
    "experts": experts(),
    "products": products(),
    "vocabulary": vocabulary(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_compiled_gradients(name, eight):
    step, whole, args, specs = CASES[name]
    args = [np.asarray(a, np.float32) for a in args]
    mesh = bf.make_mesh((4,), ("x",), devices=eight[:4])
    mapped = bf.shard_map(step, mesh=mesh, in_specs=tuple(specs), out_specs=P())
    placed = [bf.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
    numbers = tuple(range(len(args)))
    value, grads = bf.jit(bf.value_and_grad(mapped, numbers))(*placed)
    same((value, grads), bf.value_and_grad(whole, numbers)(*map(bnp.asarray, args)))
    assert [g.sharding.spec for g in grads] == specs


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_compiled_pipeline(schedule, eight):
    mesh = bf.make_mesh((4, 2), ("stage", "data"), devices=eight)
    x, layers, shared = (np.asarray(draw(*s), np.float32) for s in ((3, 4, C), (8, C, C), (C,)))

    def stage(layers, x):
        return lax.scan(lambda x, w: (x + bnp.tanh(x @ w), None), x, layers)[0]

    def loss(s, y, m):
        return ((y * s) ** 2).mean()

    def local(shared, layers, x):
        return bf.parallel.pipeline_value_and_grad(
            lambda s, m: m + s, stage, loss, shared, layers, x, "stage", schedule=schedule, data_axes="data"
        )

    specs = P(), P("stage"), P(None, "data")
    mapped = bf.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), (P(), P("stage"))))
    placed = [
        bf.device_put(a, NamedSharding(mesh, s)) for a, s in zip((shared, layers, x), specs, strict=True)
    ]
    want = bf.value_and_grad(lambda s, w: loss(s, stage(w, x + s), None), (0, 1))(shared, layers)
    got = bf.jit(mapped)(*placed)
    same(got, want)
    assert tree.leaves(got)[-1].sharding.spec == P("stage")
