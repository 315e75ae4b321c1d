"""Science, statistics and reinforcement learning: cases of the breadth suite."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from benchmarks.cases.case import Case, Sizes, integers, normal, positive, weight
from benchmarks.cases.sequences import looped, of_family
from benchmarks.cases.training import torch_trained, trained
from benchmarks.suites import loop_programs


def graph(n: Sizes) -> Case:
    """Step of message passing with segment sums and a softmax over edges, float32."""
    nodes, edges, width, layers = n((32768, 262_144, 128, 3), (16, 48, 8, 2))

    def make() -> tuple:
        layer = lambda i: {
            "message": weight(2 * width, width, seed=i), "score": weight(2 * width, 1, seed=i + 1),
            "update": weight(2 * width, width, seed=i + 2),
        }  # fmt: skip
        params = {"layers": [layer(i) for i in range(layers)], "out": weight(width, 1)}
        return (
            params, normal(nodes, width), integers(nodes, edges), integers(nodes, edges, seed=1),
            normal(nodes, seed=3),
        )  # fmt: skip

    def loss(m: Any, p: Any, x: Any, source: Any, target: Any, y: Any) -> Any:
        jnp, ops = m.numpy, m.ops
        for layer in p["layers"]:
            pair = jnp.concatenate([x[source], x[target]], -1)
            score = m.nn.leaky_relu((pair @ layer["score"])[:, 0], 0.2)
            top = m.lax.stop_gradient(ops.segment_max(score, target, nodes))
            share = jnp.exp(score - top[target])
            share = share / (ops.segment_sum(share, target, nodes)[target] + 1e-9)
            message = m.nn.relu(pair @ layer["message"]) * share[:, None]
            total = ops.segment_sum(message, target, nodes)
            x = x + m.nn.relu(jnp.concatenate([x, total], -1) @ layer["update"])
        return (((x @ p["out"])[:, 0] - y) ** 2).mean()

    def torch_loss(t: Any, p: Any, x: Any, source: Any, target: Any, y: Any) -> Any:
        f = t.nn.functional
        source, target = source.long(), target.long()
        for layer in p["layers"]:
            pair = t.cat([x[source], x[target]], -1)
            score = f.leaky_relu((pair @ layer["score"])[:, 0], 0.2)
            least = t.full((nodes,), -np.inf, device=x.device)
            top = least.scatter_reduce(0, target, score.detach(), "amax")
            share = (score - top[target]).exp()
            share = share / (t.zeros(nodes, device=x.device).index_add(0, target, share)[target] + 1e-9)
            message = t.relu(pair @ layer["message"]) * share[:, None]
            total = t.zeros((nodes, width), device=x.device).index_add(0, target, message)
            x = x + t.relu(t.cat([x, total], -1) @ layer["update"])
        return (((x @ p["out"])[:, 0] - y) ** 2).mean()

    return Case(trained(loss), make, torch_trained(torch_loss), carried=1, tolerance=1e-2)


def policy_optimization(n: Sizes) -> Case:
    """Advantages and epochs of minibatches of PPO (arXiv:1707.06347), in one program."""
    steps, actors, width, epochs, batches = n((128, 64, 64, 2, 4), (8, 4, 8, 2, 2))
    total = steps * actors

    def make() -> tuple:
        params = {
            "body": [weight(8, width), weight(width, width, seed=1)], "policy": weight(width, 4, seed=2),
            "value": weight(width, 1, seed=3),
        }  # fmt: skip
        done = (integers(100, steps, actors, seed=5) == 0).astype(np.float32)
        actions = integers(4, steps, actors)
        return params, normal(steps, actors, 8), actions, normal(steps, actors, seed=4), done, np.int32(2)

    def networks(m: Any, p: Any, x: Any) -> Any:
        for w in p["body"]:
            x = m.numpy.tanh(x @ w)
        return m.nn.log_softmax(x @ p["policy"]), (x @ p["value"])[..., 0]

    def ours(m: Any, params: Any, seen: Any, actions: Any, rewards: Any, done: Any, seed: Any) -> Any:
        jnp, lax = m.numpy, m.lax
        pick = lambda log_p, a: jnp.take_along_axis(log_p, a[..., None], axis=-1)[..., 0]
        log_p, values = networks(m, params, seen)
        before = pick(log_p, actions)

        def back(s: Any, now: Any) -> Any:
            advantage, following = s
            reward, value, end = now
            delta = reward + 0.99 * following * (1 - end) - value
            advantage = delta + 0.95 * 0.99 * (1 - end) * advantage
            return (advantage, value), advantage

        zero = jnp.zeros(actors)
        advantages = lax.scan(back, (zero, zero), (rewards, values, done), reverse=True)[1]
        flat = lambda x: x.reshape(total, *x.shape[2:])
        data = tuple(map(flat, (seen, actions, before, advantages, advantages + values)))

        def loss(p: Any, batch: Any) -> Any:
            seen, actions, before, advantage, returns = batch
            log_p, values = networks(m, p, seen)
            ratio = jnp.exp(pick(log_p, actions) - before)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
            entropy = -(jnp.exp(log_p) * log_p).sum(-1)
            return -gain.mean() + 0.5 * ((values - returns) ** 2).mean() - 0.01 * entropy.mean()

        def epoch(p: Any, key: Any) -> Any:
            order = m.random.permutation(key, total).reshape(batches, -1)

            def minibatch(p: Any, where: Any) -> Any:
                value, grads = m.value_and_grad(loss)(p, tuple(x[where] for x in data))
                return m.tree.map(lambda a, g: a - 1e-2 * g, p, grads), value

            return lax.scan(minibatch, p, order)

        return lax.scan(epoch, params, m.random.split(m.random.key(seed), epochs))

    return Case(ours, make, carried=1, tolerance=5e-2)


def clusters(n: Sizes) -> Case:
    """Rounds of k-means: distances by a matmul, argmin, segment sums."""
    points, width, count, rounds = n((262_144, 32, 256, 10), (64, 4, 4, 2))

    def ours(m: Any, x: Any, centers: Any) -> Any:
        jnp = m.numpy

        def step(centers: Any, _: Any) -> Any:
            distances = (centers**2).sum(-1) - 2 * x @ centers.T
            nearest = jnp.argmin(distances, -1)
            total = m.ops.segment_sum(x, nearest, count)
            size = m.ops.segment_sum(jnp.ones(points), nearest, count)
            return total / jnp.maximum(size, 1)[:, None], distances.min(-1).mean()

        return m.lax.scan(step, centers, None, length=rounds)

    def torch(t: Any, x: Any, centers: Any) -> Any:
        values = []
        for _ in range(rounds):
            distances = (centers**2).sum(-1) - 2 * x @ centers.T
            least, nearest = distances.min(-1)
            total = t.zeros_like(centers).index_add(0, nearest, x)
            size = t.bincount(nearest, minlength=count)
            centers = total / size.clamp(min=1)[:, None]
            values.append(least.mean())
        return centers, t.stack(values)

    return Case(ours, lambda: (normal(points, width), normal(count, width, seed=1)), torch, tolerance=5e-2)


def bodies(n: Sizes) -> Case:
    """Leapfrog steps of n bodies, forces as the gradient of the energy."""
    count, steps = n((4096, 10), (16, 2))

    def ours(m: Any, x: Any, v: Any) -> Any:
        def energy(x: Any) -> Any:
            square = ((x[:, None] - x[None]) ** 2).sum(-1)
            return -0.5 * m.lax.rsqrt(square + 0.01).sum() / count

        def step(s: Any, _: Any) -> Any:
            x, v = s
            v = v - 0.005 * m.grad(energy)(x)
            x = x + 0.01 * v
            return (x, v - 0.005 * m.grad(energy)(x)), None

        return m.lax.scan(step, (x, v), None, length=steps)[0]

    return Case(ours, lambda: (normal(count, 3), normal(count, 3, seed=1)))


def molecules(n: Sizes) -> Case:
    """Forces of Lennard-Jones atoms by neighbor lists: gathers, and their gradient."""
    atoms, near = n((65536, 32), (32, 4))

    def ours(m: Any, x: Any, where: Any) -> Any:
        def energy(x: Any) -> Any:
            square = ((x[:, None] - x[where]) ** 2).sum(-1) + 0.8
            third = 1 / (square * square * square)
            return 2.0 * (third * third - third).sum()

        return m.value_and_grad(energy)(x)

    def torch(t: Any, x: Any, where: Any) -> Any:
        x = x.detach().requires_grad_()
        square = ((x[:, None] - x[where.long()]) ** 2).sum(-1) + 0.8
        third = 1 / (square * square * square)
        value = 2.0 * (third * third - third).sum()
        return value.detach(), t.autograd.grad(value, x)[0]

    return Case(ours, lambda: (normal(atoms, 3), integers(atoms, atoms, near)), torch, tolerance=1e-2)


def heat(n: Sizes) -> Case:
    """Steps of the heat equation in a plane, by shifted slices."""
    side, steps = n((2048, 100), (16, 3))

    def ours(m: Any, x: Any) -> Any:
        def step(_: Any, x: Any) -> Any:
            p = m.numpy.pad(x, 1)
            return x + 0.2 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * x)

        return m.lax.fori_loop(0, steps, step, x)

    return Case(ours, lambda: (normal(side, side),), tolerance=1e-2)


def waves(n: Sizes) -> Case:
    """Steps of the wave equation in a periodic volume, by rolls."""
    side, steps = n((192, 20), (6, 2))

    def ours(m: Any, x: Any) -> Any:
        roll = m.numpy.roll

        def step(s: Any, _: Any) -> Any:
            before, x = s
            around = sum(roll(x, d, a) for a in range(3) for d in (1, -1)) - 6 * x
            after = 2 * x - before + 0.1 * around
            return (x, after), (after * after).mean()

        return m.lax.scan(step, (x, x), None, length=steps)

    return Case(ours, lambda: (normal(side, side, side),), tolerance=1e-2)


def shallow_water(n: Sizes) -> Case:
    """Steps of the shallow-water equations on a staggered grid: many small stencils."""
    side, steps = n((1024, 50), (16, 2))

    def ours(m: Any, h: Any, u: Any, v: Any) -> Any:
        east = lambda x: m.numpy.roll(x, -1, 1)
        west = lambda x: m.numpy.roll(x, 1, 1)
        north = lambda x: m.numpy.roll(x, -1, 0)
        south = lambda x: m.numpy.roll(x, 1, 0)

        def step(_: Any, s: Any) -> Any:
            h, u, v = s
            deep_x, deep_y = 0.5 * (h + east(h)), 0.5 * (h + north(h))
            flow_x, flow_y = deep_x * u, deep_y * v
            h = h - 0.01 * (flow_x - west(flow_x) + flow_y - south(flow_y))
            turn_u = 0.25 * (v + east(v) + south(v) + south(east(v)))
            turn_v = 0.25 * (u + west(u) + north(u) + north(west(u)))
            u = u + 0.01 * (0.1 * turn_u - (east(h) - h)) - 0.001 * u * (east(u) - west(u))
            v = v - 0.01 * (0.1 * turn_v + (north(h) - h)) - 0.001 * v * (north(v) - south(v))
            return h, u, v

        return m.lax.fori_loop(0, steps, step, (h, u, v))

    make = lambda: (positive(side, side) + 1, 0.1 * normal(side, side), 0.1 * normal(side, side, seed=1))
    return Case(ours, make, tolerance=1e-2)


def physics_informed(n: Sizes) -> Case:
    """Step of a network that solves Poisson's equation: second derivatives under vmap."""
    points, hidden = n((16384, 64), (8, 8))

    def make() -> tuple:
        params = [weight(2, hidden), weight(hidden, hidden, seed=1), weight(hidden, 1, seed=2)]
        return params, normal(points, 2)

    def loss(m: Any, params: Any, x: Any) -> Any:
        jnp = m.numpy

        def network(x: Any) -> Any:
            for w in params[:-1]:
                x = jnp.tanh(x @ w)
            return (x @ params[-1])[0]

        def laplacian(x: Any) -> Any:
            along = lambda e: m.jvp(lambda y: m.jvp(network, (y,), (e,))[1], (x,), (e,))[1]
            return m.vmap(along)(jnp.eye(2)).sum()

        return ((m.vmap(laplacian)(x) + jnp.sin(x).sum(-1)) ** 2).mean()

    return Case(trained(loss), make, carried=1, tolerance=1e-2)


