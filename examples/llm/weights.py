"""Weights: folders of Hugging Face to trees of parameters, and back.

Follows ``model.py``. In: a folder with ``config.json`` and safetensors files, one or several with an index. Out: the
parameters, of which each device reads its shards. ``layout`` says of which tensors of the files each array is made;
reading, saving and the errors follow from it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import blufunc as bf
from blufunc import io, random, tree
from blufunc.errors import DataError
from examples.llm import architectures, model, quantized
from examples.llm.config import Config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""Largest file that ``save`` writes, unless one array is larger."""

# Tensors that old files hold, and that are functions of the configuration.
_INERT = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")


# -- the layout ------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Rows ``start`` to ``stop`` of a tensor."""

    tensor: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array of the tree as pieces of tensors, one after another.

    Attributes:
      pieces: in order of the array's rows.
      transposed: the tensors are [inputs, outputs].
    """

    pieces: tuple[Piece, ...]
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Stack:
    """An array of the tree as arrays of one shape, stacked: experts, or layers."""

    parts: tuple[Stored | Stack, ...]


_LLAMA = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm",
    "head": "lm_head",
    "norm1": "model.layers.{}.input_layernorm",
    "norm2": "model.layers.{}.post_attention_layernorm",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "out": "model.layers.{}.self_attn.o_proj",
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
}
_GPT2 = {
    "embed": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "norm1": "transformer.h.{}.ln_1",
    "norm2": "transformer.h.{}.ln_2",
    "qkv": "transformer.h.{}.attn.c_attn",
    "out": "transformer.h.{}.attn.c_proj",
    "up": "transformer.h.{}.mlp.c_fc",
    "down": "transformer.h.{}.mlp.c_proj",
}
_MIXTRAL = _LLAMA | {
    "router": "model.layers.{}.block_sparse_moe.gate",
    "gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
    "up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
    "down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
}
NAMES = {"gpt2": _GPT2, "mixtral": _MIXTRAL} | dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA)
"""Names of tensors by architecture, without ``.weight`` and ``.bias``."""


def types(config: Config, dtype: Any = "float32") -> dict:
    """Shapes and dtypes of the parameters; computes nothing."""
    return bf.eval_shape(lambda: model.init(random.key(0), config, dtype))


def layout(config: Config) -> dict:
    """A tree like the parameters, of ``Stored``, and ``Stack`` for experts."""
    names = NAMES[config.architecture]

    def stored(path: tuple[Any, ...], leaf: Any) -> Stored | Stack:
        keys = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
        if keys[0] in ("embed", "positions"):
            return _whole(names[keys[0]], leaf)
        if keys[0] in ("norm", "head"):
            return _whole(f"{names[keys[0]]}.{_ending(keys[-1])}", leaf)
        layer, part = keys[1], keys[-2]
        if "experts" in keys and part != "router":
            each = [names[part].format(layer, expert) for expert in range(leaf.shape[0])]
            return Stack(tuple(Stored((Piece(f"{name}.weight", 0, leaf.shape[1]),)) for name in each))
        if part != "qkv":
            transposed = config.architecture == "gpt2" and keys[-1] == "weight"
            return _whole(f"{names[part].format(layer)}.{_ending(keys[-1])}", leaf, transposed)
        return _grouped(config, names, layer, keys[-1])

    return tree.map_with_path(stored, types(config))


def _ending(key: str) -> str:
    return {"scale": "weight"}.get(key, key)


def _whole(tensor: str, leaf: Any, transposed: bool = False) -> Stored:
    return Stored((Piece(tensor, 0, leaf.shape[0]),), transposed)


def _grouped(config: Config, names: dict[str, str], layer: int, ending: str) -> Stored:
    """Queries, keys and values of each group."""
    D, N, K, M = config.features, config.heads, config.key_heads, config.groups
    packed = "qkv" in names  # one tensor: all queries, all keys, all values
    first = {"q": 0, "k": N * D, "v": (N + K) * D} if packed else dict.fromkeys("qkv", 0)
    pieces = []
    for group in range(M):
        for part, heads in (("q", N), ("k", K), ("v", K)):
            tensor = f"{names['qkv' if packed else part].format(layer)}.{ending}"
            start, size = first[part], heads // M * D
            pieces.append(Piece(tensor, start + group * size, start + (group + 1) * size))
    return Stored(tuple(pieces), packed and ending == "weight")


def stacked(values: dict, order: Sequence[int], stack: Callable) -> dict:
    """A tree like the parameters, whose layers are one, each leaf ``stack`` of theirs.

    Args:
      order: of the layers in a stack.
    """
    layers = [values["layers"][i] for i in order]
    return values | {"layers": tree.map(lambda *each: stack(each), *layers)}


def _tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of the files, in order."""
    rows: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for whole, leaf in zip(tree.leaves(layout(config)), tree.leaves(types(config)), strict=True):
        of_experts = isinstance(whole, Stack)
        for stored in whole.parts if of_experts else (whole,):
            for piece in stored.pieces:
                rows[piece.tensor] = max(rows.get(piece.tensor, 0), piece.stop)
                shape = rows[piece.tensor], *leaf.shape[1 + of_experts :]
                shapes[piece.tensor] = shape[::-1] if stored.transposed else shape
    return shapes


