"""One file: every leaf comes back as it was, and no damage goes unnoticed."""

import json
import math
import os
import stat
from dataclasses import dataclass, field
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import NamedSharding, P, errors, io, random, tree
from blufunc.io import header, reading, seal
from blufunc.io.elements import CODES
from tests.io import damage


class Moments(NamedTuple):
    count: object
    mean: object


def values():
    return {
        "params": {"blocks": [{"w": jnp.arange(12.0).reshape(3, 4)}, {"w": jnp.ones((2, 2), "bfloat16")}]},
        "optimizer": (Moments(jnp.asarray(np.int32(7)), {"w": jnp.full((4,), 1 / 3)}), None),
        "key": random.split(random.key(3), 2),
        "step": 12,
    }


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run" / "state.safetensors"
    io.save(path, values(), facts={"losses": [0.5, 1.5]})
    return path


def same(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# -- round trips -----------------------------------------------------------------------------------


def test_what_comes_back_is_what_went_in(path):
    loaded = io.load(path, like=values())
    assert isinstance(loaded["optimizer"][0], Moments) and loaded["step"] == 12
    assert tree.structure(loaded) == tree.structure(values())
    assert all(same(a, b) for a, b in zip(tree.leaves(loaded), tree.leaves(values())))
    assert io.facts(path) == {"losses": [0.5, 1.5]}


def test_leaves_are_named_by_their_paths_for_other_programs(path):
    names = "params.blocks.0.w params.blocks.1.w optimizer.0.count optimizer.0.mean.w key"
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(names.split())
        np.testing.assert_array_equal(file.get_tensor("params.blocks.0.w"), np.arange(12.0).reshape(3, 4))
        assert file.get_tensor("key").shape == (2, 2)
    flat = io.load(path)
    assert set(flat) == {*names.split(), "step"} and not flat["optimizer.0.mean.w"].flags.writeable


OF_ML_DTYPES = [n for n in dir(ml_dtypes) if n.startswith(("bfloat", "float", "int", "uint"))]
OF_NUMPY = [*"?bBhHiIlLqQefdFD", "M8[ns]", "m8[s]", "U3", "S5"]
KINDS = {np.dtype(getattr(ml_dtypes, n, n)): None for n in (*OF_ML_DTYPES, *OF_NUMPY)}


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_dtype_comes_back_to_the_bit(tmp_path, rng, dtype):
    bits = rng.integers(256, size=6 * dtype.itemsize, dtype=np.uint8)
    for x in (bits.view(dtype).reshape(2, 3), bits.view(dtype)[:1].reshape(()), np.zeros((0, 3), dtype)):
        io.save(tmp_path / "x", {"x": x})
        assert same(io.load(tmp_path / "x")["x"], x)
        assert same(io.load(tmp_path / "x", like={"x": np.empty_like(x)})["x"], x)
    safetensors.numpy.deserialize((tmp_path / "x").read_bytes())  # what the package makes of it


@pytest.mark.parametrize(
    "value",
    [True, 0, -(10**20), 2.5, -0.0, math.inf, math.nan, 1 + 2j, "", "zwölf\0\udc80", b"", b"\xff\0"],
    ids=lambda v: type(v).__name__,
)
def test_scalars_come_back_exactly(tmp_path, value):
    io.save(tmp_path / "x", [value])
    (found,) = io.load(tmp_path / "x", like=[type(value)()])
    assert type(found) is type(value) and (found == value or found != found)
    assert math.copysign(1, found) == math.copysign(1, value) if isinstance(value, float) else True


def test_integers_of_more_digits_than_python_prints(tmp_path):
    io.save(tmp_path / "x", [10**5000])
    assert io.load(tmp_path / "x", like=[0]) == [10**5000]


def test_weak_types_and_layouts_come_back(tmp_path):
    given = {
        "weak": jnp.asarray(2.0),
        "t": jnp.arange(6.0).reshape(2, 3).T,
        "np": np.arange(6)[::-2],
        "be": np.arange(3, dtype=">i4"),
    }
    io.save(tmp_path / "x", given)
    found = io.load(tmp_path / "x", like=given)
    assert found["weak"].weak_type and not found["t"].weak_type
    assert same(found["t"], given["t"]) and same(found["np"], given["np"])
    assert found["be"].dtype == np.int32 and found["be"].tolist() == [0, 1, 2]


def test_names_that_two_leaves_would_share(tmp_path):
    given = {"a.b": 1.0, "a": {"b": np.ones(2)}, "__metadata__": np.zeros(1), "c": [np.ones(1)]}
    io.save(tmp_path / "x", given)
    assert set(io.load(tmp_path / "x")) == {"['a.b']", "['a']['b']", "['__metadata__']", "c.0"}
    assert tree.structure(io.load(tmp_path / "x", like=given)) == tree.structure(given)


def test_a_tree_of_one_leaf_and_one_of_none(tmp_path):
    for given in (np.arange(3), {}, None):
        io.save(tmp_path / "x", given)
        assert (
            same(io.load(tmp_path / "x", like=given) or 0, given or 0)
            if not isinstance(given, np.ndarray)
            else same(io.load(tmp_path / "x", like=given), given)
        )


def test_arrays_load_onto_the_sharding_of_like(path, tmp_path, monkeypatch):
    monkeypatch.setattr(bf.config, "cpu_devices", 4)
    rows = NamedSharding(bf.make_mesh((2, 2), ("a", "b")), P("a"))
    x = bf.device_put(np.arange(20.0, dtype=np.float32).reshape(5, 4), rows)
    io.save(tmp_path / "x", {"x": x})  # on a mesh, and whole in the file
    assert same(io.load(tmp_path / "x")["x"], x)
    columns = rows.with_spec(P(None, ("a", "b")))
    for like in (x, bf.ShapeDtypeStruct((5, 4), "float32", sharding=columns)):
        found = io.load(tmp_path / "x", like={"x": like})["x"]
        assert found.sharding == like.sharding and same(found, x)


# -- what cannot be ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "leaf, why",
    [
        (object(), "a.0 is a object"),
        (np.array([{}]), "a.0 has elements of dtype object"),
        (print, "a.0 is a builtin"),
    ],
)
def test_leaves_that_no_file_can_hold_are_named(tmp_path, leaf, why):
    with pytest.raises(errors.ArgumentError, match=why):
        io.save(tmp_path / "x", {"a": [leaf]})
    assert not (tmp_path / "x").exists()


