"""Adapters in the files of PEFT: ``adapter_config.json``, and safetensors.

Follows ``weights.py``. In: a folder, or adapters of ``nn.lora`` for the parameters of a model. Out: the other of them.
A file has two matrices for each linear layer of the model, ``lora_A`` [r, inputs] and ``lora_B`` [outputs, r], named by
the layer; the layer stands for ``W + s * lora_B @ lora_A`` with s = lora_alpha / r. Here, queries, keys and values are
one matrix, of which the layers of the files are rows.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import io, nn, tree
from blufunc.errors import DataError
from examples.llm import weights
from examples.llm.config import Config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_FACTOR = re.compile(rf"{re.escape(_PREFIX)}(.+)\.lora_(A|B)\.weight")

# Settings whose effect is none of a low-rank product: what is here must have this value, or be absent.
_PLAIN = {
    "bias": "none", "modules_to_save": None, "use_dora": False, "lora_bias": False, "layer_replication": None,
    "use_qalora": False, "trainable_token_indices": None, "alora_invocation_tokens": None, "target_parameters": None,
}  # fmt: skip


class _Layer(NamedTuple):
    """The factors of one layer of the files, and the factor s of their product."""

    a: np.ndarray
    b: np.ndarray
    scale: float


def _is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, nn.lora.Adapter)


def _module(piece: weights.Piece) -> str:
    return piece.tensor.removesuffix(".weight")


# -- writing ---------------------------------------------------------------------------------------


def save(folder: str | Path, adapters: Any, config: Config, alpha: float, base: str | None = None) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained`` and ``load`` read.

    Args:
      adapters: of ``nn.lora.init`` for weights [inputs, outputs], as of ``finetune.init_adapters``, of one rank.
      alpha: their products are scaled by alpha / rank.
      base: the model that they are for: a path, or a name on the hub.
    Raises:
      DataError: the ranks differ, there are no adapters, or the folder has some.
    """
    folder = Path(folder)
    if (folder / CONFIG).exists() or (folder / WEIGHTS).exists():
        raise DataError(
            f"{folder} holds adapters already",
            where=str(folder),
            fix="choose another folder, or remove those files first",
        )
    tensors: dict[str, np.ndarray] = {}
    ranks = set()
    stored = tree.leaves(weights.layout(config))
    for where, own in zip(stored, tree.leaves(adapters, is_leaf=_is_leaf), strict=True):
        if own is None:
            continue
        a, b = (np.ascontiguousarray(np.asarray(x).T) for x in own)
        ranks.add(a.shape[0])
        # rows of b are outputs, in the order of the weight's rows; all layers that share a weight share a
        for name, rows in weights.taken_apart(weights.Stored(where.pieces), b).items():
            module = _PREFIX + name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = (
                a,
                np.ascontiguousarray(rows),
            )
    if len(ranks) != 1:
        raise DataError(
            f"adapters of the ranks {sorted(ranks)}" if ranks else "there are no adapters",
            where="adapters",
            why="a file has one rank",
            fix="finetune with --lora RANK",
        )
    targets = sorted({name.split(".")[-3] for name in tensors})
    (rank,) = ranks
    facts = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else float(alpha), "lora_dropout": 0.0,
        "target_modules": targets, "bias": "none", "fan_in_fan_out": config.architecture == "gpt2",
        "inference_mode": True, "init_lora_weights": True, "modules_to_save": None, "rank_pattern": {},
        "alpha_pattern": {}, "use_rslora": False, "use_dora": False,
    }  # fmt: skip
    if config.architecture == "gpt2" and "c_proj" in targets:
        facts["target_modules"] = sorted(
            {_qualified(name) for name in tensors}
        )  # attention and MLP have a c_proj each
    io.save(folder / WEIGHTS, tensors, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _qualified(name: str) -> str:
    """A module's name, with that of the block around it: attn.c_proj."""
    return ".".join(name.split(".")[-4:-2])


# -- reading ---------------------------------------------------------------------------------------


def load(folder: str | Path, config: Config, dtype: Any = "float32") -> tuple[Any, float]:
    """Adapters of a folder, and their ``alpha``.

    They are for ``nn.lora.apply`` and ``merge`` of weights [inputs, outputs].

    Layers that are rows of one weight, as queries and keys, may have factors of their own; those of the weight are then
    side by side, and of the sum of the ranks.

    Args:
      config: of the model that they are for.
      dtype: of the factors.
    Raises:
      DataError: names the file, and what is wrong with it; or adapters are not low-rank products alone.
    """
    folder = Path(folder)
    facts = _facts(folder / CONFIG)
    layers = _layers(folder, facts, config)
    alpha = float(facts["lora_alpha"])

    def adapter(where: weights.Stored, leaf: Any) -> nn.lora.Adapter | None:
        own = {m: layers[m] for m in map(_module, where.pieces) if m in layers}
        if not own or len(leaf.shape) != 2:
            return None
        first = next(iter(own.values()))
        shared = all(np.array_equal(layer.a, first.a) for layer in own.values())
        starts = dict.fromkeys(own, 0) if shared else dict(zip(own, _starts(own), strict=True))
        rank = first.a.shape[0] if shared else sum(layer.a.shape[0] for layer in own.values())
        a = first.a if shared else np.concatenate([layer.a for layer in own.values()])
        b, row = np.zeros((leaf.shape[0], rank), np.float32), 0
        for piece in where.pieces:
            n = piece.stop - piece.start
            if (layer := own.get(_module(piece))) is not None:
                at = starts[_module(piece)]
                # nn.lora scales by alpha / rank
                part = layer.b[piece.start : piece.stop] * np.float32(
                    layer.scale * rank / alpha if alpha else 0
                )
                b[row : row + n, at : at + part.shape[1]] = part
            row += n
        return nn.lora.Adapter(jnp.asarray(a.T, dtype), jnp.asarray(b.T, dtype))

    stored, treedef = tree.flatten(weights.layout(config))
    leaves = tree.leaves(weights.types(config))
    return tree.unflatten(treedef, [adapter(*pair) for pair in zip(stored, leaves, strict=True)]), alpha


def applied(params: dict, adapters: Any, alpha: float) -> dict:
    """The parameters with adapters: merged into arrays, and next to quantized weights."""
    is_quantized = any(jnp.issubdtype(x.dtype, jnp.integer) for x in tree.leaves(params))
    return (nn.lora.apply if is_quantized else merged)(params, adapters, alpha=alpha)


@bf.jit(static_argnames="alpha")
def merged(params: dict, adapters: Any, *, alpha: float) -> dict:
    """The parameters, arrays, with the products of the factors added to them."""
    turned = lambda params: tree.map(lambda w: w.T, params)  # within a program, not a copy
    return turned(nn.lora.merge(turned(params), adapters, alpha=alpha))


def _starts(own: dict[str, _Layer]) -> list[int]:
    ranks = [layer.a.shape[0] for layer in own.values()]
    return [sum(ranks[:i]) for i in range(len(ranks))]


def _facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        float(facts["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no configuration of adapters",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix=f"a folder of PEFT has {CONFIG}, with lora_alpha, and {WEIGHTS}",
        ) from error
    if facts.get("peft_type") != "LORA":
        raise DataError(
            f"{path} has adapters of the type {facts.get('peft_type')}",
            where=str(path),
            why="only low-rank ones are read",
            fix="adapters of the type LORA",
        )
    for name, plain in _PLAIN.items():
        if facts.get(name, plain) not in (plain, None, []):
            raise DataError(
                f"{path}: {name} is {facts[name]!r:.60}",
                where=str(path),
                why="the result would not be the weight and a low-rank product alone",
                fix="merge those adapters with PEFT: model.merge_and_unload().save_pretrained(...)",
            )
    return facts


def _layers(folder: Path, facts: dict[str, Any], config: Config) -> dict[str, _Layer]:
    """The factors in a folder, by module of the model."""
    path = folder / WEIGHTS
    if not path.exists():
        raise DataError(
            f"there is no {path}",
            where=str(path),
            why="adapter_model.bin is a pickle of PyTorch"
            if (folder / "adapter_model.bin").exists()
            else None,
            fix="save them again: model.save_pretrained(folder, safe_serialization=True)",
        )
    known = {
        _module(piece): leaf.shape[1]
        for stored, leaf in zip(
            tree.leaves(weights.layout(config)), tree.leaves(weights.types(config)), strict=True
        )
        for piece in stored.pieces
        if len(leaf.shape) == 2 and piece.tensor.endswith(".weight")
    }
    outputs: dict[str, int] = {}
    for stored in tree.leaves(weights.layout(config)):
        for piece in stored.pieces:
            outputs[_module(piece)] = max(outputs.get(_module(piece), 0), piece.stop)
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, value in io.load(path, verify=False).items():
        match = _FACTOR.fullmatch(name)
        if match is None or match[1] not in known:
            raise DataError(
                f"{path} has {name}",
                where=str(path),
                why=f"a {config.architecture} model of {config.layers} layers has no such matrix",
                fix="adapters for the linear layers of this model",
            )
        found.setdefault(match[1], {})[match[2]] = np.asarray(value).astype(np.float32)
    made = {}
    for module, factors in found.items():
        a, b = factors.get("A"), factors.get("B")
        sizes = (outputs[module], known[module])
        if a is None or b is None or (b.shape[0], a.shape[1]) != sizes or b.shape[1] != a.shape[0]:
            shapes = {f"lora_{side}": list(factor.shape) for side, factor in sorted(factors.items())}
            raise DataError(
                f"the factors of {module} have the shapes {shapes}",
                where=str(path),
                why=f"the matrix is {list(sizes)}: lora_A is [r, {sizes[1]}], lora_B [{sizes[0]}, r]",
                fix="adapters for a model of these sizes",
            )
        made[module] = _Layer(a, b, _scale(module, facts, a.shape[0]))
    return made


def _scale(module: str, facts: dict[str, Any], rank: int) -> float:
    alpha = facts["lora_alpha"]
    for pattern, own in (facts.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = own
            break
    return float(alpha) / (math.sqrt(rank) if facts.get("use_rslora") else rank)
