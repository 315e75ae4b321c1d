"""The demo's files: they load as saved, and a good file is never lost."""

import dataclasses
import errno
import json
import os
import stat
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import blufunc.numpy as bnp
from blufunc import tree
from blufunc.errors import DataError
from examples.gpt import weights


class Moments(NamedTuple):
    count: object
    mean: object


def values(width=4):
    return {
        "params": {"blocks": [{"w": bnp.arange(3 * width, dtype=bnp.float32).reshape(3, width)}]},
        "optimizer": (Moments(bnp.asarray(np.int32(7)), {"w": bnp.full((width,), 1 / 3)}), None),
    }


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run" / "checkpoint.safetensors"
    weights.save(path, values(), {"step": 7})
    return path


def test_what_comes_back_is_what_went_in(path):
    loaded = weights.load(path, like=values())
    assert isinstance(loaded["optimizer"][0], Moments)
    for new, old in zip(tree.leaves(loaded), tree.leaves(values())):
        new, old = np.asarray(new), np.asarray(old)
        assert new.dtype == old.dtype and new.shape == old.shape
        assert new.tobytes() == old.tobytes()
    assert weights.facts(path) == {"step": 7}


def test_arrays_are_named_by_their_place(path):
    assert set(load_file(path)) == {"params.blocks.0.w", "optimizer.0.count", "optimizer.0.mean.w"}


def test_nothing_else_is_left_in_the_folder(path):
    weights.save(path, values(), {"step": 8})
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    (path.parent / "plain").touch()
    assert path.stat().st_mode == (path.parent / "plain").stat().st_mode  # others may read it, if they may
    assert weights.facts(path) == {"step": 8}


@pytest.mark.parametrize("moment", ["safetensors.numpy.save", "os.fsync", "os.replace"])
def test_a_half_written_file_never_replaces_a_good_one(path, monkeypatch, moment):
    def broken(*args, **kwargs):
        raise OSError(28, "No space left on device")

    good = path.read_bytes()
    monkeypatch.setattr(f"examples.gpt.weights.{moment}", broken)
    with pytest.raises(DataError, match=r"cannot write to .*run(.|\n)*No space left"):
        weights.save(path, values(), {"step": 8})
    assert path.read_bytes() == good
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_name_reaches_the_disk_after_the_bytes(path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    kind = lambda number: "folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file"
    monkeypatch.setattr(os, "fsync", lambda number: calls.append(kind(number)) or fsync(number))
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("replace") or replace(*paths))
    weights.save(path, values(), {})
    assert calls == ["file", "replace", "folder"]


def test_a_folder_that_cannot_be_made(path):
    with pytest.raises(DataError, match=r"cannot write(.|\n)*a file is in the way(.|\n)*--out DIR"):
        weights.save(path / "below a file" / "weights.safetensors", values(), {})


@pytest.mark.parametrize(
    "code, fix",
    [
        (errno.EACCES, "that you may write to"),
        (errno.EROFS, "that you may write to"),
        (errno.EEXIST, "a file is in the way"),
        (errno.ENOSPC, "free some of the disk"),
        (errno.EIO, "choose another folder"),
    ],
)
def test_what_stops_us_from_writing_decides_the_fix(tmp_path, code, fix):
    with pytest.raises(DataError) as caught, weights.writing(tmp_path):
        raise OSError(code, os.strerror(code))
    assert fix in caught.value.fix and "--out DIR" in caught.value.fix


def test_a_checkpoint_of_another_shape(path):
    with pytest.raises(DataError, match="of a model of another size") as caught:
        weights.load(path, like=values(width=5))
    message = str(caught.value)
    assert str(path) in message and caught.value.fix
    assert "optimizer.0.mean.w has shape (4,) in the file and (5,) in this run" in message


def test_a_checkpoint_of_another_dtype(path):
    like = values()
    like["params"]["blocks"][0]["w"] = bnp.zeros((3, 4), bnp.int32)
    with pytest.raises(DataError, match=r"params\.blocks\.0\.w is float32 in the file and int32 in this run"):
        weights.load(path, like)


def test_a_checkpoint_of_another_structure(path):
    like = values()
    like["params"]["blocks"].append({"w": bnp.zeros(2)})
    with pytest.raises(DataError, match=r"lacks params\.blocks\.1\.w"):
        weights.load(path, like)
    with pytest.raises(DataError, match=r"also has optimizer\.0\.count, optimizer\.0\.mean\.w"):
        weights.load(path, {"params": values()["params"]})


def test_parameters_alone_are_no_checkpoint(tmp_path):
    path = tmp_path / "weights.safetensors"
    weights.save(path, values()["params"], {})
    with pytest.raises(DataError, match=r"continue from the checkpoint\.safetensors"):
        weights.load(path, like=values())


@dataclasses.dataclass
class Recipe:
    steps: int
    lr: float
    data: str | None
    losses: list[float]


RECIPE = {"steps": 3, "lr": 0.1, "data": None, "losses": [1.5]}


def test_a_fact_comes_back_as_its_dataclass(path):
    weights.save(path, values(), {"recipe": RECIPE})
    assert weights.fact(path, "recipe", Recipe) == Recipe(**RECIPE)


@pytest.mark.parametrize(
    "header, why",
    [
        ("oops", "is not JSON"),
        ("[1]", r"is \[1\], not named facts"),
        ("{}", "has no recipe"),
        ('{"recipe": 3}', "has no recipe"),
        (json.dumps({"recipe": {"zzz": 1}}), "recipe in its header lacks data, .*, and also has zzz"),
        (json.dumps({"recipe": RECIPE | {"zzz": 1}}), "recipe in its header also has zzz"),
        (json.dumps({"recipe": RECIPE | {"steps": "3"}}), "recipe in its header has '3' for steps"),
        (json.dumps({"recipe": RECIPE | {"losses": 3}}), "recipe in its header has 3 for losses"),
    ],
)
def test_a_header_that_is_damaged_or_of_another_version(tmp_path, header, why):
    path = tmp_path / "checkpoint.safetensors"
    save_file({"w": np.zeros(3)}, path, metadata={weights.FACTS: header})
    with pytest.raises(DataError, match=why) as caught:
        weights.fact(path, "recipe", Recipe)
    assert f"{path} is damaged, or was written by another version" in str(caught.value)
    assert "leave out --resume" in caught.value.fix


def test_files_that_are_not_ours(path, tmp_path):
    with pytest.raises(DataError, match="there is no"):
        weights.facts(tmp_path / "nothing.safetensors")
    with pytest.raises(DataError, match="there is no"):
        weights.facts(tmp_path)  # a folder
    text = tmp_path / "text.safetensors"
    text.write_text("hello " * 20)
    with pytest.raises(DataError, match="not a whole safetensors file"):
        weights.facts(text)
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="not a whole safetensors file"):
        weights.load(truncated, like=values())
    foreign = tmp_path / "foreign.safetensors"
    save_file({"w": np.zeros(3)}, foreign, metadata={"other": json.dumps({})})
    with pytest.raises(DataError, match="was not written by this program"):
        weights.facts(foreign)
