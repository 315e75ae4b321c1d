"""Run samples of the libraries' tests on blufunc; write ``docs/ecosystem.md``.

``python -m tests.ecosystem.table FOLDER [LIBRARY ...] [--every N] [--timeout SECONDS] [--peer PYTHON]
[--suite LIBRARY=ROOT]``, where FOLDER has the unpacked source distributions (``pip download --no-binary :all: --no-deps
optax==0.2.8``). With a Python that has JAX, tests that fail are run there, and those that fail on JAX, too, are not
counted. Results of libraries that are not named are kept from ``results.json``. ROOT is that of a checkout, for the
libraries of ``IN_REPOSITORIES``, which run only if it is given.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import xml.etree.ElementTree as ET

HERE = pathlib.Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parent.parent / "docs" / "ecosystem.md"

SUITES = {  # folder, the paths in it with tests, and the step of samples of a few hundred
    "chex": ("chex-0.1.92", ["chex"], 1),
    "distrax": ("distrax-0.1.9", ["distrax"], 29),
    "dm-haiku": ("dm_haiku-0.0.17", ["haiku/_src"], 8),
    "einops": ("einops-0.8.2", ["einops/tests"], 1),
    "flax linen": ("flax-0.12.8", ["tests/linen", "tests/core"], 2),
    "flax nnx": ("flax-0.12.8", ["tests/nnx"], 3),
    "numpyro": ("numpyro-0.22.0", ["test"], 47),
    "optax": ("optax-0.2.8", ["optax"], 6),
}
IN_REPOSITORIES = {  # likewise, of libraries whose tests are in their repositories, and not in their distributions
    "equinox": ("equinox-0.13.8", ["tests"], 1),
}
NOT_COUNTED = {  # patterns of messages of tests that ask for more than JAX's functions
    r"tensorflow|jax2tf": "TensorFlow",
    r"No module named '(sklearn|dill|bsuite|funsor)'|install `funsor`": "a package that is not installed",
    r"Missing checkpoint file|No such file or directory: '.*testdata": "a file that the distribution lacks",
    r"compiler_ir\(": "XLA's HLO text",
    r"threefry_partitionable is always True": "JAX's former generator",
    r"CalledProcessError": "a program in a process of its own",
    r"No \d+ CPUs available|takes \d+ devices, and 1": "several devices",
}
WITHOUT = {  # libraries whose source distributions have no tests: the program of ``programs`` stands for them
    "diffrax": "0.7.2",
    "jaxtyping": "0.3.11",
    "lineax": "0.1.1",
    "optimistix": "0.1.0",
}

HEAD = """# Libraries on blufunc

Libraries that are written for JAX run on blufunc unmodified, under the name `jax` (see
[design/023](design/023-as-jax.md)):

```sh
python -m blufunc.as_jax train.py
```

or, ahead of the first import of JAX or of such a library:

```py
import blufunc.as_jax

blufunc.as_jax.install()
```

`jax.config.update("jax_enable_x64", True)` works under this name, and gives 64 bits to numbers and arrays without a
dtype. Intended differences from JAX are those of [jax.md](jax.md).

SciPy takes the arrays, too, where it follows the array API standard: set `SCIPY_ARRAY_API=1`. Without the name `jax`,
`einops.array_api` takes them.

`make test-peers` runs a program for each of the libraries below on blufunc and on JAX, and compares values and
gradients. The table, which `tests/ecosystem/table.py` wrote, counts the libraries' own tests on blufunc: evenly spaced
samples, on a CPU with one device, 60 seconds each. Tests that fail on JAX 0.10.2, too, are not counted, nor are those
that need what neither has: TensorFlow, other packages, XLA's text, files that the source distribution lacks, processes
of their own, or several devices. The tests of equinox are 32 files of its repository that fit the version, as its
distribution has none.

