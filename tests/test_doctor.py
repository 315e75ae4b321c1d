"""The doctor: a line for each thing, honest about what is broken."""

import json
import os
import subprocess
import sys

import pytest

import blufunc as bf
from blufunc import doctor
from blufunc.kernels.backends.cpu import toolchain


def by_name(found):
    return {line.what: line for line in found}


@pytest.mark.slow
def test_this_machine():
    found = by_name(doctor.examine(rates=False))
    assert {"blufunc", "Python", "numpy", "threads", "BLAS", "NVRTC", "CUDA", "MPI", "cache"} <= set(found)
    assert found["Python"].found.startswith(".".join(map(str, sys.version_info[:3])))
    for line in found.values():
        assert line.status in (doctor.OK, doctor.NOTE, doctor.FAULT)
        assert line.found and "\n" not in line.found and "\0" not in line.found
        assert not (line.status == doctor.OK and line.fix)


@pytest.mark.slow
def test_rates_are_measured():
    (line,) = [line for line in doctor.examine() if line.what == "rates of cpu:0"]
    assert "B/s" in line.found and "FLOP/s" in line.found


def test_what_is_missing_has_a_fix(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "find", lambda: None)
    monkeypatch.setattr(doctor, "_processes", lambda: iter(()))
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "scipy" else "1.0")
    tmp_path.chmod(0o777)
    monkeypatch.setenv("BLUFUNC_CACHE_DIR", str(tmp_path))
    found = by_name(doctor.examine(rates=False))
    for what, status in {"scipy": "fault", "CuPy": "fault", "cache": "fault"}.items():
        assert found[what].status == status and found[what].fix
    assert "others may write" in found["cache"].found


@pytest.mark.parametrize("folder", ["/dev/null/cache", "a file"])
def test_a_cache_that_cannot_be_written(folder, monkeypatch, tmp_path):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("BLUFUNC_CACHE_DIR", str(tmp_path / folder))
    (line,) = doctor._disk()
    assert line.status == "fault" and "cannot be written" in line.found and line.fix


def test_a_compiler_that_does_not_work_is_a_fault(monkeypatch):
    monkeypatch.setattr(toolchain, "find", lambda: None)
    monkeypatch.setenv("CXX", "/bin/false")
    (line,) = doctor._compiler()
    assert line.status == "fault" and "/bin/false" in line.found and "unset CXX" in line.fix


@pytest.mark.slow
def test_a_failing_examination_is_a_line_among_others(monkeypatch):
    def _blas():
        raise OSError("cannot open shared object")
        yield

    monkeypatch.setattr(doctor, "_blas", _blas)
    monkeypatch.setattr(doctor, "_processes", lambda: iter(()))
    found = by_name(doctor.examine(rates=False))
    assert found["blas"] == doctor.Line("blas", "fault", "OSError: cannot open shared object")
    assert "cache" in found


def test_the_command(monkeypatch, capsys):
    lines = [doctor.Line("a", "ok", "1"), doctor.Line("b", "note", "absent", "install it")]
    monkeypatch.setattr(doctor, "examine", lambda rates: lines)
    assert doctor.main([]) == 0
    assert capsys.readouterr().out == "ok    a  1\nnote  b  absent\n         fix: install it\n"
    assert doctor.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["fix"] == "install it"
    lines.append(doctor.Line("c", "fault", "broken"))
    assert doctor.main(["--no-rates"]) == 1


@pytest.mark.slow
def test_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "blufunc.doctor", "--json", "--no-rates"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert not done.stderr and any(line["what"] == "Python" for line in json.loads(done.stdout))


def test_environment_info(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda rates: [doctor.Line("numpy", "ok", "2.4")])
    assert bf.print_environment_info(return_string=True) == "numpy: 2.4"
    assert bf.print_environment_info() is None and capsys.readouterr().out == "numpy: 2.4\n"