def test_traced_values_are_not_saved(tmp_path):
    with pytest.raises(errors.UnsupportedError, match="x is a traced value"):
        bf.jit(lambda x: io.save(tmp_path / "x", {"x": x}) or x)(1.0)


@pytest.mark.parametrize("static", [np.arange(3), [1, 2], {"a": 1}], ids=["array", "list", "dict"])
def test_static_data_may_be_anything(tmp_path, static):
    @dataclass
    class Model:
        w: object
        table: object = field(metadata={"static": True})

    tree.register_dataclass(Model)
    for value in (1, 2):  # no names of another structure are taken
        io.save(tmp_path / "x", {"m": Model(jnp.full(3, value), static)})
        assert io.load(tmp_path / "x")["m.w"].tolist() == [value] * 3
        like = io.load(tmp_path / "x", like={"m": Model(jnp.zeros(3, int), static)})["m"]
        assert like.w.tolist() == [value] * 3 and like.table is static


def test_metadata_are_strings_for_other_programs(tmp_path):
    io.save(tmp_path / "x", {"w": jnp.ones(3)}, facts=[1], metadata={"format": "pt"})
    with safe_open(tmp_path / "x", "np") as file:
        assert file.metadata()["format"] == "pt"
    assert io.facts(tmp_path / "x") == [1] and io.load(tmp_path / "x")["w"].tolist() == [1, 1, 1]
    for wrong in ({"format": 1}, {"blufunc.format": "2"}):
        with pytest.raises(errors.ArgumentError, match="the metadata of a file have"):
            io.save(tmp_path / "y", {"w": jnp.ones(3)}, metadata=wrong)


def test_facts_are_json(tmp_path):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for facts in ({1, 2}, deep, {(1,): 2}):
        with pytest.raises(errors.ArgumentError, match="facts of a file are not JSON"):
            io.save(tmp_path / "x", {}, facts=facts)


def blocks(shape):
    return {"params": {"blocks": [{"w": jnp.zeros(shape)}, {"w": jnp.zeros((2, 2))}]}}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"step": 2.0}, r"step is of another type in .*state.* than in `like`(.|\n)*a int in the file, and a float"),
        ({"step": np.zeros(())}, "step is of another kind"),
        ({"key": 3}, "key is of another kind"),
        ({"key": jnp.zeros((2, 2), "uint32")}, "key has another shape"),
        (blocks((3, 5)), r"0\.w has another shape(.|\n)*\(3, 4\)"),
        (blocks((3, 4)), r"1\.w has another dtype(.|\n)*bfloat16"),
        ({"more": 1}, "lacks more"),
        ({"optimizer": None}, r"also has optimizer\.0\.count, optimizer\.0\.mean\.w"),
    ],
)  # fmt: skip
def test_another_tree_is_refused_by_the_name_of_the_leaf(path, change, message):
    with pytest.raises(errors.DataError, match=message):
        io.load(path, like=values() | change)


