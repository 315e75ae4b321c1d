"""Checkpoints of a run: any mesh reads them, and failures leave the old ones."""

import concurrent.futures
import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import NamedSharding, P, errors, io, optim, random
from blufunc.io import checkpointer, leaves, manifest, reading_back, storage, writing
from blufunc.io.restoring import Source
from blufunc.kernels.backends.cuda.driver import memory, snapshot
from tests.emulation import fake_cuda


def names(folder):
    return sorted(n for n in os.listdir(folder) if n != ".lock")


def committed(folder):
    """Names of the committed checkpoints, in order."""
    return [n for n in names(folder) if n.endswith(".json")]


@pytest.fixture
def devices(monkeypatch):
    monkeypatch.setattr(bf.config, "cpu_devices", 8)


# -- saving ----------------------------------------------------------------------------------------


def test_every_keep_and_force(tmp_path):
    with io.Checkpointer(tmp_path / "run", keep=2, every=10) as saves:
        assert saves.latest() is None and saves.steps() == []
        saved = [saves.save(step, {"x": np.full(3, step)}, force=step == 25) for step in range(26)]
        assert [step for step, s in enumerate(saved) if s] == [0, 10, 20, 25]
        saves.wait()
        assert saves.steps() == [20, 25] and saves.latest() == 25
        assert saves.restore()["x"].tolist() == [25] * 3 and saves.restore(step=20)["x"].tolist() == [20] * 3
    assert names(tmp_path / "run") == [
        "000003-step-20", "000003-step-20.json", "000004-step-25", "000004-step-25.json",
    ]  # fmt: skip


def test_the_latest_is_what_was_saved_last_also_after_going_back(tmp_path):
    with io.Checkpointer(tmp_path, keep=3) as saves:
        for step in (100, 200, 101):
            saves.save(step, {"x": step})
        saves.wait()
        assert saves.steps() == [100, 200, 101] and saves.latest() == 101 and saves.restore() == {"x": 101}
        saves.save(100, {"x": -1})
        assert saves.restore({"x": 0}, step=100) == {"x": -1}  # of two with this step, the later


def test_facts_belong_to_a_step(tmp_path):
    with io.Checkpointer(tmp_path, asynchronous=False) as saves:
        saves.save(1, {}, facts={"losses": [2.5]})
        saves.save(2, {}, facts={"losses": [2.5, 1.5]})
    assert saves.facts() == {"losses": [2.5, 1.5]} and saves.facts(1) == {"losses": [2.5]}
    with pytest.raises(errors.ArgumentError, match="not JSON"):
        saves.save(3, {}, facts=object())


def test_a_save_holds_what_may_change_at_once(tmp_path, monkeypatch):
    """NumPy arrays are copied; donation meanwhile does not touch the state."""
    go = threading.Event()
    write = writing.write
    monkeypatch.setattr("blufunc.io.checkpointer.write", lambda *a, **k: go.wait() and write(*a, **k))
    step = bf.jit(lambda x: x + 1, donate_argnums=0)
    x, host = jnp.arange(5000.0), np.zeros(3)
    with io.Checkpointer(tmp_path) as saves:
        saves.save(1, {"x": x, "host": host})
        host += 1
        moved = step(step(x))
        go.set()
        found = saves.restore()
    assert found["host"].tolist() == [0, 0, 0] and np.array_equal(found["x"], np.arange(5000))
    assert np.array_equal(moved, np.arange(5000) + 2)


def check_snapshots(tmp_path, monkeypatch):
    """Donation copies what is not on the host yet; then the memory is free."""
    go = threading.Event()
    write = writing.write
    monkeypatch.setattr("blufunc.io.checkpointer.write", lambda *a, **k: go.wait(20) and write(*a, **k))
    n = 5_000_000  # several page-locked slots
    cuda = bf.devices("cuda")[0]
    x = bf.device_put(np.arange(n, dtype=np.float32), cuda)
    step = bf.jit(lambda x: x + 1, donate_argnums=0)
    with io.Checkpointer(tmp_path) as saves:
        address = x.buffer.ptr
        saves.save(1, {"x": x})
        moved = step(x)
        assert moved.buffer.ptr == address  # a graph that was captured with it serves again
        held = memory.pool(0).live_bytes()
        go.set()
        saves.wait()
        assert memory.pool(0).live_bytes() == held - 4 * n and not list(snapshot._pending)
        assert np.array_equal(saves.restore()["x"], np.arange(n, dtype=np.float32))
        assert np.array_equal(np.asarray(moved), np.arange(n, dtype=np.float32) + 1)
        restored = saves.restore({"x": moved})["x"]
        assert restored.device == cuda and np.array_equal(
            np.asarray(restored), np.arange(n, dtype=np.float32)
        )
        saves.save(2, {"x": restored})
        snapshot.wait(0)  # as an allocation does that finds no memory
        assert not list(snapshot._pending)


