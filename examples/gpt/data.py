"""Data: sources of tokens, and the windows that each step trains on.

The second module; it knows nothing of models. In: nothing (then the text is the Python standard library's own source,
found on this machine), or a path. Out: a ``Dataset`` of training and validation tokens, and ``Batches``, which returns
the windows of step k as a pure function of the seed and k, so a continued run sees the same data as an uninterrupted
one.

Text is read as bytes: the vocabulary is 256 and there is no tokenizer. Every problem with a file raises ``DataError``
ahead of the first step or, for out-of-range tokens, at the step that would read them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from blufunc.errors import DataError

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_WORDS = 20240520, 1, 256  # llm.c's token shards
PLAUSIBLE_VOCAB = 2**20  # larger than any tokenizer's vocabulary
HELD_OUT = 0.07  # share of the files held out for validation
HELD_OUT_TAIL = 0.1, 1_000_000  # of a single file: this share of its end, up to this number of tokens

# Folders of the standard library that hold tests, third-party packages, or generated tables.
NOT_PROSE = frozenset(
    "site-packages dist-packages test tests idle_test encodings pydoc_data lib2to3 __pycache__".split()
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A row of tokens (possibly on disk, memory-mapped), and the source it came from."""

    tokens: np.ndarray
    place: str


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Training and validation tokens.

    Attributes:
      text: True if tokens are bytes.
      opening: default beginning of a sample.
    """

    name: str
    train: tuple[Part, ...]
    validation: tuple[Part, ...]
    text: bool
    opening: tuple[int, ...] = tuple(b"\n")

    @property
    def unit(self) -> str:
        return "byte" if self.text else "token"

    def encode(self, text: str) -> list[int]:
        if not self.text:
            raise DataError(
                f"no tokenizer for the prompt {text!r}",
                where=self.name,
                why="this data came as token ids, and the program knows only bytes",
                fix="leave out --prompt",
            )
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace") if self.text else " ".join(map(str, tokens))


# ------------------------------------------------------------------------------------------------- sources


def load(path: str | Path | None = None) -> Dataset:
    """Dataset at ``path``: a text file, a folder, a ``.npy`` or ``.bin`` file.

    Without a path, the default text.
    """
    if path is None:
        return standard_library()
    if path == "":
        raise DataError(
            "the path of the data is empty",
            where="--data ''",
            why="an unset variable of the shell, perhaps",
            fix="name a file or a folder (this one: --data .), or leave out --data",
        )
    path = Path(path)
    with _reading(path):
        if not path.exists():
            raise DataError(f"there is no {path}", where=f"--data {path}", fix="check the path")
        if path.is_dir():
            shards = sorted(path.glob("*.bin"))
            return _shards(path, shards) if shards else _text_folder(path)
        if path.suffix == ".bin":
            return _one_file(path, read_shard(path), text=False)
        if path.suffix in (".npy", ".npz"):
            return _one_file(path, read_npy(path), text=False)
        return _one_file(path, read_text(path), text=True)


def standard_library() -> Dataset:
    """Source of this Python's standard library: about 10 MB of text on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in root.rglob("*.py")
        if NOT_PROSE.isdisjoint(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    ]
    if len(files) < 2:
        raise DataError(
            "this Python has no standard library in source form",
            where=str(root),
            why="some builds of Python ship it compiled or inside a zip file",
            fix="name a text of your own: --data PATH",
        )
    dataset = _split_by_file("the Python standard library", root, files)
    return dataclasses.replace(dataset, opening=tuple(b"\n    def "))


def read_text(path: Path) -> np.ndarray:
    """Bytes of a file."""
    with _reading(path):
        _regular(path)
        tokens = np.frombuffer(path.read_bytes(), np.uint8)
    return _not_empty(tokens, path)


def read_npy(path: Path) -> np.ndarray:
    """NumPy file with a row of integers, memory-mapped."""
    with _reading(path):
        if _regular(path) == 0:
            raise _empty(path)
        with path.open("rb") as file:
            archive = file.read(2) == b"PK"
        if archive:
            raise DataError(
                f"{path} is an archive of arrays (.npz), not one row of integer tokens",
                where=str(path),
                fix="take the tokens out of it: numpy.save('tokens.npy', numpy.load(path)[name])",
            )
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OverflowError) as error:
            if "Python objects" in str(error):
                raise DataError(
                    f"{path} holds Python objects, not a row of integer tokens",
                    where=str(path),
                    why="its rows differ in length, perhaps, so that NumPy could only make them objects",
                    fix="numpy.save(path, numpy.concatenate(rows).astype(numpy.uint16))",
                ) from error
            raise DataError(
                f"{path} is not a whole NumPy array file",
                where=str(path),
                why=str(error),
                fix="write it with numpy.save(path, tokens)",
            ) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(
            f"{path} holds an array of shape {tokens.shape} and dtype {tokens.dtype}, "
            "not a row of integer tokens",
            where=str(path),
            fix="numpy.save(path, tokens.reshape(-1).astype(numpy.uint16))",
        )
    return _not_empty(tokens, path)