"""


def run(library, folder, options):
    """Counts and reasons of failures of a sample of a library's suite."""
    name, paths, every = (SUITES | IN_REPOSITORIES)[library]
    root = options.suite.get(library, folder / name)
    with tempfile.TemporaryDirectory() as place:
        report, failed = pathlib.Path(place) / "report.xml", pathlib.Path(place) / "failed"
        sample = ["--every", str(options.every or every), "--offset", str(options.offset)]
        start = [sys.executable, "-m", "blufunc.as_jax", "-m", "pytest"]
        cases = pytest(start, [*sample, "--failed-to", str(failed), *paths], root, report, options.timeout)
        on_jax = set()
        ids = failed.read_text().splitlines() if failed.exists() else []
        if options.peer and ids:
            packages = sysconfig.get_path("purelib")  # of the libraries, without JAX
            files = sorted({i.partition("::")[0] for i in ids})
            start = [options.peer, "-m", "pytest"]
            found = pytest(start, ["--only", str(failed), *files], root, report, options.timeout, packages)
            on_jax = {key(case) for case in found if problem(case) is not None}
    counts, reasons, left_out = (collections.Counter() for _ in range(3))
    for case in cases:
        bad = problem(case)
        if bad is None:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
            continue
        message = bad.get("message") or ""
        unrun = "collection failure" in message
        why = next((r for p, r in NOT_COUNTED.items() if re.search(p, message + (bad.text or ""))), None)
        if why is None and key(case) in on_jax:
            why = "fails on JAX, too"
        if why is not None:
            left_out[why] += 1
            continue
        counts["uncollected" if unrun else "failed"] += 1
        reasons[reason((bad.text or "") if unrun else message, unrun)] += 1
    result = {"version": name.rpartition("-")[2], "every": options.every or every, **counts}
    return {**result, "reasons": reasons.most_common(), "not counted": left_out.most_common()}


def pytest(start, arguments, root, report, timeout, packages=""):
    """The test cases of a run of pytest."""
    report.unlink(missing_ok=True)
    command = [*start, "-q", "-p", "no:cacheprovider", "-p", "sampled_plugin", "-o", "addopts="]
    command += ["--rootdir", str(root)]  # to which ids are relative, also where a checkout has no settings
    command += ["--timeout", str(timeout), "--timeout-method", "signal"]
    command += ["-o", "python_files=*_test.py test_*.py", "--continue-on-collection-errors"]
    path = os.pathsep.join(filter(None, [str(HERE), packages, os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment |= {"JAX_PLATFORMS": "cpu", "EINOPS_TEST_BACKENDS": "numpy,jax"}
    command += [f"--junitxml={report}", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
    if not report.exists():
        raise SystemExit(f"{root}: pytest wrote no report\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return list(ET.parse(report).iter("testcase"))


def key(case):
    """The name of a test case in a report."""
    return case.get("classname"), case.get("name")


def problem(case):
    """The failure or error of a test case, or None."""
    return next((x for x in (case.find("failure"), case.find("error")) if x is not None), None)


def reason(message, last=False):
    """One line for the reason of a failure."""
    lines = [x.removeprefix("E ").strip() for x in message.splitlines() if x.strip()]
    lines = lines or ["no message"]
    text = lines[-1] if last else lines[0]
    return re.sub(r"0x[0-9a-f]+|\s+", " ", text)[:110]


def page(results):
    """The text of ``docs/ecosystem.md``."""
    rows = [
        "| library | version | passed of those run | sample | why the others do not | not counted |",
        "|---" * 6 + "|",
    ]
    for library in sorted({*SUITES, *IN_REPOSITORIES, *WITHOUT}):
        found = results.get(library)
        if library in WITHOUT:
            rows.append(
                f"| {library} | {WITHOUT[library]} | the program | | its distribution has no tests | |"
            )
        elif found:
            passed, bad = found.get("passed", 0), found.get("failed", 0) + found.get("uncollected", 0)
            every = found["every"]
            sample = "all" if every == 1 else f"1 in {every}"
            why, out = (listed(found[k], n) for k, n in (("reasons", 4), ("not counted", 9)))
            share = f"{passed} of {passed + bad} ({100 * passed / (passed + bad):.1f}%)"
            rows.append(f"| {library} | {found['version']} | {share} | {sample} | {why} | {out} |")
    return HEAD + "\n".join(rows) + "\n"


def listed(reasons, most):
    """The most frequent reasons and their counts, for a cell of a table."""
    return escape("; ".join(f"{r} ({n})" for r, n in reasons[:most]))


def escape(text):
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("libraries", nargs="*", help="by default those of SUITES and of --suite")
    parser.add_argument("--every", type=int, help="run every n-th test; by default that of SUITES")
    parser.add_argument("--offset", type=int, default=0, help="the first test to run")
    parser.add_argument("--timeout", type=int, default=60, help="seconds of a test")
    parser.add_argument("--peer", help="a Python with JAX")
    parser.add_argument("--suite", action="append", default=[], help="LIBRARY=ROOT of a checkout")
    options = parser.parse_args()
    roots = (entry.partition("=") for entry in options.suite)
    options.suite = {library: pathlib.Path(root).resolve() for library, _, root in roots}
    missing = [name for name in options.libraries if name in IN_REPOSITORIES and name not in options.suite]
    if missing:
        parser.error(f"the tests of {missing[0]} are in its repository: --suite {missing[0]}=ROOT")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for library in options.libraries or [*SUITES, *options.suite]:
        results[library] = run(library, options.folder.resolve(), options)
        print(library, json.dumps(results[library], indent=1))
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
