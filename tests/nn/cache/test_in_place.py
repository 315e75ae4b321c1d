"""Caches are written in place, and read by the decode kernel."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ops.gather_scatter import scatter_p
from blufunc.kernels.backends.cuda.library.attention import decode
from blufunc.kernels.backends.cuda.program import planned
from blufunc.kernels.ops.updates import joined_updates_p
from blufunc.nn import cache as caches
from tests.emulation import fake_cuda

B, S, K, N, H = 4, 512, 2, 8, 64
MAKERS = {
    "contiguous": lambda dtype: caches.contiguous(B, S, K, H, dtype),
    "ring": lambda dtype: caches.ring(B, S, K, H, dtype),
    "paged": lambda dtype: caches.paged(np.arange(B * 8).reshape(B, 8), B * 8, 64, K, H, dtype),
}
POSITIONS = {"one position": np.int32(3), "each position": np.array([3, 9, 4, 100], np.int32)}


@pytest.fixture
def fake(monkeypatch):
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def cuda(fake):
    return bf.devices("cuda")[0]


def step(cache, query, key, value, position):
    cache = caches.update(cache, key, value, position)
    return caches.attention(query, cache, position), cache


def new(dtype, T=1):
    rng = np.random.default_rng(0)
    return [bnp.asarray(rng.normal(size=(B, T, n, H)), dtype=dtype) for n in (N, K, K)]


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("layout", MAKERS)
def test_a_donated_cache_is_not_copied(layout, position, T):
    cache, (_, k, v) = MAKERS[layout]("float32"), new("float32", T)
    g = bf.jit(caches.update, donate_argnums=0)
    memory = bf.explain(g, cache, k, v, POSITIONS[position]).memory
    assert memory.output_bytes + memory.arena_bytes < cache.keys.nbytes / 16
    kept = bf.explain(bf.jit(caches.update), cache, k, v, POSITIONS[position]).memory
    assert kept.output_bytes >= 2 * cache.keys.nbytes


PRIMS = {
    ("contiguous", "one position"): [joined_updates_p],
    ("contiguous", "each position"): [scatter_p] * 2,
    ("ring", "one position"): [joined_updates_p],
    ("ring", "each position"): [scatter_p] * 2,
}


@pytest.mark.parametrize("layout, position", PRIMS)
def test_the_plan_of_a_step_on_a_gpu(layout, position, monkeypatch):
    """Updates in the memory of the cache, and one kernel that skips tiles."""
    asked = []
    monkeypatch.setattr(
        decode, "decodes", lambda *args, f=decode.decodes: asked.append(f(*args)) or asked[-1]
    )
    args = MAKERS[layout]("bfloat16"), *new("bfloat16"), POSITIONS[position]
    jaxpr = bf.jit(step, donate_argnums=0).trace(*args).jaxpr
    made = planned(jaxpr, [True, True, False, False, False, False], "sm_90a")
    prims = [s.eqn.prim for s in made.steps if hasattr(s, "eqn")]
    assert prims[:-1] == PRIMS[layout, position] and prims[-1].name == "attention"
    assert any(asked)
    (attention,) = [s.eqn for s in made.steps if hasattr(s, "eqn") and s.eqn.prim.name == "attention"]
    assert attention.params["mods"].bounds is not None


def generated(cache, query, key, value, position, n):
    """A loop of steps whose queries depend on the results."""

    def body(state):
        i, cache, query, position = state
        out, cache = step(cache, query, key + i.astype(key.dtype), value, position)
        return i + 1, cache, out, position + 1

    return lax.while_loop(lambda state: state[0] < n, body, (0, cache, query, position))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("layout", MAKERS)
def test_a_loop_does_not_copy_its_cache(layout, position, fake, cuda):
    args = MAKERS[layout]("bfloat16"), *new("bfloat16"), bnp.asarray(POSITIONS[position])
    f = bf.jit(generated)
    want = f(*args, np.int32(7))
    there = bf.device_put(args, cuda)
    size = args[0].keys.nbytes
    for n in (7, 30):
        fake.copies.clear()
        got = f(*there, np.int32(n))
        assert fake.copies[size] <= 8  # of keys and values, at the beginning and at the end of the loop
        if n == 7:
            for x, y in zip(bf.tree.leaves(got), bf.tree.leaves(want), strict=True):
                np.testing.assert_allclose(
                    np.asarray(x, "float32"), np.asarray(y, "float32"), atol=0.03, rtol=0.03
                )