def test_a_file_of_another_program(tmp_path):
    safetensors.numpy.save_file({"w": np.arange(3.0)}, tmp_path / "x", metadata={"blufunc.facts": "oops"})
    with pytest.raises(errors.DataError, match=r"has no digests(.|\n)*verify=False"):
        io.load(tmp_path / "x")
    assert same(io.load(tmp_path / "x", like={"w": np.zeros(3)}, verify=False)["w"], np.arange(3.0))


def test_files_that_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello " * 20)
    for name, message in (
        ("nothing", "there is no"), (".", "cannot read"), ("pipe", "not a regular file"),
        ("empty", "has no header"), ("text", "not a whole safetensors file"),
    ):  # fmt: skip
        with pytest.raises(errors.DataError, match=message):
            io.load(tmp_path / name)
    with pytest.raises(errors.ArgumentError, match="no name of a file"):
        io.load(f"{tmp_path}/")


def crafted(path, data=b"", **entries):
    """A file with this header."""
    text = json.dumps(entries).encode() if not isinstance(entries.get("raw"), bytes) else entries["raw"]
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    "entries, why",
    [
        ({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, "x has dtype 'F4'"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, r"x of F32 \[2\] is said to be at"),
        ({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "for a size"),
        ({"x": {"dtype": "F32", "shape": [2**64], "data_offsets": [0, 2**66]}}, "more elements"),
        ({"x": {"dtype": "F32", "shape": [2**64, 0], "data_offsets": [0, 0]}}, "more elements"),
        ({"x": {"dtype": "F32", "shape": True, "data_offsets": [0, 4]}}, "the shape of x is True"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "where 0 was due"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "x and what follows are cut off"),
        ({"x": 3}, "x is 3, not named values"),
        ({"raw": b"[1]"}, "not named values"),
        ({"raw": b"[" * 100_000}, "nested too deeply"),
        ({"raw": b'{"a":\xff}'}, "is not JSON"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path, entries, why):
    crafted(tmp_path / "x", **entries)
    with pytest.raises(errors.DataError, match=why):
        io.load(tmp_path / "x", verify=False)


def test_another_version_and_records_that_are_wrong(tmp_path):
    x = header.Stored("x", "x", np.dtype("f4"), (1,), 0, 4, (1,), (0,), digests=(seal.digest(bytes(4)),))
    good = header.encoded(header.Header((x,), {"n": 3}, None))
    for before, after, why in (
        (b'"blufunc.format":"1"', b'"blufunc.format":"2"', "it has format '2'; this version knows 1"),
        (b'\\"sha256\\":[', b'\\"sha255\\":[', "not one digest for each chunk"),
        (b'[\\"int\\"', b'[\\"ant\\"', "n: .* is no scalar"),
        (b'"blufunc.chunk":"', b'"blufunc.chunk":"-', "for a size"),
    ):
        assert before in good
        text = good[8:].replace(before, after)
        length = len(text).to_bytes(8, "little")
        (tmp_path / "x").write_bytes(length + seal.seal(text, header.PREFIX, length) + bytes(4))
        with pytest.raises(errors.DataError, match=why):
            io.load(tmp_path / "x")


# -- damage ----------------------------------------------------------------------------------------


def test_flipped_bits_and_cuts_are_found_and_the_leaf_named(tmp_path, monkeypatch):
    monkeypatch.setattr(seal, "CHUNK", 64)
    damage.check(tmp_path / "x", flips=400, cuts=150, seed=0)


def test_damage_is_found_without_like_by_facts_and_by_verify(path, rng):
    good = path.read_bytes()
    header_bytes = 8 + int.from_bytes(good[:8], "little")
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(errors.DataError, match=r"is damaged in"):
        io.load(path)
    with pytest.raises(errors.DataError, match=r"params\.blocks\.1\.w in .*state|is damaged"):
        io.verify(path)
    assert io.facts(path) == {"losses": [0.5, 1.5]}  # the header is whole
    assert io.load(path, verify=False)["step"] == 12
    path.write_bytes(good[: header_bytes - 3] + b"}" + good[header_bytes - 2 :])
    with pytest.raises(errors.DataError, match="its header does not have the digest"):
        io.facts(path)


def test_chunks_are_those_that_an_index_touches(rng):
    for _ in range(300):
        shape = tuple(rng.integers(1, 7, size=rng.integers(1, 5)))
        itemsize, chunk = int(rng.choice([1, 4])), int(rng.integers(1, 40))
        dtype, n = np.dtype(f"u{itemsize}"), int(np.prod(shape))
        ends = [sorted(rng.choice(m + 1, 2, replace=False)) for m in shape]
        index = tuple(slice(int(a), int(b)) for a, b in ends)
        a = header.Stored(
            "x", "x", dtype, tuple(map(int, shape)), 0, n * itemsize, shape, (0,) * len(shape), chunk=chunk
        )
        elements = np.arange(n).reshape(shape)[index].reshape(-1)
        touched = {(e * itemsize + k) // chunk for e in elements.tolist() for k in range(itemsize)}
        assert touched <= set(reading.chunks_of(a, index))
        if len(shape) == 1:
            assert touched == set(reading.chunks_of(a, index))


# -- writing ---------------------------------------------------------------------------------------


def test_nothing_else_is_left_in_the_folder(path):
    io.save(path, {})
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    (path.parent / "plain").touch()
    assert path.stat().st_mode == (path.parent / "plain").stat().st_mode  # others may read it, if they may


@pytest.mark.parametrize("moment", ["pwrite", "fsync", "replace"])
def test_a_half_written_file_never_replaces_a_good_one(path, monkeypatch, moment):
    def broken(*args, **kwargs):
        raise OSError(28, "No space left on device")

    good = path.read_bytes()
    monkeypatch.setattr(os, moment, broken)
    with pytest.raises(
        errors.DataError, match=r"cannot write to .*run(.|\n)*No space left(.|\n)*free some"
    ) as caught:
        io.save(path, values())
    assert str(path) in str(caught.value)
    assert path.read_bytes() == good
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_name_reaches_the_disk_after_the_bytes(path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    kind = lambda number: "folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file"
    monkeypatch.setattr(os, "fsync", lambda number: calls.append(kind(number)) or fsync(number))
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("replace") or replace(*paths))
    io.save(path, values())
    assert calls == ["file", "replace", "folder"]


def test_folders_that_cannot_be_made(path):
    with pytest.raises(errors.DataError, match=r"cannot write to(.|\n)*a file is in the way"):
        io.save(path / "below a file" / "x", {})


def test_names_that_are_not_utf8(tmp_path):
    path = os.fsencode(tmp_path) + b"/caf\xe9"
    io.save(path, {"x": 1})
    assert io.load(path) == {"x": 1}
    os.remove(path)
    with pytest.raises(errors.DataError, match=r"there is no .*caf\\xe9"):
        io.load(path)


def test_codes_are_dtypes_of_the_package():
    for code, dtype in CODES.items():
        assert dtype.itemsize == int("".join(c for c in code.split("_")[0] if c.isdigit()) or 8) // 8, code


# -- paths -----------------------------------------------------------------------------------------


def test_the_home_folder_is_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    io.save("~/w", {"x": 1})
    with io.Checkpointer("~/run") as saves:
        saves.save(1, {"x": 1})
    assert sorted(os.listdir(tmp_path)) == ["run", "w"]
    assert io.load("~/w")["x"] == 1 and io.Checkpointer(tmp_path / "run").steps() == [1]
    io.verify("~/w")
    io.verify("~/run")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (7, "7 is no path"),
        (None, "None is no path"),
        ("a\0b", "has a null byte"),
        ("s3:/bucket/w", "half a URL.*s3://bucket/w"),
        ("nonsense://bucket/w", "no URL of an object store: Protocol not known"),
        ("memory://", "is no name of a file"),
        ("", "is no name of a file"),
    ],
)
def test_what_is_no_path_is_an_error(path, message, tmp_path, monkeypatch):
    pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    calls = [lambda: io.load(path), lambda: io.save(path, {"x": 1}), lambda: io.facts(path)]
    if "name of a file" not in message:
        calls.append(lambda: io.Checkpointer(path))
    for call in calls:
        with pytest.raises(errors.ArgumentError, match=f"(?s){message}"):
            call()
    assert not os.listdir(tmp_path)


def test_a_url_may_have_one_name():
    pytest.importorskip("fsspec")
    io.save("memory://w", {"x": 1})
    assert io.load("memory://w")["x"] == 1 and not os.path.exists("memory:")


def test_names_that_look_like_shards(tmp_path, monkeypatch):
    """A leaf whose name is the key of another one's shard."""
    monkeypatch.setattr(bf.config, "cpu_devices", 2)
    mesh = bf.make_mesh((2,), ("x",))
    w = bf.device_put(np.arange(4, dtype=np.float32), bf.NamedSharding(mesh, bf.P("x")))
    tree = {"w": w, "w[0:2]": np.ones(2, np.float32), "w[2:4]": w * 2, "w[0:2]'": np.zeros(3)}
    with bf.io.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
        found = checkpoints.restore(tree)
    for name, leaf in tree.items():
        np.testing.assert_array_equal(found[name], leaf)


def test_masked_arrays_are_refused(tmp_path):
    with pytest.raises(errors.DtypeError, match="masked array"):
        bf.io.save(tmp_path / "a.safetensors", {"w": np.ma.array([1.0, 2.0], mask=[0, 1])})