def sinkhorn(n: Sizes) -> Case:
    """Entropic transport between clouds of points, in logarithms, with gradients."""
    count, rounds = n((2048, 20), (12, 3))

    def ours(m: Any, x: Any, y: Any) -> Any:
        jnp = m.numpy

        def cost(x: Any) -> Any:
            c = ((x[:, None] - y[None]) ** 2).sum(-1)
            f = g = jnp.zeros(count)

            def step(s: Any, _: Any) -> Any:
                f, g = s
                f = -m.nn.logsumexp((g[None] - c) / 0.5, axis=1) * 0.5
                return (f, -m.nn.logsumexp((f[:, None] - c) / 0.5, axis=0) * 0.5), None

            f, g = m.lax.scan(step, (f, g), None, length=rounds)[0]
            return (jnp.exp((f[:, None] + g[None] - c) / 0.5) * c).sum()

        return m.value_and_grad(cost)(x)

    return Case(ours, lambda: (normal(count, 3), normal(count, 3, seed=1)), tolerance=5e-2)


def mixtures(n: Sizes) -> Case:
    """Rounds of expectation maximization for Gaussians with full covariances."""
    points, width, count, rounds = n((65536, 8, 16, 5), (64, 2, 3, 2))

    def ours(m: Any, x: Any, means: Any) -> Any:
        jnp = m.numpy
        eye = 1e-3 * jnp.eye(width)

        def step(s: Any, _: Any) -> Any:
            share, means, covariances = s
            factors = jnp.linalg.cholesky(covariances)
            centered = (x[None] - means[:, None]).swapaxes(1, 2)
            z = m.lax.linalg.triangular_solve(factors, centered, left_side=True, lower=True)
            logdet = jnp.log(jnp.diagonal(factors, axis1=1, axis2=2)).sum(-1)
            log_p = jnp.log(share)[:, None] - 0.5 * (z * z).sum(1) - logdet[:, None]
            total = m.nn.logsumexp(log_p, axis=0)
            r = jnp.exp(log_p - total)
            weights = r.sum(1)
            means = (r @ x) / weights[:, None]
            centered = x[None] - means[:, None]
            covariances = jnp.einsum("kn,kni,knj->kij", r, centered, centered) / weights[:, None, None] + eye
            return (weights / points, means, covariances), total.mean()

        start = jnp.full(count, 1 / count), means, jnp.broadcast_to(jnp.eye(width), (count, width, width))
        return m.lax.scan(step, start, None, length=rounds)

    return Case(ours, lambda: (normal(points, width), normal(count, width, seed=1)), tolerance=5e-2)