def test_devices_are_snapshot_on_the_emulated_device(tmp_path, monkeypatch):
    fake_cuda.install(monkeypatch)
    check_snapshots(tmp_path, monkeypatch)


def test_a_save_that_fails_holds_no_arrays_until_its_error_is_raised(tmp_path, monkeypatch):
    """A training goes on, and may need the memory."""
    fake_cuda.install(monkeypatch)
    x = bf.device_put(np.ones(1000, np.float32), bf.devices("cuda")[0])

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage._LocalDraft, "__init__", full)
        saves = io.Checkpointer(tmp_path)
        saves.save(1, {"x": x})
        del x
        concurrent.futures.wait([saves._pending], 20)
        assert not snapshot._pending and memory.pool(0).live_bytes() == 0
    with pytest.raises(errors.DataError, match="No space left on device"):
        saves.wait()


def check_move_on_the_way(monkeypatch):
    """A donation while a buffer is being copied: the rest comes from a copy."""
    n = 10_000_000  # several page-locked slots
    values = np.arange(n, dtype=np.float32)
    cuda = bf.devices("cuda")[0]
    state = {"x": bf.device_put(values, cuda), "y": bf.device_put(values[:100], cuda)}
    step = bf.jit(lambda s: {k: v + 1 for k, v in s.items()}, donate_argnums=0)
    reads = cuda.backend.snapshots([v.buffer for v in state.values()])
    enqueue, seen = snapshot.Snapshot._enqueue, []

    def donating(self, to, start, nbytes, stream):
        enqueue(self, to, start, nbytes, stream)
        seen.append(start)
        if len(seen) == 2:
            state.update(step(dict(state)))

    with monkeypatch.context() as patch:
        patch.setattr(snapshot.Snapshot, "_enqueue", donating)
        for read, want in zip(reads, (values, values[:100]), strict=True):
            np.testing.assert_array_equal(read(), want)
    assert len(seen) > 3
    np.testing.assert_array_equal(state["x"], values + 1)
    np.testing.assert_array_equal(state["y"], values[:100] + 1)


def test_an_array_is_donated_on_its_way_to_the_host(monkeypatch):
    fake_cuda.install(monkeypatch)
    check_move_on_the_way(monkeypatch)


@pytest.mark.gpu
def test_an_array_is_donated_on_its_way_from_a_device(monkeypatch):
    check_move_on_the_way(monkeypatch)


@pytest.mark.gpu
def test_devices_are_snapshot_on_a_stream_of_their_own(tmp_path, monkeypatch):
    check_snapshots(tmp_path, monkeypatch)


