"""Products with a gather or a scattered sum in chunks, against the plain forms."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import P, errors, lax, nn, tree
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.recipes import (
    all_gather_matmul,
    matmul_reduce_scatter,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_embedding,
)
from examples.gpt import model
from tests.parallel.exchanged import equations, exchanged, same, same_with_gradients, weighted
from tests.transforms.common import draw

FLOAT = 4


def gathered(x, w):
    return all_gather_matmul(x, w, "x")


def scattered(x, w):
    return matmul_reduce_scatter(x, w, "x")


def gathered_at_once(x, w):
    return lax.all_gather(x, "x", axis=1, tiled=True) @ w


def scattered_at_once(x, w):
    return lax.psum_scatter(x @ w, "x", scatter_dimension=1, tiled=True)


ROWS, COLUMNS = P(None, "x"), P(None, None, "x")
# in chunks, at once, specs of the operands and of the result
CASES = {
    "gather": (gathered, gathered_at_once, (ROWS, P(None, "x")), COLUMNS),
    "scatter": (scattered, scattered_at_once, (COLUMNS, P("x")), ROWS),
}
X, W = draw(2, 16, 24).astype(np.float32), draw(24, 8).astype(np.float32)


def mapped(f, n, in_specs, out_specs):
    mesh = AbstractMesh((n,), ("x",))
    return bf.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_values_and_gradients(case, n):
    chunked, plain, *specs = CASES[case]
    same_with_gradients(mapped(chunked, n, *specs), lambda x, w: x @ w, (X, W))
    same(mapped(chunked, n, *specs)(X, W), mapped(plain, n, *specs)(X, W))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [2, 4])
def test_each_part_is_sent_n_minus_1_times_forwards_and_backwards(case, n):
    chunked, plain, *specs = CASES[case]
    f = mapped(chunked, n, *specs)
    part = (n - 1) * {"gather": X.nbytes, "scatter": X[..., :8].nbytes}[case] // n
    assert exchanged(f, X, W) == {"ppermute": (n - 1, part)}
    assert exchanged(bf.value_and_grad(weighted(f), (0, 1)), X, W) == {"ppermute": (2 * (n - 1), 2 * part)}
    # the links carry what the plain form puts on them: of a gather each rank sends its part to n - 1 others
    ((count, size),) = exchanged(mapped(plain, n, *specs), X, W).values()
    assert count == 1
    assert part == (n - 1) * size // (1 if case == "gather" else n)


@pytest.mark.parametrize("case", CASES)
def test_no_product_waits_for_what_is_sent_beside_it(case):
    """In each step, matmul and message depend on the preceding step only."""
    n = 4
    chunked, _, *specs = CASES[case]
    jaxpr = bf.jit(mapped(chunked, n, *specs)).lower(X, W).jaxpr
    needs = {}
    for e, _ in equations(jaxpr):
        found = set().union(*[needs.get(a, set()) for a in e.invars if a.__class__.__name__ == "Var"])
        if e.prim.name in ("dot_general", "mesh_ppermute"):
            found = found | {id(e)}
        needs.update(dict.fromkeys(e.outvars, found))
    products = [e for e, _ in equations(jaxpr) if e.prim.name == "dot_general"]
    messages = {id(e) for e, _ in equations(jaxpr) if e.prim.name == "mesh_ppermute"}
    # product k needs the k messages before it; of a scattered sum none at all
    expected = list(range(n)) if case == "gather" else [0] * n
    assert [len(needs[e.outvars[0]] & messages) for e in products] == expected


def test_a_gpt_with_tensor_and_sequence_parallelism():
    """Losses and gradients of one device, by messages of n - 1 steps per collective.

    There are two gathers and two scatters per layer and direction.
    """
    n, config = 4, model.Config(layers=2, heads=4, width=16, context=8, vocab=12)
    params, tokens = model.init(bf.random.key(0), config), np.arange(18).reshape(2, 9) * 7 % 12
    for i, block in enumerate(params["blocks"]):  # columns by heads, so that they can be divided
        weight = block["attention"]["qkv"]["weight"].reshape(16, 3, 4, 4)
        block["attention"]["qkv"] = {"weight": weight, "bias": bnp.full((3, 4, 4), 0.1 * i)}
    specs = tree.map(lambda _: P(), params)
    specs["tokens"] = P("x")
    for block in specs["blocks"]:
        block["attention"]["qkv"] = {"weight": P(None, None, "x"), "bias": P(None, "x")}
        block["mlp"]["up"] = {"weight": P(None, "x"), "bias": P("x")}
        block["attention"]["out"]["weight"] = block["mlp"]["down"]["weight"] = P("x")

    def into(p, x):
        return all_gather_matmul(x, p["weight"].reshape(16, -1), "x") + p["bias"].reshape(-1)

    def out_of(p, x):
        return matmul_reduce_scatter(x, p["weight"], "x") + p["bias"]

    def local(params, tokens):
        inputs, t = tokens[:, :-1], 8 // n
        x = vocabulary_parallel_embedding(params["tokens"], inputs, "x", scatter_dim=1)
        x = x + lax.dynamic_slice_in_dim(params["positions"], lax.axis_index("x") * t, t)
        for p in params["blocks"]:
            qkv = into(p["attention"]["qkv"], model.norm(p["norm1"], x)).reshape(2, 8, 3, 4 // n, 4)
            heads = nn.dot_product_attention(*(qkv[:, :, i] for i in range(3)), is_causal=True)
            x = x + out_of(p["attention"]["out"], heads.reshape(2, 8, -1))
            hidden = nn.gelu(into(p["mlp"]["up"], model.norm(p["norm2"], x)), approximate=True)
            x = x + out_of(p["mlp"]["down"], hidden)
        x = model.norm(params["norm"], x)
        logits = all_gather_matmul(x, params["tokens"].T, "x")
        return vocabulary_parallel_cross_entropy(logits, tokens[:, 1:], "x").mean()

    def whole(params, tokens):
        for block in params["blocks"]:
            qkv = block["attention"]["qkv"]
            block["attention"]["qkv"] = {
                "weight": qkv["weight"].reshape(16, 48),
                "bias": qkv["bias"].reshape(48),
            }
        return model.loss(params, tokens, config)

    f = bf.shard_map(local, mesh=AbstractMesh((n,), ("x",)), in_specs=(specs, P()), out_specs=P())
    same(bf.value_and_grad(f)(params, tokens), bf.value_and_grad(whole)(params, tokens))
    steps = (4 * 2 + 1) * (n - 1)  # of layers, and of the logits
    assert exchanged(f, params, tokens)["ppermute"][0] == steps
    assert exchanged(bf.value_and_grad(f), params, tokens)["ppermute"][0] == 2 * steps


def test_another_dimension_of_rows():
    f = mapped(lambda x, w: all_gather_matmul(x, w, "x", dim=0), 2, (P("x"), P()), P())
    with pytest.raises(errors.ShardingError, match="varies over 'x'"):
        f(X, W)
    f = mapped(lambda x, w: all_gather_matmul(x, w, "x", dim=0), 2, (P("x"), P(None, "x")), COLUMNS)
    same(f(X, W), X @ W)


def test_errors():
    with pytest.raises(errors.ShapeError, match="is the one that is contracted"):
        mapped(lambda x, w: all_gather_matmul(x, w, "x", dim=2), 2, (ROWS, P()), COLUMNS)(X, W)
    with pytest.raises(
        errors.ShapeError, match=r"takes \[..., rows, n\] and \[n, columns\]"
    ):  # of NumPy's arrays
        mapped(lambda x: gathered(x, W[:3]), 2, ROWS, COLUMNS)(X)
    with pytest.raises(errors.ShapeError, match=r"takes \[..., rows, n\] and \[n, columns\]"):
        mapped(scattered, 2, (ROWS, P("x")), ROWS)(X, W)
    with pytest.raises(errors.ShapeError, match="cannot be split among 8 ranks"):
        mapped(scattered, 8, (COLUMNS, P("x")), ROWS)(X[:, :4], W)
