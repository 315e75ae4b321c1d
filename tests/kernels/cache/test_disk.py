"""The disk cache: hits, distrust, and folders that cannot be written."""

import os
import subprocess
import sys
import threading
import time

import pytest

from blufunc.config import config
from blufunc.kernels.cache.disk import DiskCache, default_folder, key_of


def test_round_trip_keeps_the_source_beside(tmp_path):
    cache = DiskCache(tmp_path / "new" / "folder")
    key = key_of("source", "sm_90a")
    assert cache.get(key) is None and cache.path_of(key) is None
    path = cache.put(key, b"\x7fELF\x00binary", "int x;\n", ".so")
    assert cache.get(key) == b"\x7fELF\x00binary"
    assert path == cache.path_of(key) and path.suffix == ".so" and path.read_bytes() == cache.get(key)
    assert (tmp_path / "new" / "folder" / f"{key}.txt").read_text().endswith("int x;\n")
    assert oct((tmp_path / "new" / "folder").stat().st_mode)[-3:] == "700"


def test_put_again_replaces(tmp_path):
    cache = DiskCache(tmp_path)
    cache.put("any text is a key", b"old", "", ".json")
    cache.put("any text is a key", b"new", "", ".json")
    assert DiskCache(tmp_path).get("any text is a key") == b"new"


def test_empty_binary(tmp_path):
    cache = DiskCache(tmp_path)
    cache.put("k", b"")
    assert cache.get("k") == b""


def test_keys_tell_their_parts_apart():
    keys = [key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("abc", ""), key_of()]
    assert len(set(keys)) == len(keys)
    assert key_of("ab", "c") == keys[0]


def _truncate(record, binary):
    binary.write_bytes(binary.read_bytes()[:-1])


def _flip(record, binary):
    binary.write_bytes(b"X" + binary.read_bytes()[1:])


def _lose(record, binary):
    binary.unlink()


def _empty_record(record, binary):
    record.write_bytes(b"")


def _other_record(record, binary):
    record.write_bytes(b"blufunc-cache 1 " + b"0" * 64 + b" ../../etc/passwd\n")


@pytest.mark.parametrize("harm", [_truncate, _flip, _lose, _empty_record, _other_record])
def test_a_damaged_entry_is_a_miss_and_is_mended(tmp_path, harm):
    cache = DiskCache(tmp_path)
    path = cache.put("k", b"the binary", "the source", ".so")
    record = next(tmp_path.glob("*.txt"))
    harm(record, path)
    assert cache.get("k") is None
    assert not record.exists(), "what is damaged is removed"
    cache.put("k", b"the binary", "the source", ".so")
    assert cache.get("k") == b"the binary"


@pytest.mark.parametrize("of", ["file", "none"])
def test_where_nothing_can_be_kept(tmp_path, of, monkeypatch, capsys):
    monkeypatch.setattr(config, "debug", "cache")
    (tmp_path / "file").write_text("in the way")
    cache = DiskCache(tmp_path / "file" / "folder")
    if of == "none":
        cache.folder = None
    assert cache.put("k", b"x") is None and cache.put("k", b"x") is None and cache.get("k") is None
    assert capsys.readouterr().err.count("cannot be written") == 1, "said once"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_is_read(tmp_path):
    DiskCache(tmp_path).put("k", b"x")
    tmp_path.chmod(0o500)
    try:
        cache = DiskCache(tmp_path)
        assert cache.get("k") == b"x" and cache.put("other", b"y") is None
    finally:
        tmp_path.chmod(0o700)


def test_pruning_takes_the_oldest_and_no_file_of_others(tmp_path):
    cache = DiskCache(tmp_path, limit_bytes=10_000)
    (tmp_path / "thesis.txt").write_bytes(b"t" * 50_000)
    stale = tmp_path / "blufunc-abc.tmp"
    stale.write_bytes(b"half")
    os.utime(stale, (0, 0))
    for i in range(9):
        cache.put(str(i), bytes([i]) * 1000)
        past = time.time() - 1000 + i
        os.utime(next(tmp_path.glob(f"{key_of(str(i))}.txt")), (past, past))
        os.utime(cache.path_of(str(i)), (past, past))
    cache.put("9", b"9" * 1000)
    kept = [i for i in range(10) if cache.get(str(i)) is not None]
    assert kept == list(range(kept[0], 10)) and 4 <= len(kept) <= 8
    assert (tmp_path / "thesis.txt").exists() and not stale.exists()


def test_use_counts_against_pruning(tmp_path):
    cache = DiskCache(tmp_path)
    cache.put("k", b"x")
    record = next(tmp_path.glob("*.txt"))
    os.utime(record, (0, 0))
    cache.get("k")
    assert time.time() - record.stat().st_mtime < 60


def test_threads_share_a_folder(tmp_path):
    wrong = []

    def work(n):
        cache = DiskCache(tmp_path)
        for i in range(30):
            key = str(i % 5)
            cache.put(key, key.encode() * 100 + bytes([n % 2]), "", ".so")  # two versions compete for a key
            got = cache.get(key)
            if got is not None and got[:-1] != key.encode() * 100:
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert all(DiskCache(tmp_path).get(str(i)) is not None for i in range(5))


def test_another_process_finds_it(tmp_path):
    DiskCache(tmp_path).put("k", b"made once")
    code = "from blufunc.kernels.cache.disk import DiskCache; print(DiskCache().get('k'))"
    env = {**os.environ, "BLUFUNC_CACHE_DIR": str(tmp_path)}
    assert (
        b"made once"
        in subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout
    )


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("BLUFUNC_CACHE_DIR", str(tmp_path / "a"))
    assert default_folder() == tmp_path / "a"
    monkeypatch.delenv("BLUFUNC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert default_folder() == tmp_path / "b" / "blufunc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "blufunc"


# -- trust -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_neither_read_nor_written(tmp_path, mode):
    cache = DiskCache(tmp_path)
    path = cache.put("k", b"code", "", ".so")
    tmp_path.chmod(mode)
    assert cache.get("k") is None and cache.path_of("k") is None
    with pytest.warns(RuntimeWarning, match="what blufunc compiles is not kept: others may write to"):
        assert cache.put("k", b"new") is None and "others may write to" in cache.refused
    tmp_path.chmod(0o700)
    assert cache.path_of("k") == path and cache.get("k") == b"code"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_files_and_folders_of_other_users_are_not_read(tmp_path):
    cache = DiskCache(tmp_path)
    for _ in range(2):
        path = cache.put("k", b"code", "", ".so")
        os.chown(path, 65534, -1)
        assert cache.get("k") is None
    cache.put("k", b"code")
    os.chown(tmp_path, 65534, -1)
    assert cache.get("k") is None and "belongs to another user" in cache.distrusted()


def test_records_of_another_version_are_removed(tmp_path):
    cache = DiskCache(tmp_path)
    cache.put("k", b"code")
    (record,) = tmp_path.glob("*.txt")
    record.write_bytes(record.read_bytes().replace(b"blufunc-cache 1", b"blufunc-cache 2"))
    assert cache.get("k") is None and not record.exists()


def test_keys_and_sources_with_paths_that_are_not_utf8(tmp_path):
    cache = DiskCache(tmp_path)
    key = key_of("// at caf\udce9.py:3")
    assert key != key_of("// at caf.py:3")
    assert cache.put(key, b"code", "// at caf\udce9.py:3") and cache.get(key) == b"code"
