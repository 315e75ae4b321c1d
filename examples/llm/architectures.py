"""Architectures: ``config.json`` of Hugging Face to a ``Config``, and back.

Follows ``config.py``. ``TABLE`` has a row for each known ``model_type``. A setting that changes what a model computes
and that ``Config`` cannot express is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from blufunc import nn
from blufunc.errors import BlufuncError, DataError, ShapeError
from examples.llm.config import Config, Rope

Raw = dict[str, Any]


class Architecture(NamedTuple):
    """How a kind of model is described in ``config.json``.

    Attributes:
      name: entry of its ``architectures``.
      read: makes a ``Config`` of it.
      write: the reverse.
      only: for some settings the values that are supported; a missing one has the first.
    """

    name: str
    read: Callable[[_Reader], Config]
    write: Callable[[Config], Raw]
    only: dict[str, tuple[Any, ...]]


def read(folder: str | Path) -> Config:
    """Configuration of the model in a folder.

    Raises:
      DataError: no ``config.json``, or one that this program cannot compute.
    """
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"there is no {path}" if isinstance(error, FileNotFoundError) else f"cannot read {path}",
            where=str(path),
            why=error.strerror,
            fix="name a folder of a model in Hugging Face's format, with config.json and model.safetensors",
        ) from error
    except ValueError as error:
        raise DataError(
            f"{path} is not JSON", where=str(path), why=str(error), fix="fetch the file again"
        ) from error
    return from_json(raw, str(path))


def from_json(raw: Raw, where: str = "config.json") -> Config:
    """Configuration from the contents of a ``config.json``.

    Raises:
      DataError: the architecture or one of its settings is not supported, or a size is missing.
    """
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind not in TABLE:
        raise DataError(
            f"the architecture {kind!r} is unknown",
            where=f"{where}: model_type",
            why="this program computes " + ", ".join(TABLE),
            fix="convert a model that only differs in names; for another one, add a row to architectures.TABLE",
        )
    row = TABLE[kind]
    for key, allowed in row.only.items():
        if (value := raw.get(key, allowed[0])) not in allowed:
            raise DataError(
                f"{key} is {value!r}",
                where=f"{where}: {key}",
                why=f"it changes what the model computes, and {kind} is computed here for "
                f"{' or '.join(map(repr, allowed))} only",
                fix="use another checkpoint, or add a field to Config and the computation to model.py",
            )
    config = row.read(_Reader(kind, raw, where))
    if config.heads % config.key_heads:
        raise DataError(
            f"{config.heads} query heads cannot share {config.key_heads} key heads evenly",
            where=f"{where}: num_key_value_heads",
            fix="check the file: the one is a multiple of the other",
        )
    return config


def to_json(config: Config, dtype: str) -> Raw:
    """Contents of a ``config.json``, for weights of this dtype."""
    row = TABLE[config.architecture]
    eos = config.eos[0] if len(config.eos) == 1 else list(config.eos) or None
    common = {
        "architectures": [row.name],
        "model_type": config.architecture,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    common |= {"bos_token_id": config.bos, "eos_token_id": eos, "tie_word_embeddings": config.tied}
    return common | {"vocab_size": config.vocab} | row.write(config)


class _Reader:
    """Settings of a ``config.json``, with errors that name it."""

    def __init__(self, kind: str, raw: Raw, where: str):
        self.kind, self.raw, self.where = kind, raw, where

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        value = self(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DataError(
                f"{key} is {value!r}" if key in self.raw else f"{key} is missing",
                where=f"{self.where}: {key}",
                why="it is a size of the model, a positive integer",
                fix="fetch the file again: each model comes with its own config.json",
            )
        return value

    def eos(self) -> tuple[int, ...]:
        found = self("eos_token_id", ())
        return tuple(found) if isinstance(found, (list, tuple)) else (found,)

    def rope(self) -> Rope:
        found = self("rope_parameters") or {
            **self("rope_scaling", {}),
            "rope_theta": self("rope_theta", 10000.0),
        }
        rope = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(found.items()))
        try:
            nn.rope_frequencies(2, scaling=dict(rope), max_positions=self.size("max_position_embeddings"))
        except ShapeError:
            pass  # factors for each pair of features
        except BlufuncError as error:
            raise DataError(
                f"rotary positions {found}",
                where=f"{self.where}: {'rope_parameters' if 'rope_parameters' in self.raw else 'rope_scaling'}",
                why=error.what,
                fix=error.fix or "fetch the file again, or use another checkpoint",
            ) from error
        return rope


def _llama(get: _Reader) -> Config:
    kind, heads, width = get.kind, get.size("num_attention_heads"), get.size("hidden_size")
    layers = get.size("num_hidden_layers")
    bias = kind == "qwen2" or bool(get("attention_bias", False))
    return Config(
        kind,
        vocab=get.size("vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        key_heads=get.size("num_key_value_heads", heads),
        features=get.size("head_dim", width // heads),
        hidden=get.size("intermediate_size"),
        context=get.size("max_position_embeddings"),
        eps=float(get("rms_norm_eps", 1e-6)),
        rope=get.rope(),
        qkv_bias=bias,
        out_bias=bias and kind != "qwen2",
        mlp_bias=bool(get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        experts=get.size("num_local_experts", 8) if kind == "mixtral" else 0,
        chosen=get.size("num_experts_per_tok", 2),
        balance=float(get("router_aux_loss_coef", 0.001)) if kind == "mixtral" else 0.0,
        windows=_windows(get, layers),
        tied=bool(get("tie_word_embeddings", False)),
        bos=get("bos_token_id"),
        eos=get.eos(),
    )


_WINDOWED = ("mistral", "mixtral")
"""Architectures whose windows are of all layers, if there is a size."""


def _windows(get: _Reader, layers: int) -> tuple[int | None, ...]:
    size = get("sliding_window")
    if (
        get.kind == "llama"
        or size is None
        or (get.kind not in _WINDOWED and not get("use_sliding_window", False))
    ):
        return ()
    first = 0 if get.kind in _WINDOWED else get("max_window_layers", layers)
    types = get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (layers - first)
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise DataError(
            f"layer_types has {len(types)} entries, of {', '.join(sorted(set(types)))}",
            where=f"{get.where}: layer_types",
            why=f"the model has {layers} layers, each of full_attention or sliding_attention",
            fix="fetch the file again",
        )
    return tuple(size if kind == "sliding_attention" else None for kind in types)


def _llama_json(config: Config) -> Raw:
    raw = {
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.features,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.eps,
        "hidden_act": "silu",
        **_rope_json(config.rope),
    }
    if config.architecture in ("llama", "qwen3"):
        raw["attention_bias"] = config.qkv_bias
    if config.architecture == "llama":
        raw["mlp_bias"] = config.mlp_bias
    size = next((window for window in config.windows if window), None)
    if config.architecture in ("qwen2", "qwen3"):
        types = ["sliding_attention" if window else "full_attention" for window in config.windows]
        raw |= {"use_sliding_window": size is not None, "sliding_window": size}
        raw |= {"layer_types": types} if types else {}
    if config.architecture in _WINDOWED:
        raw["sliding_window"] = size
    if config.experts:
        raw |= {"num_local_experts": config.experts, "num_experts_per_tok": config.chosen}
        raw |= {"router_aux_loss_coef": config.balance}
    return raw


def _rope_json(rope: Rope) -> Raw:
    """In the form of transformers 5, and of the versions before."""
    fields = dict(rope)
    theta = fields.pop("rope_theta", 10000.0)
    scaled = fields.get("rope_type", fields.get("type", "default")) != "default"
    old = {"rope_theta": theta, "rope_scaling": fields if scaled else None}
    return {"rope_parameters": {"rope_theta": theta, **fields}, **old}


def _gpt2(get: _Reader) -> Config:
    width, heads = get.size("n_embd"), get.size("n_head")
    return Config(
        "gpt2",
        vocab=get.size("vocab_size"),
        width=width,
        layers=get.size("n_layer"),
        heads=heads,
        key_heads=heads,
        features=width // heads,
        hidden=get.size("n_inner", 4 * width),
        context=get.size("n_positions"),
        norm="layer",
        eps=float(get("layer_norm_epsilon", 1e-5)),
        mlp="gelu",
        rope=None,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=bool(get("tie_word_embeddings", True)),
        bos=get("bos_token_id"),
        eos=get.eos(),
    )


def _gpt2_json(config: Config) -> Raw:
    return {
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.hidden,
        "n_positions": config.context,
        "n_ctx": config.context,
        "layer_norm_epsilon": config.eps,
        "activation_function": "gelu_new",
    }


_PLAIN = {"quantization_config": (None,)}
_SILU = {"hidden_act": ("silu", "swish"), **_PLAIN}

TABLE = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        _gpt2,
        _gpt2_json,
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            **_PLAIN,
        },
    ),
    "llama": Architecture("LlamaForCausalLM", _llama, _llama_json, _SILU),
    "mistral": Architecture("MistralForCausalLM", _llama, _llama_json, _SILU),
    "mixtral": Architecture(
        "MixtralForCausalLM", _llama, _llama_json, _SILU | {"router_jitter_noise": (0.0, None)}
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", _llama, _llama_json, _SILU),
    "qwen3": Architecture("Qwen3ForCausalLM", _llama, _llama_json, _SILU),
}
