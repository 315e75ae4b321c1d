"""Run samples of the libraries' tests on blufunc; write ``docs/ecosystem.md``.

``python -m tests.ecosystem.table FOLDER [LIBRARY ...] [--keep N]``, where FOLDER has the unpacked source
distributions (``pip download --no-binary :all: --no-deps optax==0.2.8``). Results of libraries that are not named are
kept from ``results.json``.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

HERE = pathlib.Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parent.parent / "docs" / "ecosystem.md"

SUITES = {  # folder, and the paths in it with tests
    "chex": ("chex-0.1.92", ["chex"]),
    "distrax": ("distrax-0.1.9", ["distrax"]),
    "dm-haiku": ("dm_haiku-0.0.17", ["haiku/_src"]),
    "einops": ("einops-0.8.2", ["einops/tests"]),
    "flax linen": ("flax-0.12.8", ["tests/linen", "tests/core"]),
    "flax nnx": ("flax-0.12.8", ["tests/nnx"]),
    "numpyro": ("numpyro-0.22.0", ["test"]),
    "optax": ("optax-0.2.8", ["optax"]),
}
WITHOUT = {  # libraries whose source distributions have no tests: the program of ``programs`` stands for them
    "diffrax": "0.7.2",
    "equinox": "0.13.8",
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
samples, on a CPU with one device, ten seconds each.

"""


def run(library, folder, keep):
    """Counts and reasons of failures of a sample of a library's suite."""
    name, paths = SUITES[library]
    report = pathlib.Path("/tmp") / f"ecosystem-{library.replace(' ', '-')}.xml"
    report.unlink(missing_ok=True)
    root = folder / name
    command = [sys.executable, "-m", "blufunc.as_jax", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "sampled_plugin", "--keep", str(keep), "--timeout", "10", "--timeout-method", "signal"]
    command += ["-o", "addopts=", "-o", "filterwarnings=ignore", "-o", "python_files=*_test.py test_*.py"]
    command += ["--continue-on-collection-errors", f"--junitxml={report}", *paths]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment |= {"JAX_PLATFORMS": "cpu", "EINOPS_TEST_BACKENDS": "numpy,jax"}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
    if not report.exists():
        raise SystemExit(f"{library}: pytest wrote no report\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    counts, reasons = collections.Counter(), collections.Counter()
    for case in ET.parse(report).iter("testcase"):
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        if bad is not None:
            message = bad.get("message") or ""
            unrun = "collection failure" in message
            counts["uncollected" if unrun else "failed"] += 1
            reasons[reason((bad.text or "") if unrun else message, unrun)] += 1
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return {"version": name.rpartition("-")[2], **counts, "reasons": reasons.most_common()}


def reason(message, last=False):
    """One line for the reason of a failure."""
    lines = [x.removeprefix("E ").strip() for x in message.splitlines() if x.strip()]
    lines = lines or ["no message"]
    text = lines[-1] if last else lines[0]
    return re.sub(r"0x[0-9a-f]+|\s+", " ", text)[:110]


def page(results):
    """The text of ``docs/ecosystem.md``."""
    rows = ["| library | version | passed of those run | why the others do not |", "|---|---|---|---|"]
    for library in sorted({*SUITES, *WITHOUT}):
        found = results.get(library)
        if library in WITHOUT:
            rows.append(f"| {library} | {WITHOUT[library]} | the program | its distribution has no tests |")
        elif found:
            passed, failed = found.get("passed", 0), found.get("failed", 0)
            why = found.get("why") or "; ".join(f"{r} ({n})" for r, n in found["reasons"][:4])
            rows.append(f"| {library} | {found['version']} | {passed} of {passed + failed} | {escape(why)} |")
    return HEAD + "\n".join(rows) + "\n"


def escape(text):
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("libraries", nargs="*", default=[*SUITES])
    parser.add_argument("--keep", type=int, default=100)
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for library in options.libraries:
        results[library] = run(library, options.folder.resolve(), options.keep)
        print(library, json.dumps(results[library], indent=1))
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
