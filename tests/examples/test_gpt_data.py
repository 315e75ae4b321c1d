"""The demo's tokens: sources, assignment to steps, and files that it refuses."""

import os

import numpy as np
import pytest

import blufunc.numpy as jnp
from blufunc.errors import DataError
from examples.gpt import data

CONTEXT, VOCAB = 8, 256


def write_shard(path, tokens, magic=data.SHARD_MAGIC, version=data.SHARD_VERSION, count=None):
    header = np.zeros(data.SHARD_HEADER_WORDS, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return path


def text_folder(root, count):
    for number in range(count):
        path = root / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {number} says hello\n" * 4)
    return root


def sides(dataset):
    return [np.concatenate([part.tokens for part in side]) for side in (dataset.train, dataset.validation)]


# ------------------------------------------------------------------------------------------------- sources


@pytest.mark.slow
def test_the_default_text_is_the_standard_library_split_by_file():
    first, second = data.load(), data.load()
    train, validation = sides(first)
    assert first.text and first.unit == "byte"
    assert len(train) > 1_000_000
    assert 0.02 < len(validation) / len(train) < 0.15
    for side, same in zip((train, validation), sides(second)):
        np.testing.assert_array_equal(side, same)
    assert b"class JSONDecoder" in train.tobytes() + validation.tobytes()


def test_a_text_file_holds_out_its_end(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(100)))
    train, validation = sides(data.load(path))
    np.testing.assert_array_equal(train, np.arange(90))
    np.testing.assert_array_equal(validation, np.arange(90, 100))


@pytest.mark.parametrize("count", [2, 3, 40])
def test_a_folder_is_split_by_file(tmp_path, count):
    dataset = data.load(text_folder(tmp_path, count))
    train, validation = (side.tobytes().decode() for side in sides(dataset))
    for number in range(count):
        line = f"file {number} says"
        assert (line in train) != (line in validation)


def test_a_file_keeps_its_side_when_others_come(tmp_path):
    _, few = sides(data.load(text_folder(tmp_path, 60)))
    _, more = sides(data.load(text_folder(tmp_path, 90)))
    assert {line for line in few.tobytes().splitlines() if line} <= set(more.tobytes().splitlines())


def test_a_folder_of_one_file_holds_out_its_end(tmp_path):
    text_folder(tmp_path, 1)
    train, validation = sides(data.load(tmp_path))
    assert len(train) > len(validation) > 0


def test_hidden_and_binary_files_of_a_folder_are_no_text(tmp_path):
    text_folder(tmp_path, 30)
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "image").write_bytes(b"\0secret")
    train, validation = sides(data.load(tmp_path))
    assert b"secret" not in train.tobytes() + validation.tobytes()


def test_a_shard_is_memory_mapped(tmp_path):
    tokens = np.arange(1000) % 50257
    dataset = data.load(write_shard(tmp_path / "tokens.bin", tokens))
    train, validation = sides(dataset)
    np.testing.assert_array_equal(np.concatenate([train, validation]), tokens)
    assert isinstance(dataset.train[0].tokens, np.memmap)
    assert not dataset.text and dataset.unit == "token"


def test_shards_named_val_are_for_validation(tmp_path):
    write_shard(tmp_path / "x_train_000001.bin", np.full(50, 1))
    write_shard(tmp_path / "x_train_000002.bin", np.full(60, 2))
    write_shard(tmp_path / "x_val_000000.bin", np.full(40, 3))
    dataset = data.load(tmp_path)
    assert [len(part.tokens) for part in dataset.train] == [50, 60]
    assert [int(part.tokens[0]) for part in dataset.validation] == [3]


def test_without_a_val_shard_the_end_of_the_last_is_held_out(tmp_path):
    for number in (1, 2):
        write_shard(tmp_path / f"{number}.bin", np.full(100, number))
    dataset = data.load(tmp_path)
    assert [len(part.tokens) for part in dataset.train] == [100, 90]
    assert [len(part.tokens) for part in dataset.validation] == [10]


def test_a_numpy_file_of_tokens(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(200, dtype=np.int64))
    train, validation = sides(data.load(tmp_path / "tokens.npy"))
    np.testing.assert_array_equal(np.concatenate([train, validation]), np.arange(200))


def test_text_comes_back_from_tokens(tmp_path):
    (tmp_path / "text.txt").write_text("some text that is long enough")
    dataset = data.load(tmp_path / "text.txt")
    assert dataset.decode(dataset.encode("né")) == "né"
    assert dataset.decode([0xC3]) == "\ufffd"  # half a character
    assert data.Dataset("ids", (), (), text=False).decode([5, 60]) == "5 60"