def read_shard(path: Path) -> np.ndarray:
    """Token shard in llm.c's format, memory-mapped.

    256 int32 words of header, then uint16 tokens.
    """
    header_bytes = 4 * SHARD_HEADER_WORDS
    with _reading(path):
        size = _regular(path)
        if size == 0:
            raise _empty(path)
        header = np.fromfile(path, "<i4", SHARD_HEADER_WORDS)
    how = "write shards with llm.c's dev/data scripts, or give a text a name that does not end in .bin"
    if len(header) < SHARD_HEADER_WORDS:
        why = f"it is {size} bytes long, and the header alone takes {header_bytes}"
        raise DataError(f"{path} is too short for a token shard", where=str(path), why=why, fix=how)
    magic, version, count = (int(word) for word in header[:3])
    if magic != SHARD_MAGIC:
        why = f"its first word is {magic}, not the magic number {SHARD_MAGIC}"
        raise DataError(f"{path} is not a GPT-2 token shard", where=str(path), why=why, fix=how)
    if version != SHARD_VERSION:
        why = f"its header says version {version}; only version {SHARD_VERSION} (uint16 tokens) is known"
        raise DataError(f"{path} is a token shard of another version", where=str(path), why=why, fix=how)
    if count < 0:
        why, retry = f"its header promises {count} tokens", "download or write the shard again"
        raise DataError(f"{path} has a damaged header", where=str(path), why=why, fix=retry)
    if size != header_bytes + 2 * count:
        raise DataError(
            f"{path} is {'truncated' if size < header_bytes + 2 * count else 'longer than its header says'}",
            where=str(path),
            why=f"its header promises {count} tokens, and it holds {(size - header_bytes) / 2:g}",
            fix="download or write the shard again",
        )
    if count == 0:
        raise _empty(path)
    with _reading(path):
        return np.memmap(path, "<u2", mode="r", offset=header_bytes, shape=(count,))


def _one_file(path: Path, tokens: np.ndarray, text: bool) -> Dataset:
    """Hold out the end of a single file."""
    train, validation = _without_tail(Part(tokens, str(path)))
    dataset = Dataset(str(path), (train,), (validation,), text)
    return dataset if text else dataclasses.replace(dataset, opening=_first(train))


def _shards(root: Path, paths: list[Path]) -> Dataset:
    """Folder of shards: names with 'val' are validation, else the end of the last one."""
    parts = {path: Part(read_shard(path), str(path)) for path in paths}
    validation = [parts.pop(path) for path in paths if "val" in path.name]
    train = list(parts.values())
    if not train:
        raise DataError(
            f"every shard in {root} has 'val' in its name",
            where=str(root),
            why="such shards are kept for validation, so that nothing is left to train on",
            fix="put training shards beside them, or name one file: --data SHARD.bin",
        )
    if not validation:
        train[-1], tail = _without_tail(train[-1])
        validation = [tail]
    return Dataset(str(root), tuple(train), tuple(validation), text=False, opening=_first(train[0]))