def kalman(n: Sizes) -> Case:
    """Gradient of the likelihood of many series: small matrices in a scan."""
    series, steps, width, seen = n((1024, 100, 6, 3), (4, 5, 4, 2))

    def ours(m: Any, drift: Any, observe: Any, ys: Any) -> Any:
        jnp = m.numpy

        def likelihood(drift: Any) -> Any:
            def step(s: Any, y: Any) -> Any:
                mean, cov = s
                mean, cov = drift @ mean, drift @ cov @ drift.T + 0.1 * jnp.eye(width)
                spread = observe @ cov @ observe.T + 0.5 * jnp.eye(seen)
                gain = jnp.linalg.solve(spread, observe @ cov).T
                error = y - observe @ mean
                cost = error @ jnp.linalg.solve(spread, error) + jnp.linalg.slogdet(spread)[1]
                return (mean + gain @ error, cov - gain @ observe @ cov), cost

            one = lambda ys: m.lax.scan(step, (jnp.zeros(width), jnp.eye(width)), ys)[1].sum()
            return m.vmap(one)(ys).mean()

        return m.value_and_grad(likelihood)(drift)

    def make() -> tuple:
        drift = 0.9 * np.linalg.qr(normal(width, width))[0]
        return drift.astype(np.float32), normal(seen, width, seed=1), normal(series, steps, seen, seed=2)

    return Case(ours, make, tolerance=2e-2)