# ------------------------------------------------------------------------------------------------- windows


def windows_of(*lengths, length=CONTEXT + 1):
    ends = np.cumsum(lengths)
    parts = [data.Part(np.arange(end - n, end), f"part {end}") for n, end in zip(lengths, ends)]
    return data.Windows(parts, length, vocab=10_000)


def test_windows_are_numbered_through_the_parts_and_cross_none():
    windows = windows_of(20, 5, 9, 30)
    assert len(windows) == 12 + 0 + 1 + 22
    all_of_them = windows.take(np.arange(len(windows)))
    assert all_of_them.shape == (35, CONTEXT + 1) and all_of_them.dtype == np.int32
    assert (np.diff(all_of_them) == 1).all()
    np.testing.assert_array_equal(all_of_them[:, 0], [*range(12), 25, *range(34, 56)])


def test_a_batch_is_a_function_of_the_seed_and_the_step():
    windows = windows_of(1000)
    batches, same, other = (data.Batches(windows, batch=4, seed=seed) for seed in (1, 1, 2))
    assert batches[7].shape == (4, CONTEXT + 1) and batches[7].dtype == np.int32
    np.testing.assert_array_equal(batches[7], same[7])
    assert not np.array_equal(batches[7], batches[8])
    assert not np.array_equal(batches[7], other[7])


def test_validation_windows_are_fixed_and_spread_over_everything():
    windows = windows_of(1000)
    some = windows.evenly(5)
    np.testing.assert_array_equal(some[:, 0], [0, 247, 495, 743, 991])
    assert len(windows_of(12).evenly(100)) == 4


# ----------------------------------------------------------------------------------------------- bad input


def missing(root):
    return root / "nothing.txt"


def empty_text(root):
    (root / "empty.txt").touch()
    return root / "empty.txt"


def empty_npy(root):
    (root / "empty.npy").touch()
    return root / "empty.npy"


def npy_of_nothing(root):
    np.save(root / "none.npy", np.zeros(0, np.int32))
    return root / "none.npy"


def npy_of_floats(root):
    np.save(root / "floats.npy", np.zeros(100))
    return root / "floats.npy"


def npy_of_rows(root):
    np.save(root / "rows.npy", np.zeros((10, 10), np.int32))
    return root / "rows.npy"


def npy_of_objects(root):
    np.save(root / "objects.npy", np.array([{}, []], object), allow_pickle=True)
    return root / "objects.npy"


def npz(root):
    np.savez(root / "tokens.npz", ids=np.arange(100))
    return root / "tokens.npz"


def npz_by_another_name(root):
    return npz(root).rename(root / "tokens.npy")


def npy_that_is_text(root):
    (root / "text.npy").write_text("hello " * 50)
    return root / "text.npy"


def npy_cut_short(root):
    np.save(root / "cut.npy", np.arange(1000))
    (root / "cut.npy").write_bytes((root / "cut.npy").read_bytes()[:-100])
    return root / "cut.npy"


def empty_shard(root):
    (root / "empty.bin").touch()
    return root / "empty.bin"


def shard_of_nothing(root):
    return write_shard(root / "none.bin", [])


def half_a_header(root):
    (root / "half.bin").write_bytes(b"\1" * 500)
    return root / "half.bin"


def wrong_magic(root):
    return write_shard(root / "magic.bin", np.arange(100), magic=20240801)


def wrong_version(root):
    return write_shard(root / "version.bin", np.arange(100), version=2)


def truncated_shard(root):
    return write_shard(root / "cut.bin", np.arange(100), count=120)


def shard_with_more(root):
    return write_shard(root / "more.bin", np.arange(100), count=80)


def shard_of_less_than_nothing(root):
    return write_shard(root / "minus.bin", np.arange(100), count=-5)


def empty_folder(root):
    (root / "folder").mkdir()
    return root / "folder"


def folder_of_empty_files(root):
    for number in range(5):
        (root / f"{number}.txt").touch()
    return root


def folder_with_a_bad_shard(root):
    write_shard(root / "1.bin", np.arange(100))
    write_shard(root / "2.bin", np.arange(100), count=101)
    return root


def only_val_shards(root):
    write_shard(root / "val_1.bin", np.arange(100))
    return root


