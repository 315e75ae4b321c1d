"""Models of sequences, tables and experts: cases of the breadth suite."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

import blufunc
from benchmarks.cases.case import BF16, LOW, Case, Sizes, integers, normal, weight
from benchmarks.cases.training import cross_entropy, torch_trained, torch_value_and_grad, trained
from benchmarks.suites import loop_programs
from benchmarks.suites.families import FAMILIES


def of_family(name: str, size: str, carried: int, torch: Any = None, **options: Any) -> Case:
    """A program of ``suites/families.py``, with arrays of the same types."""

    def ours(m: Any, *args: Any) -> Any:
        return FAMILIES[name](m, size)[0](*args)

    def make() -> tuple:
        args = blufunc.eval_shape(FAMILIES[name](blufunc, size)[1])

        def array(leaf: Any) -> np.ndarray:
            if leaf.dtype.kind == "i":
                return integers(64, *leaf.shape) if leaf.ndim else np.zeros((), np.int32)
            if leaf.ndim < 2:
                return np.ones(leaf.shape, np.float32)
            return normal(*leaf.shape) if leaf.ndim == 4 else weight(*leaf.shape)

        params, *others = blufunc.tree.map(array, args)
        if carried == 2:  # moments of an optimizer start at zero
            others[0] = blufunc.tree.map(np.zeros_like, others[0])
        return params, *others

    return Case(ours, make, torch, carried=carried, **options)


def torch_vit(layers: int, width: int, heads: int, side: int, patch: int, batch: int) -> Any:
    """Loss of the vision transformer of ``families.py``."""
    count = (side // patch) ** 2

    def loss(t: Any, p: Any, images: Any, labels: Any) -> Any:
        f = t.nn.functional
        low = lambda w: w.bfloat16()
        norm = lambda s, x: f.layer_norm(x.float(), (width,), s, eps=1e-6).bfloat16()
        x = images.reshape(batch, side // patch, patch, side // patch, patch, 3).permute(0, 1, 3, 2, 4, 5)
        x = low(x.reshape(batch, count, -1)) @ low(p["patches"]) + low(p["positions"])
        for layer in p["layers"]:
            qkv = (norm(layer["norm1"], x) @ low(layer["qkv"])).reshape(batch, count, 3, heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = f.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, count, width)
            x = x + y @ low(layer["out"])
            x = x + f.gelu(norm(layer["norm2"], x) @ low(layer["up"])) @ low(layer["down"])
        return f.cross_entropy(x.mean(1).float() @ p["head"], labels.long())

    return loss


def torch_gpt2(layers: int, width: int, heads: int, vocab: int, batch: int, length: int) -> Any:
    """AdamW step of the GPT-2 of ``families.py``."""

    def loss(t: Any, p: Any, tokens: Any) -> Any:
        f = t.nn.functional
        low = lambda w: w.bfloat16()
        norm = lambda s, x: f.layer_norm(x.float(), (width,), s[0], s[1]).bfloat16()
        linear = lambda q, x: x @ low(q["w"]) + low(q["b"])
        inputs, targets = tokens[:, :-1].long(), tokens[:, 1:].long()
        x = low(f.embedding(inputs, p["tokens"]) + p["positions"])
        for layer in p["layers"]:
            qkv = linear(layer["qkv"], norm(layer["norm1"], x)).reshape(batch, length, 3, heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + linear(layer["out"], y.transpose(1, 2).reshape(batch, length, width))
            h = f.gelu(linear(layer["up"], norm(layer["norm2"], x)), approximate="tanh")
            x = x + linear(layer["down"], h)
        logits = norm(p["norm"], x) @ low(p["tokens"]).T
        return f.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    program, counts = torch_value_and_grad(loss), []

    def step(t: Any, params: Any, state: Any, tokens: Any) -> Any:
        from torch.utils import _pytree as pytree

        value, grads = program(t, params, tokens)
        leaves = pytree.tree_leaves(params)
        first, second, _ = state
        counts[:] = counts or [t.zeros((), device="cuda") for _ in leaves]
        with t.no_grad():
            t._foreach_add_(counts, 1)
            one, two = pytree.tree_leaves(first), pytree.tree_leaves(second)
            t._fused_adamw_(
                leaves, pytree.tree_leaves(grads), one, two, [], counts,
                lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
        return params, state, value

    return step


def gru(n: Sizes) -> Case:
    """Gradients of a GRU (arXiv:1406.1078), bfloat16; PyTorch's is cuDNN's."""
    steps, batch, width = n((256, 64, 512), (6, 2, 8))
    nets: dict[str, Any] = {}

    def loss(m: Any, p: Any, xs: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            a, b = x @ p["x"] + p["b"], h @ p["h"]
            (ar, az, an), (br, bz, bn) = m.numpy.split(a, 3, axis=-1), m.numpy.split(b, 3, axis=-1)
            z = m.nn.sigmoid(az + bz)
            new = m.numpy.tanh(an + m.nn.sigmoid(ar + br) * bn)
            h = (1 - z) * new + z * h
            return h, h

        hs = m.lax.scan(cell, m.numpy.zeros((batch, width), xs.dtype), xs)[1]
        return (hs.astype(m.numpy.float32) ** 2).mean()

    def make() -> tuple:
        params = {
            "x": weight(width, 3 * width, dtype=BF16), "h": weight(width, 3 * width, dtype=BF16, seed=1),
            "b": normal(3 * width, dtype=BF16),
        }  # fmt: skip
        return params, normal(steps, batch, width, dtype=BF16, seed=2)

    def torch(t: Any, p: Any, xs: Any) -> Any:
        return _recurrent(t, nets, "GRU", xs)

    ours = lambda m, p, xs: m.value_and_grad(lambda p: loss(m, p, xs))(p)
    return Case(ours, make, torch, comparable=False, **LOW)


def _recurrent(t: Any, nets: dict, kind: str, xs: Any) -> Any:
    """Loss and gradients of PyTorch's own module, with weights of its own."""
    width = xs.shape[-1]
    if kind not in nets:
        nets[kind] = getattr(t.nn, kind)(width, width, device=xs.device, dtype=xs.dtype)
    net = nets[kind]
    value = (net(xs)[0].float() ** 2).mean()
    return value.detach(), t.autograd.grad(value, list(net.parameters()))


