"""chex: dataclasses as pytrees, assertions, and variants of functions."""

import chex
import jax
import jax.numpy as jnp


@chex.dataclass
class State:
    position: chex.Array
    step: int


def results():
    state = State(position=jnp.arange(3.0), step=1)
    moved = jax.jit(lambda s: s.replace(position=s.position + s.step))(state)
    chex.assert_shape(moved.position, (3,))
    chex.assert_trees_all_close(moved, State(position=jnp.arange(3.0) + 1, step=1))
    chex.assert_trees_all_equal_structs(state, moved)
    chex.assert_rank([moved.position, 1.0], [1, 0])
    refused = 0
    for check in (
        lambda: chex.assert_shape(state.position, (4,)),
        lambda: chex.assert_type(state.position, int),
        lambda: chex.assert_tree_all_finite(jnp.array([jnp.nan])),
    ):
        try:
            check()
        except AssertionError:
            refused += 1

    @chex.assert_max_traces(n=1)
    def doubled(x):
        return x * 2

    f = jax.jit(doubled)
    return {
        "moved": moved.position,
        "grad": jax.grad(lambda s: (s.position**2).sum(), allow_int=True)(state).position,
        "leaves": len(jax.tree.leaves(state)),
        "refused": refused,
        "traces": f(f(jnp.ones(2))),
    }