# -- loading ---------------------------------------------------------------------------------------


class Folder:
    """The tensors of a folder, memory-mapped.

    Raises:
      DataError: no weights, an index without its files, or a file without a tensor that the index says it has.

    Attributes:
      tensors: arrays by name.
      file: the file of each.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.tensors: dict[str, np.ndarray] = {}
        self.file: dict[str, str] = {}
        index = self._index()
        for name in sorted(set(index.values())) if index else [SINGLE]:
            for tensor, value in io.load(self.path / name, verify=False).items():
                self.tensors[tensor], self.file[tensor] = value, name
        for tensor, name in (index or {}).items():
            if self.file.get(tensor) != name:
                raise DataError(
                    f"{self.path / name} has no tensor {tensor}",
                    where=str(self.path / INDEX),
                    why="the index says that it is there",
                    fix="fetch the index and that file again, of one version of the model",
                )

    def _index(self) -> dict[str, str] | None:
        """The file of each tensor; None for a single file."""
        path = self.path / INDEX
        if not path.exists():
            if (self.path / SINGLE).exists():
                return None
            shards = sorted(p.name for p in self.path.glob("*.safetensors"))
            others = sorted(p.name for p in self.path.glob("*.bin"))
            if shards:
                raise DataError(
                    f"{self.path} lacks {INDEX}",
                    where=str(path),
                    why=f"it has {len(shards)} files, {shards[0]} first, and the index says which tensor is in which",
                    fix=f"fetch {INDEX} of the same model; a single file must be named {SINGLE}",
                )
            raise DataError(
                f"{self.path} has no weights",
                where=str(self.path / SINGLE),
                why=f"it has {others[0]}, which is a pickle of PyTorch"
                if others
                else "there is no safetensors file",
                fix="convert them: transformers.AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
                if others
                else f"fetch {SINGLE}, or {INDEX} and its files",
            )
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            files = set(found.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is not an index of tensors",
                where=str(path),
                why=f"{type(error).__name__}: {error}; expected is {{'weight_map': {{tensor: file}}}}",
                fix="fetch the file again",
            ) from error
        for name in sorted(files):
            if not (self.path / name).exists():
                n = sum(file == name for file in found.values())
                tensor = next(tensor for tensor, file in found.items() if file == name)
                raise DataError(
                    f"there is no {self.path / name}",
                    where=str(path),
                    why=f"the index says that {tensor} and {n - 1} other tensors are there",
                    fix="fetch that file",
                )
        return found

    def check(self, config: Config) -> None:
        """Compare with the tensors that a model of this configuration has.

        Raises:
          DataError: a tensor is missing, unknown, or of another shape or kind.
        """
        expected = _tensors(config)
        if config.architecture == "gpt2" and not any(
            name.startswith("transformer.") for name in self.tensors
        ):
            self.tensors = {_prefixed(name): value for name, value in self.tensors.items()}
            self.file = {_prefixed(name): file for name, file in self.file.items()}
        place = str(self.path / (INDEX if len(set(self.file.values())) > 1 else SINGLE))
        if missing := [name for name in expected if name not in self.tensors]:
            raise DataError(
                f"{place} lacks {_some(missing)}",
                where=place,
                why=f"a {config.architecture} model of {config.layers} layers has {len(expected)} tensors",
                fix="compare config.json: number of layers, tie_word_embeddings, biases; or fetch the files again",
            )
        inert = {"lm_head.weight"} if config.tied else set()
        extra = [
            name
            for name in self.tensors
            if name not in expected | dict.fromkeys(inert) and not _INERT.search(name)
        ]
        if extra:
            raise DataError(
                f"{self.path / self.file[extra[0]]} also has {_some(extra)}",
                where=str(self.path / self.file[extra[0]]),
                why=f"a {config.architecture} model of {config.layers} layers with these settings has no such tensor, "
                "so its results would be others",
                fix="check config.json, or use the checkpoint of a plain causal language model",
            )
        for name, shape in expected.items():
            found = self.tensors[name]
            if found.shape != shape:
                raise DataError(
                    f"{name} has shape {list(found.shape)}, not {list(shape)}",
                    where=str(self.path / self.file[name]),
                    why="config.json has other sizes than the file",
                    fix="fetch config.json and the weights of one version of the model",
                )
            if not bf.numpy.issubdtype(found.dtype, bf.numpy.floating):
                raise DataError(
                    f"{name} holds {found.dtype}",
                    where=str(self.path / self.file[name]),
                    why="weights are floats; these are quantized",
                    fix="use the checkpoint in bfloat16 or float32",
                )

    def part(self, stored: Stored | Stack, index: tuple[slice, ...]) -> np.ndarray:
        """The elements of an array of the tree at an index; reads no others."""
        if isinstance(stored, Stack):
            return np.stack([self.part(own, index[1:]) for own in stored.parts[index[0]]])
        rows, rest, parts, at = index[0], index[1:], [], 0
        for piece in stored.pieces:
            n = piece.stop - piece.start
            start, stop = max(rows.start - at, 0), min(rows.stop - at, n)
            at += n
            if start < stop:
                tensor = self.tensors[piece.tensor]
                tensor = tensor.T if stored.transposed else tensor
                parts.append(tensor[(slice(piece.start + start, piece.start + stop), *rest)])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _prefixed(name: str) -> str:
    return name if name.startswith("lm_head.") else f"transformer.{name}"


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"


def load(
    folder: str | Path,
    shardings: Any = None,
    dtype: Any = None,
    config: Config | None = None,
    quantize: str | None = None,
    order: Sequence[int] | None = None,
) -> tuple[dict, Config]:
    """Parameters and configuration of a model.

    Args:
      folder: has ``config.json``, and ``model.safetensors`` or several files with ``model.safetensors.index.json``.
      shardings: a device or a sharding, or a tree prefix of these. Default: the default device. For a mesh,
        ``placement.placed`` makes them, and the ``config`` to go with them.
      dtype: convert to it; None: that of the files.
      config: the configuration of the folder, with other ``groups``.
      quantize: "int8" or "nf4": quantize the matrices of the layers, each once it is read, so that the device never
        holds more than one as it was.
      order: stack the layers, in this order, as ``stacked`` does.
    Raises:
      DataError: names the file, the tensor and a remedy; see ``Folder`` and ``architectures.read``.
    """
    config = architectures.read(folder) if config is None else config
    if quantize is not None:
        quantized.check(config, quantize)
    files = Folder(folder)
    files.check(config)
    made, described = types(config), layout(config)
    if order is not None:
        several = lambda each: bf.ShapeDtypeStruct((len(each), *each[0].shape), each[0].dtype)
        made, described = stacked(made, order, several), stacked(described, order, Stack)
    stored, treedef = tree.flatten(described)
    shapes = [leaf.shape for leaf in tree.leaves(made)]
    is_place = lambda x: x is None or isinstance(x, (bf.Device, bf.sharding.Sharding))
    places = tree.broadcast_prefix(shardings, made, is_leaf=is_place)

    owns = tree.leaves(quantized.chosen(made)) if quantize else [False] * len(shapes)

    def placed(stored: Stored | Stack, shape: tuple[int, ...], place: Any, own: bool) -> Any:
        def read(index: tuple[slice, ...]) -> np.ndarray:
            part = files.part(stored, index)
            return part if dtype is None else part.astype(bf.numpy.dtype(dtype))

        if own:
            if isinstance(place, bf.NamedSharding):
                raise DataError(
                    "quantized weights are on one device",
                    where="shardings",
                    fix="no mesh, or no quantization",
                )
            codes = quantized.weight(bf.device_put(read(tuple(slice(0, n) for n in shape)), place), quantize)
            return bf.block_until_ready(codes)  # before the next one is sent
        if isinstance(place, bf.NamedSharding):
            return bf.make_array_from_callback(shape, place, read)
        return bf.device_put(read(tuple(slice(0, n) for n in shape)), place)

    return tree.unflatten(
        treedef, [placed(*each) for each in zip(stored, shapes, places, owns, strict=True)]
    ), config


# -- saving ----------------------------------------------------------------------------------------


def check_free(folder: str | Path) -> None:
    """Raise DataError if a folder holds a model already."""
    found = [name for name in ("config.json", SINGLE, INDEX) if (Path(folder) / name).exists()]
    if found:
        raise DataError(
            f"{folder} holds a model already",
            where=str(Path(folder) / found[0]),
            why="its files and new ones would be mixed",
            fix="choose another folder, or remove that model first",
        )


def save(folder: str | Path, params: dict, config: Config, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a folder that ``load`` and ``transformers`` read.

    Args:
      shard_bytes: arrays beyond this size begin another file.
    Raises:
      DataError: the folder holds a model, or cannot be written.
    """
    check_free(folder)
    folder = Path(folder)
    leaves = list(zip(tree.leaves(layout(config)), tree.leaves(params), strict=True))
    shards = list(_sharded(leaves, shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    total, where = 0, {}
    for name, part in zip(names, shards, strict=True):
        tensors = {}
        for stored, leaf in part:
            tensors |= taken_apart(stored, np.asarray(leaf))
        total += sum(tensor.nbytes for tensor in tensors.values())
        where |= dict.fromkeys(tensors, name)
        io.save(folder / name, tensors, metadata={"format": "pt"})  # transformers reads no other
    if len(shards) > 1:
        _write(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    _write(folder / "config.json", architectures.to_json(config, str(params["embed"].dtype)))


def taken_apart(stored: Stored | Stack, array: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of the files that an array consists of."""
    if isinstance(stored, Stack):
        each = [taken_apart(own, part) for own, part in zip(stored.parts, array, strict=True)]
        return {name: tensor for tensors in each for name, tensor in tensors.items()}
    rows: dict[str, list[tuple[int, np.ndarray]]] = {}
    at = 0
    for piece in stored.pieces:
        n = piece.stop - piece.start
        rows.setdefault(piece.tensor, []).append((piece.start, array[at : at + n]))
        at += n
    joined = {
        name: np.concatenate([part for _, part in sorted(parts, key=lambda x: x[0])])
        for name, parts in rows.items()
    }
    return {name: tensor.T if stored.transposed else tensor for name, tensor in joined.items()}


def _sharded(
    leaves: Iterable[tuple[Stored | Stack, Any]], limit: int
) -> Iterator[list[tuple[Stored | Stack, Any]]]:
    """Arrays in runs of at most ``limit`` bytes, or of one array."""
    shard: list[tuple[Stored | Stack, Any]] = []
    size = 0
    for stored, leaf in leaves:
        if shard and size + leaf.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard, size = [*shard, (stored, leaf)], size + leaf.nbytes
    yield shard


def _shard_name(i: int, n: int) -> str:
    return f"model-{i + 1:05}-of-{n:05}.safetensors"


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