def test_saves_wait_for_each_other_and_report_errors_later(tmp_path, monkeypatch):
    saves = io.Checkpointer(tmp_path / "run")
    saves.save(1, {"x": np.ones(3)})
    saves.wait()
    before = names(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        saves.save(2, {"x": np.ones(3)})
        with pytest.raises(errors.DataError, match=r"cannot write to .*000002-step-2(.|\n)*No space left"):
            saves.save(3, {"x": np.ones(3)})
    assert names(tmp_path / "run") == before
    saves.save(3, {"x": np.zeros(3)})
    saves.close()
    assert saves.steps() == [1, 3]


def test_a_disk_that_returns_other_bytes_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    with io.Checkpointer(tmp_path, keep=1, asynchronous=False) as saves:
        saves.save(1, {"x": np.ones(300)})
        sync = storage._LocalDraft.sync

        def flipped(draft):
            sync(draft)
            os.pwrite(draft._file, b"\x7f", os.fstat(draft._file).st_size - 3)

        with monkeypatch.context() as patch:
            patch.setattr(storage._LocalDraft, "sync", flipped)
            with pytest.raises(errors.DataError, match=r"was written, and reads differently: x"):
                saves.save(2, {"x": np.ones(300)})
        assert saves.steps() == [1] and np.array_equal(saves.restore()["x"], np.ones(300))


def test_chunks_are_read_back_while_others_are_written(tmp_path, monkeypatch):
    """A change on the disk is found, its leaf named; and an error of reading."""
    monkeypatch.setattr(reading_back, "_WINDOW", 1000)
    tree = {name: np.full(300, i, np.float32) for i, name in enumerate("abcdefgh")}
    settle, settled = storage._LocalDraft.settle, []

    def flipped(draft, start, stop):
        settle(draft, start, stop)
        settled.append((start, stop))
        if len(settled) == 1:
            os.pwrite(draft._file, b"\x7f", start + 5)

    with io.Checkpointer(tmp_path, keep=1, asynchronous=False) as saves:
        saves.save(1, tree)
        with monkeypatch.context() as patch:
            patch.setattr(storage._LocalDraft, "settle", flipped)
            with pytest.raises(errors.DataError, match=r"(?m)was written, and reads differently: [a-h]$"):
                saves.save(2, tree)
        assert len(settled) > 1
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
            with pytest.raises(errors.DataError, match=r"cannot write to .*(.|\n)*Input/output error"):
                saves.save(2, tree)
        assert saves.steps() == [1] and np.array_equal(saves.restore()["h"], tree["h"])
        saves.save(2, tree)
        assert saves.steps() == [2]


def test_remains_of_killed_saves_go_with_the_next_save(tmp_path):
    with io.Checkpointer(tmp_path) as saves:
        saves.save(1, {"x": 1})
    (tmp_path / "000002-step-9").mkdir()
    (tmp_path / "000002-step-9" / ".00000.safetensors.77-0.part").write_bytes(bytes(99))
    (tmp_path / ".000002-step-9.json.77-1.part").touch()
    (tmp_path / "my notes.txt").touch()
    assert saves.steps() == [1]
    with io.Checkpointer(tmp_path) as saves:
        saves.save(2, {"x": 2})
    assert [n for n in names(tmp_path) if not n.endswith(".json")] == [
        "000001-step-1",
        "000003-step-2",
        "my notes.txt",
    ]


def test_one_run_writes_to_a_folder(tmp_path):
    with io.Checkpointer(tmp_path, asynchronous=False) as saves:
        saves.save(1, {})
        script = f"from blufunc import io; io.Checkpointer({str(tmp_path)!r}).save(2, {{}})"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "another process writes checkpoints to" in done.stderr


@pytest.mark.parametrize("options", [{"keep": 0}, {"every": 0}, {"every": -3}])
def test_options_out_of_range(tmp_path, options):
    with pytest.raises(errors.ValueRangeError, match="1 or more"):
        io.Checkpointer(tmp_path, **options)


def test_steps_are_not_negative(tmp_path):
    with pytest.raises(errors.ValueRangeError, match="count from 0"):
        io.Checkpointer(tmp_path).save(-1, {})


# -- what can fail ---------------------------------------------------------------------------------


def test_a_folder_that_vanishes_and_one_that_is_a_file(tmp_path):
    saves = io.Checkpointer(tmp_path / "run", asynchronous=False)
    saves.save(1, {"x": 1})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(errors.DataError, match="there is no checkpoint in"):
        saves.restore()
    saves.save(2, {"x": 2})  # it is made again
    assert saves.restore() == {"x": 2}
    saves.close()
    (tmp_path / "file").touch()
    for do in (lambda s: s.save(1, {}), lambda s: s.steps(), lambda s: s.restore()):
        with pytest.raises(errors.DataError, match=r"(cannot (write to|read)|no checkpoint).*file"):
            do(io.Checkpointer(tmp_path / "file", asynchronous=False))


def test_full_and_read_only_disks_leave_the_old_checkpoint():
    """In another process, not as root, whom permissions do not stop."""
    script = """
        import os, resource, sys, numpy as np
        from blufunc import errors, io
        folder = sys.argv[1]
        saves = io.Checkpointer(folder, keep=1, asynchronous=False)
        saves.save(1, {"x": np.zeros(10)})
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        large = {"x": np.zeros(100_000)}
        for write in (lambda: saves.save(2, large), lambda: io.save(folder + "/w", large)):
            try:
                write()
            except errors.DataError as error:
                print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        print(saves.steps(), sorted(os.listdir(folder)))
        os.chmod(folder, 0o555)
        if os.getuid() == 0:
            os.seteuid(65534)
        try:
            saves.save(3, {"x": np.zeros(10)})
        except errors.DataError as error:
            print(error)
        if os.getuid() == 0:
            os.seteuid(0)
        print(saves.steps(), io.Checkpointer(folder).restore()["x"].shape)
    """
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)  # pytest's folders are closed to other users
        command = [sys.executable, "-c", textwrap.dedent(script), f"{name}/run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot write to") == 3 and done.stdout.count("free some of the disk") == 2
    assert "[1] ['.lock', '000001-step-1', '000001-step-1.json']" in done.stdout
    assert "a folder that you may write to" in done.stdout and done.stdout.endswith("[1] (10,)\n")