def hidden_markov(n: Sizes) -> Case:
    """Forward algorithm of hidden Markov models in logarithms, with gradients."""
    series, steps, states, symbols = n((64, 200, 64, 100), (2, 5, 4, 8))

    def ours(m: Any, moves: Any, emits: Any, seen: Any) -> Any:
        def loss(moves: Any, emits: Any) -> Any:
            move, emit = m.nn.log_softmax(moves), m.nn.log_softmax(emits)

            def step(alpha: Any, y: Any) -> Any:
                alpha = m.nn.logsumexp(alpha[:, :, None] + move[None], axis=1) + emit.T[y]
                return alpha, None

            start = m.numpy.zeros((series, states)) - math.log(states)
            return -m.nn.logsumexp(m.lax.scan(step, start, seen)[0], axis=-1).mean()

        return m.value_and_grad(loss, argnums=(0, 1))(moves, emits)

    make = lambda: (
        normal(states, states), normal(states, symbols, seed=1), integers(symbols, steps, series)
    )  # fmt: skip
    return Case(ours, make, tolerance=1e-2)


def evolution(n: Sizes) -> Case:
    """Generations of an evolution strategy over a population of small networks."""
    population, hidden, rounds = n((4096, 32, 10), (8, 4, 2))

    def ours(m: Any, center: Any, x: Any, y: Any, seed: Any) -> Any:
        jnp = m.numpy

        def fitness(flat: Any) -> Any:
            w, v = flat[: 4 * hidden].reshape(4, hidden), flat[4 * hidden :].reshape(hidden, 1)
            return -(((jnp.tanh(x @ w) @ v)[:, 0] - y) ** 2).mean()

        def generation(center: Any, key: Any) -> Any:
            noise = m.random.normal(key, (population, center.size))
            score = m.vmap(fitness)(center + 0.1 * noise)
            rank = jnp.argsort(jnp.argsort(score)) / (population - 1) - 0.5
            return center + 0.1 * rank @ noise / population * 10, score.max()

        return m.lax.scan(generation, center, m.random.split(m.random.key(seed), rounds))

    make = lambda: (0.5 * normal(5 * hidden), normal(32, 4, seed=1), normal(32, seed=2), np.int32(4))
    return Case(ours, make, tolerance=5e-2)


