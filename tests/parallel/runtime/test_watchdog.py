"""The recorder of collectives, and what the watchdog ends a process for."""

import socket
import threading
import time

import pytest

from blufunc.parallel.runtime import watchdog
from blufunc.parallel.runtime.store import Store
from blufunc.parallel.runtime.store_server import StoreServer
from blufunc.parallel.runtime.watchdog import ABORTED, Recorder, Watchdog, last_record


@pytest.fixture
def ended():
    """``exit`` for a watchdog: waits to be called, and keeps the code."""

    class Exit:
        def __init__(self):
            self.happened, self.code = threading.Event(), None

        def __call__(self, code):
            self.code = code
            self.happened.set()

    return Exit()


def test_records_name_operation_axes_bytes_and_line():
    recorder = Recorder()
    assert recorder.summary() == "before its first collective"
    with recorder.during("all_reduce", ("x", "y"), 4096, (0, 1)) as record:
        assert recorder.pending() is record
        assert recorder.summary().startswith("in #1 all_reduce over x, y, 4,096 bytes, at test_watchdog.py:")
        assert "test_records_name_operation" in recorder.summary()
    assert recorder.pending() is None
    assert recorder.summary().startswith("after #1 all_reduce")


def test_nobody_waits_in_a_collective_that_raised(tmp_path):
    recorder = Recorder(str(tmp_path / "0"))
    with pytest.raises(ValueError, match="no"), recorder.during("all_reduce", ("x",), 4):
        raise ValueError("no")
    assert recorder.pending() is None
    assert last_record(str(tmp_path / "0"))[1].startswith("in #1 all_reduce")


def test_only_the_last_are_kept():
    recorder = Recorder(keep=3)
    for _ in range(10):
        with recorder.during("permute", ("x",), 4):
            pass
    assert [r.sequence for r in recorder.records] == [8, 9, 10]


def test_collectives_on_a_stream_are_over_when_their_event_says_so():
    recorder, passed = Recorder(), [False, False]
    for i in range(2):
        recorder.end(recorder.begin("all_gather", ("x",), 8), lambda i=i: passed[i])
    assert recorder.pending().sequence == 1
    passed[0] = True
    assert recorder.pending().sequence == 2
    assert recorder.table().count("<- not over") == 1
    passed[1] = True
    assert recorder.pending() is None


def test_the_file_outlives_the_recorder(tmp_path):
    path = str(tmp_path / "0")
    assert last_record(path) == (0, "before its first collective")
    recorder = Recorder(path)
    assert last_record(path) == (0, "before its first collective")
    with recorder.during("all_reduce", ("x",), 4):
        pass
    recorder.begin("all_gather", ("a" * 600,), 4)
    number, text = last_record(path)
    assert number == 2 and text.startswith("in #2 all_gather over aaa")


def test_a_collective_that_takes_too_long_ends_the_process(ended, capfd):
    recorder = Recorder()
    recorder.begin("all_reduce", ("data",), 12, (0, 1))
    Watchdog(0, None, recorder, deadline=0.1, exit=ended)
    assert ended.happened.wait(5) and ended.code == ABORTED
    err = capfd.readouterr().err
    assert "blufunc: rank 0 ends, as rank 0 has waited" in err
    assert "#1 all_reduce over data, 12 bytes, at test_watchdog.py:" in err
    assert "<- not over" in err


def test_nothing_ends_while_collectives_pass(ended):
    recorder = Recorder()
    dog = Watchdog(0, None, recorder, deadline=0.2, exit=ended)
    for _ in range(10):
        with recorder.during("all_reduce", ("x",), 4):
            time.sleep(0.05)
    dog.close()
    assert not ended.happened.is_set()


def test_errors_of_the_library_end_the_process_after_its_abort(ended, capfd):
    dog = Watchdog(3, None, Recorder(), deadline=60, exit=ended)
    order = []
    dog.aborts.append(lambda: order.append("aborted"))
    dog.checks.append(lambda: "NCCL over x reports unhandled system error")
    assert ended.happened.wait(5) and order == ["aborted"]
    assert "rank 3: NCCL over x reports unhandled system error" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["dies", "ends", "server"])
def test_the_end_of_another_rank_ends_this_one(how, ended, capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "PATIENCE", 0.1)
    server = StoreServer("token")
    mine, other = (Store("127.0.0.1", server.port, "token", deadline=5) for _ in range(2))
    for r, joining in enumerate((mine, other)):
        joining.join(r, f"process {r}")
    recorder = Recorder()
    recorder.begin("all_reduce", ("x",), 4, (0, 1))
    Watchdog(0, mine, recorder, deadline=60, exit=ended)
    if how == "dies":
        other._connection.shutdown(socket.SHUT_RDWR)
        why = "rank 1 (process 1) has died"
    elif how == "ends":
        other.close()
        why = "for rank 1, whose program has ended"
    else:
        server.fail("rank 1 was killed by SIGKILL")
        why = "rank 1 was killed by SIGKILL"
    try:
        assert ended.happened.wait(5) and ended.code == ABORTED
        assert why in capfd.readouterr().err
        latest = time.monotonic() + 5  # the server hears of it a moment later
        while server.failure is None and time.monotonic() < latest:
            time.sleep(0.01)
        assert why in server.failure
    finally:
        for connection in (mine, other):
            connection.close()
        server.close()