def test_damaged_checkpoints_name_what_is_damaged(tmp_path):
    with io.Checkpointer(tmp_path, asynchronous=False) as saves:
        saves.save(1, {"x": np.ones(9), "y": np.ones(9)})
        saves.save(2, {"x": np.ones(9), "y": np.ones(9)})
    file = tmp_path / "000002-step-2" / "00000.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + b"\0")
    with pytest.raises(errors.DataError, match=r"y is damaged in .*step-2"):
        saves.restore()
    with pytest.raises(errors.DataError, match=r"step-2\.json is damaged(.|\n)*y in "):
        io.verify(tmp_path)
    file.write_bytes((tmp_path / "000001-step-1" / "00000.safetensors").read_bytes())
    assert saves.restore()["x"].shape == (9,)  # the same state has the same digests
    io.save(file, {"x": np.zeros(9), "y": np.ones(9)})
    with pytest.raises(errors.DataError, match="is not the file that was saved"):
        saves.restore()
    file.unlink()
    with pytest.raises(errors.DataError, match=r"there is no .*step-2/00000\.safetensors"):
        saves.restore()
    assert saves.restore({"x": np.zeros(9), "y": np.zeros(9)}, step=1)["y"].tolist() == [1] * 9
    text = (tmp_path / "000001-step-1.json").read_bytes()
    for bad in (text[:-1], text.replace(b'"step":1', b'"step":2'), b"", b"{}", b"[" * 99_999):
        (tmp_path / "000001-step-1.json").write_bytes(bad)
        with pytest.raises(errors.DataError, match=r"step-1\.json is damaged, or of another version"):
            saves.restore(step=1)
        with pytest.raises(errors.DataError):
            io.verify(tmp_path)


def test_a_step_that_is_not_there(tmp_path):
    with pytest.raises(errors.DataError, match="there is no checkpoint in"):
        io.Checkpointer(tmp_path / "nothing").restore()
    with io.Checkpointer(tmp_path, asynchronous=False) as saves:
        saves.save(3, {})
        with pytest.raises(errors.DataError, match=r"of step 4(.|\n)*step= one of 3"):
            saves.facts(4)


# -- sharded ---------------------------------------------------------------------------------------


def put(x, mesh, *spec):
    return bf.device_put(x, NamedSharding(mesh, P(*spec)))


def test_any_mesh_and_layout_restores_any_other(tmp_path, devices, rng):
    meshes = [bf.make_mesh((4, 2), ("a", "b")), bf.make_mesh((8,), ("a",)), bf.make_mesh((1, 2), ("a", "b"))]
    x, y, key = rng.normal(size=(7, 6)).astype(np.float32), rng.normal(size=8), random.split(random.key(1), 5)
    specs = [("a",), (None, "a"), (), ("a", "b"), (("a", "b"),)]
    layouts = [(m, s) for m in meshes for s in specs if "b" in m.axis_names or "b" not in str(s)]
    with io.Checkpointer(tmp_path, keep=1) as saves:
        for i, (mesh, spec) in enumerate(layouts):
            tree = {
                "x": put(x, mesh, *spec),
                "y": put(y.astype(np.float32), mesh, *spec[:1]),
                "k": put(key, mesh, "a"),
            }
            saves.save(i, tree)
            like_mesh, like_spec = layouts[(i * 5 + 3) % len(layouts)]
            place = NamedSharding(like_mesh, P(*like_spec))
            like = {
                "x": bf.ShapeDtypeStruct(x.shape, "float32", sharding=place),
                "y": np.zeros(8, np.float32),
                "k": key,
            }
            found = saves.restore(like)
            assert found["x"].sharding == place and np.array_equal(found["x"], x), (spec, like_spec)
            assert np.array_equal(found["y"], y.astype(np.float32))
            assert np.array_equal(random.key_data(found["k"]), random.key_data(key))
            same = saves.restore(tree)["x"]
            assert same.sharding == tree["x"].sharding and np.array_equal(same, x)


