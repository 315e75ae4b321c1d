"""Tokenizers: text to token ids and back, by the files of a model, or bytes.

Independent of models. In: a folder. Out: a ``Tokenizer``, and ``Text``, which turns tokens into text as they come. The
packages ``tokenizers`` and ``tiktoken`` are optional: ``pip install 'blufunc[llm]'``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from blufunc.errors import DataError, UnsupportedError
from examples.llm.config import Config


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
      size: ids are less than this.
      place: file that it was read from, for messages.
    """

    size: int
    place: str

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text, with those that begin one if ``special``."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, without special ones."""


class Bytes:
    """UTF-8: a token is a byte."""

    size, place = 256, "bytes"

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")


class HuggingFace:
    """``tokenizer.json``, or ``vocab.json`` and ``merges.txt``: ``tokenizers``."""

    def __init__(self, path: Path, found: Any):
        self.place, self._tokenizer = str(path), found
        self.size = max(found.get_vocab().values()) + 1

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


class Llama3:
    """``tokenizer.model`` as Llama 3 came with, by the package ``tiktoken``."""

    PATTERN = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    SPECIAL = 256

    def __init__(self, path: Path, ranks: dict[bytes, int], tiktoken: ModuleType):
        first = len(ranks)
        names = {
            "<|begin_of_text|>": 0,
            "<|end_of_text|>": 1,
            "<|start_header_id|>": 6,
            "<|end_header_id|>": 7,
        }
        names |= {"<|eot_id|>": 9}
        reserved = [i for i in range(self.SPECIAL) if i not in names.values()]
        names |= {f"<|reserved_special_token_{n}|>": i for n, i in enumerate(reserved)}
        self.place, self.size, self._begin = str(path), first + self.SPECIAL, first
        self._encoding = tiktoken.Encoding(
            "llama3",
            pat_str=self.PATTERN,
            mergeable_ranks=ranks,
            special_tokens={name: first + i for name, i in names.items()},
        )

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [self._begin] * special + self._encoding.encode(
            text, allowed_special="all" if special else set(), disallowed_special=()
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoding.decode([t for t in tokens if t < self._begin])


def load(folder: str | Path, config: Config) -> Tokenizer:
    """The tokenizer of a model.

    Raises:
      DataError: there is none, it cannot be read, or its ids go beyond the vocabulary.
      UnsupportedError: a package is not installed.
    """
    folder = Path(folder)
    if (path := folder / "tokenizer.json").exists():
        found: Tokenizer = HuggingFace(path, _read(path, lambda t: t.Tokenizer.from_file(str(path))))
    elif (path := folder / "tokenizer.model").exists():
        found = _llama3(path)
    elif (path := folder / "vocab.json").exists():
        merges = str(folder / "merges.txt")
        found = HuggingFace(path, _read(path, lambda t: t.ByteLevelBPETokenizer.from_file(str(path), merges)))
    else:
        raise DataError(
            f"{folder} has no tokenizer",
            where=str(folder / "tokenizer.json"),
            why="it has none of tokenizer.json, tokenizer.model, and vocab.json with merges.txt",
            fix="fetch tokenizer.json; a model whose tokens are bytes runs with --bytes",
        )
    return fitting(found, config)


def fitting(tokenizer: Tokenizer, config: Config) -> Tokenizer:
    """The tokenizer, if its ids are in the vocabulary.

    Raises:
      DataError: they are not.
    """
    if tokenizer.size > config.vocab:
        raise DataError(
            f"the tokenizer has ids up to {tokenizer.size - 1}, and the vocabulary {config.vocab} tokens",
            where=tokenizer.place,
            why="embed has a row for each token, by vocab_size of config.json",
            fix="use the tokenizer of the same model; for added tokens, add rows to the embeddings first",
        )
    return tokenizer


def _read(path: Path, read: Any) -> Any:
    tokenizers = _package("tokenizers", path)
    try:
        return read(tokenizers)
    except Exception as error:  # the package raises Exception itself
        raise DataError(
            f"{path} is not a tokenizer", where=str(path), why=str(error), fix="fetch the file again"
        ) from error


def _llama3(path: Path) -> Llama3:
    """Lines of a token in base64 and its rank."""
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise DataError(
            f"{path} is not a file of tiktoken",
            where=str(path),
            why="SentencePiece has the same name, and this program does not read it",
            fix="fetch tokenizer.json; transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...) makes it",
        ) from error
    return Llama3(path, ranks, _package("tiktoken", path))


def _package(name: str, path: Path) -> ModuleType:
    try:
        return __import__(name)
    except ImportError as error:
        raise UnsupportedError(
            f"{path} is read by the package {name}, which is not installed.",
            where=str(path),
            fix="pip install 'blufunc[llm]', or --bytes for a model whose tokens are bytes",
        ) from error


class Text:
    """The text of tokens as they come: whole characters only.

    A character may end in a later token, and whether a token begins with a space depends on the one before.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._tokens = tokenizer, []
        self._from = self._shown = 0  # first token of the context, and of what is not shown yet

    def add(self, token: int) -> str:
        """Text that another token completes."""
        self._tokens.append(token)
        text, known = self._text(len(self._tokens)), self._text(self._shown)
        if text.endswith("\ufffd"):
            return ""
        self._from, self._shown = self._shown, len(self._tokens)
        return text[len(known) :]

    def rest(self) -> str:
        """Text that is left at the end, with replacements of incomplete characters."""
        return self._text(len(self._tokens))[len(self._text(self._shown)) :]

    def _text(self, stop: int) -> str:
        return self._tokenizer.decode(self._tokens[self._from : stop])