def _text_folder(root: Path) -> Dataset:
    """Every text file below a folder, except hidden ones."""
    files = [
        path
        for path in root.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    if not files:
        raise DataError(f"there are no files in {root}", where=str(root), fix="name a folder of text files")
    if len(files) == 1:
        return load(files[0])
    return _split_by_file(str(root), root, files)


def _split_by_file(name: str, root: Path, files: list[Path]) -> Dataset:
    """Split by a hash of each file's relative path: independent of the other files."""

    def side(path: Path) -> float:
        digest = hashlib.sha256(os.fsencode(path.relative_to(root).as_posix())).digest()
        return int.from_bytes(digest[:4], "big") / 2**32

    files = sorted(files, key=lambda path: path.relative_to(root).as_posix())
    # Of few files, none or all may fall below the threshold: then only the lowest is held out.
    held_out = {path for path in files if side(path) < HELD_OUT}
    if not 0 < len(held_out) < len(files):
        held_out = {min(files, key=side)}

    def join(kept: list[Path]) -> tuple[Part, ...]:
        with _reading(root):
            texts = [path.read_bytes() for path in kept]
        text = b"\n".join(text for text in texts if b"\0" not in text[:8192])  # zeros: not a text file
        if not text:
            raise DataError(
                f"no text among the {len(kept)} files of {root} that are for "
                f"{'validation' if kept[0] in held_out else 'training'}",
                where=str(root),
                why="they are empty or binary",
                fix="name a folder that holds text files, or join them into one file",
            )
        return (Part(np.frombuffer(text, np.uint8), name),)

    return Dataset(
        name,
        train=join([path for path in files if path not in held_out]),
        validation=join([path for path in files if path in held_out]),
        text=True,
    )


def _first(part: Part) -> tuple[int, ...]:
    """Token that token data begins with: in shards, the document separator."""
    return (int(part.tokens[0]),)


def _without_tail(part: Part) -> tuple[Part, Part]:
    share, most = HELD_OUT_TAIL
    cut = len(part.tokens) - min(int(share * len(part.tokens)), most)
    return Part(part.tokens[:cut], part.place), Part(part.tokens[cut:], part.place)


# ------------------------------------------------------------------------------------------------- windows


class Windows(Sequence):
    """Every run of ``length`` tokens within the parts, by index; none crosses parts."""

    def __init__(self, parts: Sequence[Part], length: int, vocab: int):
        self.parts, self.length, self.vocab = parts, length, vocab
        self.ends = np.cumsum([max(0, len(part.tokens) - length + 1) for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, number: int) -> np.ndarray:
        which = int(np.searchsorted(self.ends, number, side="right"))
        part = self.parts[which]
        start = int(number) - (int(self.ends[which - 1]) if which else 0)
        window = part.tokens[start : start + self.length]
        if window.max() >= self.vocab or window.min() < 0:
            at = int(np.argmax((window >= self.vocab) | (window < 0)))
            raise DataError(
                f"token {window[at]} is outside the vocabulary of {self.vocab}",
                where=f"{part.place}, token number {start + at} of its {len(part.tokens)}",
                why="the model has one embedding for each token from 0 to vocab - 1",
                fix=self._cure(int(window.min()), int(window.max())),
            )
        return window.astype(np.int32)

    def _cure(self, least: int, most: int) -> str:
        if least < 0:
            return "write the data again: a tokenizer's ids start from 0, and padding has no place here"
        if most >= PLAUSIBLE_VOCAB:
            return "check that the file holds token ids, and their dtype: no tokenizer knows so many tokens"
        return f"--vocab {max(most + 1, 50304)}, or data made with another tokenizer"

    def take(self, numbers: np.ndarray) -> np.ndarray:
        return np.stack([self[number] for number in numbers])

    def evenly(self, count: int) -> np.ndarray:
        """At most ``count`` windows, evenly spaced and the same on every call."""
        return self.take(np.linspace(0, len(self) - 1, min(count, len(self))).astype(int))


class Batches:
    """``batches[k]``: int32 [batch, context + 1], the random windows of step k."""

    def __init__(self, windows: Windows, batch: int, seed: int):
        self.windows, self.batch, self.seed = windows, batch, seed

    def __getitem__(self, step: int) -> np.ndarray:
        numbers = np.random.default_rng((self.seed, step)).integers(len(self.windows), size=self.batch)
        return self.windows.take(numbers)


def windows(dataset: Dataset, context: int, vocab: int, batch: int = 1) -> tuple[Windows, Windows]:
    """Training and validation windows of ``context`` tokens and the next one."""
    train = Windows(dataset.train, context + 1, vocab)
    validation = Windows(dataset.validation, context + 1, vocab)
    for what, found, wanted in (("training", train, batch), ("validation", validation, 1)):
        if len(found) < wanted:
            held = sum(len(part.tokens) for part in found.parts)
            raise DataError(
                f"{dataset.name} is too short: it has {held} {what} {dataset.unit}s",
                where=f"--data {dataset.name}",
                why=f"a batch needs {wanted} different windows of {context + 1}, "
                f"thus at least {context + wanted} {dataset.unit}s in one file",
                fix="give more data, or a preset with a shorter context",
            )
    return train, validation


# -------------------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into errors that name the path."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or path}",
            where=str(path),
            why=error.strerror or str(error),
            fix="check that the file is there, and that you may read it",
        ) from error


def _regular(path: Path) -> int:
    """Bytes of a file; DataError for a pipe, which might never have a writer."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise DataError(
            f"{path} is no regular file",
            where=str(path),
            why="data is read more than once, at any place of the file",
            fix="write what a pipe delivers to a file first",
        )
    return found.st_size


def _not_empty(tokens: np.ndarray, path: Path) -> np.ndarray:
    if len(tokens) == 0:
        raise _empty(path)
    return tokens


def _empty(path: Path) -> DataError:
    return DataError(f"{path} is empty", where=str(path), fix="name a file that holds text or tokens")