def test_every_element_is_written_once(tmp_path, devices, rng):
    mesh = bf.make_mesh((4, 2), ("a", "b"))
    tree = {"r": put(np.ones((8, 8), np.float32), mesh), "s": put(np.ones((8, 8), np.float32), mesh, "b")}
    with io.Checkpointer(tmp_path, asynchronous=False) as saves:
        saves.save(1, tree)
    _, (file,) = manifest.opened(storage.Local(str(tmp_path)), manifest.Entry(1, 1))
    assert {(a.key, a.shape) for a in file.header.arrays} == {
        ("r", (8, 8)), ("s[0:4,0:8]", (4, 8)), ("s[4:8,0:8]", (4, 8)),
    }  # fmt: skip


def test_replicas_share_the_work_of_writing(devices):
    """Owners of replicated arrays in four processes."""
    mesh = bf.make_mesh((4,), ("data",))
    members = type("", (), {"process_index": property(lambda self: self.index)})
    load = [0] * 8
    sharding = NamedSharding(mesh, P())
    devices = [members() for _ in range(4)]
    for i, d in enumerate(devices):
        d.index = i
    fake_mesh = type("", (), {"device_list": devices})()
    fake = type("", (), {"indices": sharding.indices, "concrete_mesh": fake_mesh})()
    for n in (100, 90, 40, 30, 30, 10, 50, 50):
        assert len(leaves.owners_of(fake, (n,), 4, load)) == 1
    assert sum(load) == 1600 and max(load[:4]) <= 1.3 * 400


def test_a_restore_reads_only_what_it_needs(tmp_path, devices, monkeypatch):
    monkeypatch.setattr("blufunc.io.seal.CHUNK", 1024)
    mesh = bf.make_mesh((8,), ("a",))
    x = np.arange(64 * 256, dtype=np.float32).reshape(64, 256)
    with io.Checkpointer(tmp_path, asynchronous=False) as saves:
        saves.save(1, {"x": put(x, mesh, "a"), "y": put(x, mesh)})
    _, files = manifest.opened(storage.Local(str(tmp_path)), manifest.Entry(1, 1))
    source = Source(files, "")
    part = source.arrays["x"].read((slice(9, 12), slice(0, 256)))
    assert np.array_equal(part, x[9:12]) and sum(f.bytes_read for f in files) == 3 * 1024
    source.arrays["y"].read((slice(9, 12), slice(0, 10)))
    assert sum(f.bytes_read for f in files) == 6 * 1024


def test_parts_that_are_missing(tmp_path, devices):
    mesh = bf.make_mesh((2,), ("a",))
    half = leaves.leaves_of({"x": put(np.ones(8, np.float32), mesh, "a")}, together=True)
    writing.write(storage.Local(str(tmp_path)), "x", leaves.Leaves(half.blocks[:1], {}))
    with pytest.raises(errors.DataError, match=r"x is incomplete(.|\n)*4 of its 8 elements"):
        io.load(tmp_path / "x")