@pytest.mark.parametrize(
    "make, what",
    [
        (missing, "there is no"),
        (empty_text, "is empty"),
        (empty_npy, "is empty"),
        (npy_of_nothing, "is empty"),
        (npy_of_floats, "dtype float64"),
        (npy_of_rows, r"shape \(10, 10\)"),
        (npy_of_objects, r"holds Python objects(.|\n)*numpy\.concatenate"),
        (npz, r"archive of arrays(.|\n)*numpy\.load"),
        (npz_by_another_name, r"archive of arrays(.|\n)*numpy\.load"),
        (npy_that_is_text, "not a whole NumPy array file"),
        (npy_cut_short, "not a whole NumPy array file"),
        (empty_shard, "is empty"),
        (shard_of_nothing, "is empty"),
        (half_a_header, "header alone takes 1024"),
        (wrong_magic, "20240801, not the magic number 20240520"),
        (wrong_version, "version 2"),
        (truncated_shard, "truncated(.|\n)*promises 120 tokens, and it holds 100"),
        (shard_with_more, "longer than its header says"),
        (shard_of_less_than_nothing, "damaged header(.|\n)*promises -5 tokens"),
        (empty_folder, "no files"),
        (folder_of_empty_files, "no text among"),
        (folder_with_a_bad_shard, r"2\.bin is truncated"),
        (only_val_shards, "every shard"),
    ],
)
def test_a_bad_path_is_named_with_what_is_wrong_and_the_fix(tmp_path, make, what):
    path = make(tmp_path)
    with pytest.raises(DataError, match=what) as caught:
        data.load(path)
    assert str(path) in str(caught.value)
    assert caught.value.fix


def test_pipes_are_no_data(tmp_path):
    for name in ("pipe.txt", "pipe.npy", "folder/pipe.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    for path in (tmp_path / "pipe.txt", tmp_path / "pipe.npy", tmp_path / "folder"):
        with pytest.raises(DataError, match="is no regular file"):
            data.load(path)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("n", [2**64, 2**63, 2**62, 2**40])
def test_numpy_files_that_claim_more_elements_than_there_can_be(tmp_path, n):
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({n},), }}".encode().ljust(117) + b"\n"
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + b"ab")
    with pytest.raises(DataError, match="is not a whole NumPy array file"):
        data.load(tmp_path / "x.npy")
    with pytest.raises(DataError, match="load: "):
        jnp.load(tmp_path / "x.npy")


def test_names_of_files_that_are_not_utf8(tmp_path):
    text_folder(tmp_path, 3)
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("of the café\n" * 5)
    train, validation = (side.tobytes().decode() for side in sides(data.load(tmp_path)))
    assert "of the café" in train + validation


def test_the_empty_path_is_not_this_folder():
    with pytest.raises(DataError, match=r"path of the data is empty(.|\n)*--data \."):
        data.load("")


def test_an_unreadable_file(tmp_path, monkeypatch):
    path = tmp_path / "secret.txt"
    path.write_text("hello")

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(path), "read_bytes", refuse)  # the tests may run as root, who may read anything
    with pytest.raises(DataError, match=r"cannot read .*secret\.txt(.|\n)*Permission denied"):
        data.load(path)


def test_no_standard_library_in_source(tmp_path, monkeypatch):
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=r"no standard library(.|\n)*--data PATH"):
        data.load()


def test_too_short_for_one_batch(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 100)
    dataset = data.load(path)
    data.windows(dataset, context=9, vocab=VOCAB, batch=81)
    with pytest.raises(
        DataError, match=r"short\.txt is too short: it has 90 training bytes(.|\n)*at least 91"
    ):
        data.windows(dataset, context=9, vocab=VOCAB, batch=82)
    with pytest.raises(DataError, match="10 validation bytes"):
        data.windows(dataset, context=10, vocab=VOCAB, batch=1)


@pytest.mark.parametrize(
    "bad, fix",
    [(300, "--vocab 50304"), (60_000, "--vocab 60001"), (-1, "ids start from 0"), (2**40, "check that")],
)
def test_a_token_outside_the_vocabulary(tmp_path, bad, fix):
    tokens = np.zeros(100, np.int64)
    tokens[41] = bad
    np.save(tmp_path / "tokens.npy", tokens)
    train, _ = data.windows(data.load(tmp_path / "tokens.npy"), CONTEXT, VOCAB)
    train[0]
    with pytest.raises(DataError, match=f"token {bad} is outside the vocabulary of 256") as caught:
        train[40]
    assert "tokens.npy, token number 41 of its 90" in str(caught.value)
    assert fix in caught.value.fix and ("--vocab" in caught.value.fix) == ("--vocab" in fix)


def test_a_prompt_needs_text():
    with pytest.raises(DataError, match="no tokenizer for the prompt 'def'"):
        data.Dataset("ids", (), (), text=False).encode("def")