def of_science(n: Sizes) -> dict[str, Case]:
    """All cases of this module."""
    partial = functools.partial
    return {
        "graph attention step, f32": graph(n),
        "Gaussian process, gradients": of_family("gaussian_process", n("full", "tiny"), 0),
        "PPO update": policy_optimization(n),
        "k-means": clusters(n),
        "n bodies, leapfrog": bodies(n),
        "forces by neighbor lists": molecules(n),
        "heat equation": heat(n),
        "wave equation, 3-d": waves(n),
        "shallow water": shallow_water(n),
        "physics-informed network step": physics_informed(n),
        "optimal transport, gradients": sinkhorn(n),
        "Gaussian mixture": mixtures(n),
        "Kalman filters, gradients": kalman(n),
        "hidden Markov models, gradients": hidden_markov(n),
        "evolution strategy": evolution(n),
        "Hamiltonian Monte Carlo": looped(partial(loop_programs.hmc, samples=n(200, 3)), tolerance=0.5),
        "Lorenz systems, Runge-Kutta": looped(
            partial(loop_programs.lorenz, shape=n((1024,), (4,)), steps=n(2000, 5)), tolerance=0.5
        ),
        "neural ODE, gradients": looped(
            partial(loop_programs.neural_ode, steps=n(100, 4), n=n(64, 4), hidden=n(256, 8))
        ),
        "generalized advantages": looped(partial(loop_programs.returns, actors=n(256, 2), steps=n(2000, 8))),
        "Collatz lengths, vmap of while": looped(partial(loop_programs.sieve, n=n(100_000, 16)), tolerance=0.0),
    }  # fmt: skip