def test_a_resumed_run_is_the_same_run_to_the_bit_and_equal_on_another_mesh(tmp_path, devices):
    optimizer = optim.adamw(1e-2)

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)

    @bf.jit
    def step(state):
        key, subkey = random.split(state["key"])
        x = random.normal(subkey, (16, 8))
        grads = bf.grad(loss)(state["params"], x)
        updates, opt = optimizer.update(grads, state["optimizer"], state["params"])
        return {"params": optim.apply_updates(state["params"], updates), "optimizer": opt, "key": key}

    def fresh(mesh):
        params = {"w": random.normal(random.key(1), (8, 16)), "v": random.normal(random.key(2), (16, 4))}
        params = {"w": put(params["w"], mesh, None, "a"), "v": put(params["v"], mesh, "a")}
        state = {"params": params, "optimizer": optimizer.init(params), "key": put(random.key(0), mesh)}
        return state

    def run(state, n):
        for _ in range(n):
            state = step(state)
        return state

    eight, two = bf.make_mesh((8,), ("a",)), bf.make_mesh((2,), ("a",))
    with io.Checkpointer(tmp_path) as saves:
        state = run(fresh(eight), 3)
        saves.save(3, state | {"position": 3})
        whole = run(state, 3)
        like = fresh(eight)
        like = {**state, "position": 0}
        resumed = saves.restore(like)
        assert resumed.pop("position") == 3
        continued = run(resumed, 3)
        bits = lambda s: [
            np.asarray(random.key_data(x) if x.dtype == whole["key"].dtype else x).tobytes()
            for x in bf.tree.leaves(s)
        ]
        assert bits(continued) == bits(whole)
        small = fresh(two)
        other = run(saves.restore(small | {"position": 0}) | {}, 0)
        other.pop("position")
        for a, b in zip(bf.tree.leaves(run(other, 3)["params"]), bf.tree.leaves(whole["params"])):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


# -- the command line, and object stores -------------------------------------------------------------


def test_the_command_line(tmp_path, capsys):
    from blufunc.io.__main__ import main

    with io.Checkpointer(tmp_path / "run", asynchronous=False) as saves:
        saves.save(7, {"w": jnp.ones((2, 3), "bfloat16"), "key": random.key(0), "step": 7})
    io.save(tmp_path / "one", {"w": np.ones(3)})
    for path in (tmp_path / "run", tmp_path / "run" / "000001-step-7.json", tmp_path / "one"):
        assert main(["verify", str(path)]) == 0 and "every digest is right" in capsys.readouterr().out
        assert main(["inspect", str(path)]) == 0
    main(["inspect", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "w  bf16[2, 3]" in said and "key  key<fry>[]" in said and "step  int 0x7" in said
    for path in ("nothing", "run/000001-step-8.json", "."):
        assert main(["verify", str(tmp_path / path)]) == 1 and "error:" in capsys.readouterr().err
    with (tmp_path / "one").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")
    assert main(["verify", str(tmp_path / "one")]) == 1 and "w in " in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "one")]) == 0


def test_object_stores(tmp_path):
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path}/run"
    tree = {"x": np.arange(3_000_000, dtype=np.float32), "y": jnp.ones(3), "n": 4}
    with io.Checkpointer(url, keep=1) as saves:
        for step in (1, 2):
            saves.save(step, tree, facts=step)
        assert saves.restore({"x": tree["x"], "y": tree["y"], "n": 0})["x"].tobytes() == tree["x"].tobytes()
        assert saves.steps() == [2] and saves.facts() == 2
    io.verify(url)
    io.save(f"{url}/w", tree)
    assert io.load(f"{url}/w")["n"] == 4 and io.facts(f"{url}/w") is None
    with pytest.raises(errors.DataError, match="there is no"):
        io.load(f"{url}/nothing")


def test_errors_of_object_stores_are_explained(tmp_path, monkeypatch):
    """Each has classes of its own, which are not those of a disk."""
    memory = pytest.importorskip("fsspec.implementations.memory")
    url = f"memory://{tmp_path}/w"
    io.save(url, {"x": np.ones(3)})

    def fail(*args, **options):
        raise LookupError("no credentials")

    monkeypatch.setattr(memory.MemoryFileSystem, "size", fail)
    with pytest.raises(errors.DataError, match="LookupError: no credentials"):
        io.load(url)
    monkeypatch.setattr(memory.MemoryFileSystem, "open", fail)
    with pytest.raises(errors.DataError, match=r"(?s)cannot write to .*LookupError: no credentials"):
        io.save(url, {"x": np.ones(3)})
    monkeypatch.setattr(memory.MemoryFileSystem, "makedirs", fail)
    with io.Checkpointer(url) as saves, pytest.raises(errors.DataError, match="no credentials"):
        saves.save(1, {"x": 1})


def test_object_stores_need_a_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(errors.UnsupportedError, match=r"fsspec is not installed"):
        io.Checkpointer("s3://bucket/run")