def lstm(n: Sizes) -> Case:
    """Gradients of an LSTM, bfloat16; PyTorch's is cuDNN's."""
    shape = n((512, 64, 512), (6, 2, 8))
    nets: dict[str, Any] = {}
    make = lambda: tuple(a.astype(BF16) for a in loop_programs._lstm_arguments(*shape))

    def ours(m: Any, w: Any, u: Any, b: Any, xs: Any) -> Any:
        loss = lambda w, u, b: (loop_programs._lstm(m, w, u, b, xs).astype("float32") ** 2).mean()
        return m.value_and_grad(loss, argnums=(0, 1, 2))(w, u, b)

    torch = lambda t, w, u, b, xs: _recurrent(t, nets, "LSTM", xs)
    return Case(ours, make, torch, comparable=False, **LOW)


def looped(program: Any, **options: Any) -> Case:
    """A program of ``suites/loop_programs.py``."""
    tolerance = options.pop("tolerance", 1e-2)

    def ours(m: Any, *args: Any) -> Any:
        return program(m, **options)[0](*args)

    return Case(ours, lambda: program(blufunc, **options)[1], tolerance=tolerance)


def state_space(n: Sizes) -> Case:
    """Gradients of a selective state-space layer (arXiv:2312.00752).

    Gates, a causal convolution and an associative scan of states that depend on the input.
    """
    batch, length, width, states = n((4, 2048, 1024, 8), (2, 8, 8, 2))
    rank = max(2, width // 16)

    def make() -> tuple:
        params = {
            "in": weight(width, 2 * width), "conv": normal(4, width, scale=0.5),
            "rank": weight(width, rank, seed=1), "step": weight(rank, width, seed=2),
            "b": weight(width, states, seed=3), "c": weight(width, states, seed=4),
            "a": normal(width, states, seed=5), "skip": np.ones(width, np.float32),
            "out": weight(width, width, seed=6),
        }  # fmt: skip
        return params, normal(batch, length, width, dtype=BF16)

    def loss(m: Any, p: Any, x: Any) -> Any:
        jnp = m.numpy
        low = lambda w: w.astype(BF16)
        h, gate = jnp.split(x @ low(p["in"]), 2, axis=-1)
        padded = jnp.pad(h, ((0, 0), (3, 0), (0, 0)))
        h = m.nn.silu(sum(padded[:, i : i + length] * low(p["conv"][i]) for i in range(4)))
        step = m.nn.softplus((h @ low(p["rank"]) @ low(p["step"])).astype(jnp.float32))
        b = (h @ low(p["b"])).astype(jnp.float32)
        c = (h @ low(p["c"])).astype(jnp.float32)
        keep = jnp.exp(-step[..., None] * jnp.exp(p["a"]))
        add = (step * h.astype(jnp.float32))[..., None] * b[:, :, None]
        merge = lambda s, t: (s[0] * t[0], s[1] * t[0] + t[1])
        states = m.lax.associative_scan(merge, (keep, add), axis=1)[1]
        y = (states * c[:, :, None]).sum(-1) + p["skip"] * h.astype(jnp.float32)
        y = low(y) * m.nn.silu(gate)
        return ((y @ low(p["out"])).astype(jnp.float32) ** 2).mean()

    return Case(trained(loss), make, carried=1, **LOW)


def experts(n: Sizes, ragged: bool) -> Case:
    """Step of a mixture of experts with 2 of 8 for each token.

    One-hot dispatch with a capacity (arXiv:2101.03961), or sorted tokens and ``lax.ragged_dot``.
    """
    tokens, width, hidden, count = n((8192, 1024, 2048, 8), (16, 8, 16, 4))
    capacity = 2 * tokens // count

    def make() -> tuple:
        params = {
            "router": weight(width, count), "up": weight(count, width, hidden) * count**0.5,
            "down": weight(count, hidden, width) * count**0.5,
        }  # fmt: skip
        return params, normal(tokens, width, dtype=BF16)

    def routed(m: Any, p: Any, x: Any) -> Any:
        logits = x.astype(m.numpy.float32) @ p["router"]
        top, which = m.lax.top_k(logits, 2)
        return m.nn.softmax(top, axis=-1), which

    def dispatched(m: Any, p: Any, x: Any) -> Any:
        jnp = m.numpy
        gates, which = routed(m, p, x)
        flat = which.T.reshape(-1)  # first choices take places first
        hot = m.nn.one_hot(flat, count, dtype=jnp.int32)
        place = ((jnp.cumsum(hot, 0) - 1) * hot).sum(-1)
        slots = m.nn.one_hot(place, capacity, dtype=x.dtype)[:, None] * hot.astype(x.dtype)[..., None]
        slots = slots.reshape(2, tokens, count, capacity)
        inputs = jnp.einsum("ktec,td->ecd", slots, x)
        h = m.nn.gelu(jnp.einsum("ecd,edh->ech", inputs, p["up"].astype(x.dtype)))
        y = jnp.einsum("ech,ehd->ecd", h, p["down"].astype(x.dtype))
        return jnp.einsum("ktec,ecd,kt->td", slots, y, gates.T.astype(x.dtype))

    def grouped(m: Any, p: Any, x: Any) -> Any:
        jnp = m.numpy
        gates, which = routed(m, p, x)
        flat = which.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=count).astype(jnp.int32)
        inputs = x[order // 2]
        h = m.nn.gelu(m.lax.ragged_dot(inputs, p["up"].astype(x.dtype), sizes))
        y = m.lax.ragged_dot(h, p["down"].astype(x.dtype), sizes)
        weighted = y * gates.reshape(-1)[order][:, None].astype(x.dtype)
        return jnp.zeros_like(x).at[order // 2].add(weighted)

    def loss(m: Any, p: Any, x: Any) -> Any:
        y = (grouped if ragged else dispatched)(m, p, x)
        return (y.astype(m.numpy.float32) ** 2).mean()

    return Case(trained(loss), make, carried=1, **LOW)


def embedding_bags(n: Sizes) -> Case:
    """Step of a recommender (arXiv:1906.00091): bags of embeddings, an MLP."""
    batch, tables, rows, bag, width = n((8192, 8, 50_000, 8, 64), (8, 2, 32, 3, 4))
    dense = 16

    def make() -> tuple:
        pairs = (tables + 1) * tables // 2
        params = {
            "tables": 0.1 * normal(tables, rows, width), "bottom": weight(dense, width, seed=1),
            "top1": weight(width + pairs, n(256, 8), seed=2), "top2": weight(n(256, 8), 1, seed=3),
        }  # fmt: skip
        clicked = integers(2, batch).astype(np.float32)
        return params, normal(batch, dense), integers(rows, tables, batch, bag), clicked

    def loss(m: Any, p: Any, x: Any, where: Any, clicked: Any) -> Any:
        jnp = m.numpy
        x = m.nn.relu(x @ p["bottom"])
        bags = m.vmap(lambda table, i: table[i].sum(1))(p["tables"], where)
        rows = jnp.concatenate([x[:, None], bags.transpose(1, 0, 2)], 1)
        products = rows @ rows.swapaxes(1, 2)
        i, j = np.tril_indices(tables + 1, -1)
        h = jnp.concatenate([x, products[:, i, j]], -1)
        logit = (m.nn.relu(h @ p["top1"]) @ p["top2"])[:, 0]
        return (m.nn.softplus(logit) - clicked * logit).mean()

    def torch_loss(t: Any, p: Any, x: Any, where: Any, clicked: Any) -> Any:
        f = t.nn.functional
        x = t.relu(x @ p["bottom"])
        bags = [f.embedding_bag(where[k], p["tables"][k], mode="sum") for k in range(tables)]
        rows = t.stack([x, *bags], 1)
        products = rows @ rows.mT
        i, j = t.tril_indices(tables + 1, tables + 1, -1, device=x.device)
        h = t.cat([x, products[:, i, j]], -1)
        logit = (t.relu(h @ p["top1"]) @ p["top2"])[:, 0]
        return f.binary_cross_entropy_with_logits(logit, clicked)

    return Case(trained(loss), make, torch_trained(torch_loss), carried=1)


def bert(n: Sizes) -> Case:
    """Step of a masked language model with padding masks and dropout, 2 layers."""
    layers, width, heads, vocab, batch, length = n((2, 768, 12, 30522, 32, 512), (2, 16, 2, 64, 2, 8))

    def make() -> tuple:
        layer = lambda i: {
            "qkv": weight(width, 3 * width, seed=i), "out": weight(width, width, seed=i + 1),
            "up": weight(width, 4 * width, seed=i + 2), "down": weight(4 * width, width, seed=i + 3),
            "norm1": np.ones(width, np.float32), "norm2": np.ones(width, np.float32),
        }  # fmt: skip
        params = {"tokens": 0.02 * normal(vocab, width), "layers": [layer(i) for i in range(layers)]}
        lengths = integers(length, batch, low=length // 2)
        return params, integers(vocab, batch, length), lengths, np.int32(1)

    def norm(m: Any, scale: Any, x: Any) -> Any:
        wide = x.astype(m.numpy.float32)
        y = (wide - wide.mean(-1, keepdims=True)) * m.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-6)
        return (y * scale).astype(x.dtype)

    def loss(m: Any, p: Any, tokens: Any, lengths: Any, seed: Any) -> Any:
        jnp = m.numpy
        low = lambda w: w.astype(BF16)
        valid = jnp.arange(length) < lengths[:, None]
        mask = valid[:, None, None, :]
        keys = m.random.split(m.random.key(seed), layers)
        x = low(p["tokens"][tokens])
        for layer, key in zip(p["layers"], keys, strict=True):
            qkv = (x @ low(layer["qkv"])).reshape(batch, length, 3, heads, -1)
            scores = jnp.einsum("bqhd,bkhd->bhqk", qkv[:, :, 0], qkv[:, :, 1]).astype(jnp.float32)
            scores = jnp.where(mask, scores / math.sqrt(width // heads), -1e9)
            y = jnp.einsum("bhqk,bkhd->bqhd", low(m.nn.softmax(scores, axis=-1)), qkv[:, :, 2])
            y = y.reshape(x.shape) @ low(layer["out"])
            y = jnp.where(m.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0).astype(BF16)
            x = norm(m, layer["norm1"], x + y)
            h = m.nn.gelu(x @ low(layer["up"]), approximate=False) @ low(layer["down"])
            x = norm(m, layer["norm2"], x + h)
        picked = x[:, :: n(8, 2)]  # positions that were masked
        return cross_entropy(m, picked @ low(p["tokens"]).T, tokens[:, :: n(8, 2)])

    return Case(trained(loss), make, carried=1, **LOW)


def wavenet(n: Sizes) -> Case:
    """Step of gated dilated causal convolutions (arXiv:1609.03499), float32."""
    batch, length, width, layers = n((8, 8192, 64, 8), (2, 32, 4, 3))

    def make() -> tuple:
        layer = lambda i: (weight(2, width, 2 * width, seed=i), weight(1, width, width, seed=i + 1))
        params = {
            "in": weight(2, 1, width), "layers": [layer(i) for i in range(layers)],
            "out": weight(width, 256),
        }  # fmt: skip
        return params, normal(batch, length, 1), integers(256, batch, length)

    def conv(m: Any, x: Any, w: Any, dilation: int) -> Any:
        pads = [(dilation * (w.shape[0] - 1), 0)]
        return m.lax.conv_general_dilated(
            x, w, (1,), pads, rhs_dilation=(dilation,), dimension_numbers=("NWC", "WIO", "NWC")
        )

    def loss(m: Any, p: Any, x: Any, labels: Any) -> Any:
        x = conv(m, x, p["in"], 1)
        total = 0.0
        for i, (gated, mixed) in enumerate(p["layers"]):
            a, b = m.numpy.split(conv(m, x, gated, 2**i), 2, axis=-1)
            y = conv(m, m.numpy.tanh(a) * m.nn.sigmoid(b), mixed, 1)
            total, x = total + y, x + y
        return cross_entropy(m, m.nn.relu(total) @ p["out"], labels)

    return Case(trained(loss), make, carried=1, tolerance=1e-2)


def contrastive(n: Sizes) -> Case:
    """Step of two towers and a symmetric contrastive loss (arXiv:2103.00020)."""
    batch, width, out = n((8192, 1024, 512), (8, 8, 4))

    def make() -> tuple:
        params = {
            "image": [weight(width, width), weight(width, out, seed=1)],
            "text": [weight(width, width, seed=2), weight(width, out, seed=3)],
            "scale": np.float32(1.0),
        }
        return params, normal(batch, width, dtype=BF16), normal(batch, width, dtype=BF16, seed=1)

    def tower(m: Any, p: Any, x: Any) -> Any:
        h = m.nn.gelu(x @ p[0].astype(BF16)) @ p[1].astype(BF16)
        h = h.astype(m.numpy.float32)
        return (h * m.lax.rsqrt((h * h).sum(-1, keepdims=True))).astype(BF16)

    def loss(m: Any, p: Any, images: Any, texts: Any) -> Any:
        scores = (tower(m, p["image"], images) @ tower(m, p["text"], texts).T).astype(m.numpy.float32)
        scores = scores * m.numpy.exp(p["scale"])
        same = m.numpy.arange(batch)
        return 0.5 * (cross_entropy(m, scores, same) + cross_entropy(m, scores.T, same))

    return Case(trained(loss), make, carried=1, **LOW)


def of_sequences(n: Sizes) -> dict[str, Case]:
    """All cases of this module."""
    size = n("short", "tiny")
    vit = n((4, 768, 12, 224, 16, 64), (2, 64, 2, 32, 8, 2))
    gpt = n((4, 768, 12, 50304, 8, 1024), (2, 128, 2, 512, 2, 64))
    partial = functools.partial
    found = {
        "ViT-B/16, 4 layers, gradients, bf16": of_family(
            "vit", size, 0, torch_value_and_grad(torch_vit(*vit)),
            compiled=torch_value_and_grad(torch_vit(*vit), compiled=True), **LOW,
        ),
        "Llama-like step, 2 layers, bf16": of_family("llama", size, 2, **LOW),
        "GPT-2 step, 4 layers, bf16": of_family("gpt2", size, 2, torch_gpt2(*gpt), **LOW),
        "masked language model step, bf16": bert(n),
        "LSTM gradients, bf16": lstm(n),
        "GRU gradients, bf16": gru(n),
        "state-space layer step, bf16": state_space(n),
        "mixture of experts step, one-hot, bf16": experts(n, ragged=False),
        "WaveNet step, f32": wavenet(n),
        "contrastive step, bf16": contrastive(n),
        "embedding bags step, f32": embedding_bags(n),
        "beam search": looped(partial(loop_programs.beam_search, steps=n(100, 4), vocab=n(5000, 50)), tolerance=0.0),
        "decoder with a cache, f32": looped(
            partial(loop_programs.decoder, tokens=n(128, 4), width=n(512, 16), vocab=n(8000, 16)), tolerance=0.0
        ),
        "MAML, f32": looped(partial(loop_programs.maml, inner=n(10, 2), tasks=n(256, 2))),
    }  # fmt: skip
    if hasattr(blufunc.lax, "ragged_dot"):
        found["mixture of experts step, ragged, bf16"] = experts(n, ragged=True)
    return found