def test_manifests_are_json(tmp_path):
    with io.Checkpointer(tmp_path, asynchronous=False) as saves:
        saves.save(1, {"x": 1}, facts=[1])
    found = json.loads((tmp_path / "000001-step-1.json").read_text())
    (file,) = found["files"]
    assert found["step"] == 1 and found["facts"] == [1] and file["name"] == "00000.safetensors"
    assert file["size"] == (tmp_path / "000001-step-1" / file["name"]).stat().st_size


def test_a_program_that_ends_waits_for_its_last_save(tmp_path):
    program = f"""
import numpy as np
from blufunc import io
io.Checkpointer({str(tmp_path / "run")!r}).save(1, {{"w": np.ones(1 << 20)}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert io.Checkpointer(tmp_path / "run").steps() == [1]


def test_facts_are_those_of_the_call(tmp_path):
    facts = {"cursor": 0, "log": []}
    with io.Checkpointer(tmp_path) as saves:
        saves.save(1, {"w": np.ones(1 << 18)}, facts=facts)
        facts["cursor"] = 9
        facts["log"].append("later")
    assert saves.facts() == {"cursor": 0, "log": []}


def test_keys_of_facts_are_strings(tmp_path):
    with (
        io.Checkpointer(tmp_path) as saves,
        pytest.raises(errors.ArgumentError, match="the key 1 is no string"),
    ):
        saves.save(1, {"w": np.ones(2)}, facts={"a": [{1: 2}]})


def test_one_checkpointer_of_a_process_writes_to_a_folder(tmp_path):
    with io.Checkpointer(tmp_path, keep=None) as first:
        first.save(1, {"w": np.ones(2)})
        with pytest.raises(errors.DataError, match="another Checkpointer of this process"):
            io.Checkpointer(tmp_path).save(2, {"w": np.ones(2)})
        first.save(3, {"w": np.ones(2)})
    with io.Checkpointer(tmp_path, keep=None) as second:
        second.save(4, {"w": np.ones(2)})
    assert second.steps() == [1, 3, 4]


def test_files_of_others_stay(tmp_path):
    for name in (".movie.part", ".weights.safetensors.1-1.part", ".000001-step-1.json.7-7.part"):
        (tmp_path / name).write_bytes(b"x")
    with io.Checkpointer(tmp_path) as saves:
        saves.save(1, {"w": np.ones(2)})
    assert {p.name for p in tmp_path.glob(".*.part")} == {".movie.part", ".weights.safetensors.1-1.part"}


def test_what_a_run_goes_on_from_stays_until_enough_are_newer(tmp_path):
    with io.Checkpointer(tmp_path, keep=2) as saves:
        for step in (1, 2, 3):
            saves.save(step, {"w": np.ones(step)})
        saves.restore(step=2)
        saves.save(4, {"w": np.ones(2)})
        saves.wait()
        assert saves.steps() == [2, 3, 4]
        saves.save(5, {"w": np.ones(2)})
        saves.wait()
        assert saves.steps() == [4, 5]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_and_writes(tmp_path):
    io.save(tmp_path / "parent.st", {"w": np.ones(1 << 20)})
    child = os.fork()
    if not child:
        signal.alarm(20)
        io.load(tmp_path / "parent.st")
        io.save(tmp_path / "child.st", {"w": np.ones(3)})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and (tmp_path / "child.st").exists()


@pytest.mark.slow
def test_a_checkpointer_that_is_dropped_says_that_its_save_failed(tmp_path, monkeypatch, capfd):
    def fail(*args, **options):
        raise errors.DataError("the disk is full")

    monkeypatch.setattr(checkpointer, "write", fail)
    caught = io.Checkpointer(tmp_path / "caught")
    caught.save(1, {"x": 1})
    with pytest.raises(errors.DataError, match="the disk is full"):
        caught.close()
    assert not checkpointer._unraised
    dropped = io.Checkpointer(tmp_path / "dropped")
    dropped.save(1, {"x": 1})
    del caught, dropped
    err, end = "", time.monotonic() + 5
    while "the disk is full" not in err:
        assert time.monotonic() < end
        gc.collect()
        time.sleep(0.01)
        err += capfd.readouterr().err
    assert err.count("the disk is full") == 1 and not checkpointer._unraised
