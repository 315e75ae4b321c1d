"""Execution of the documentation: README's examples, and each error with its fix."""

import inspect
import re
from pathlib import Path

import pytest

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import errors

ROOT = Path(__file__).parent.parent


def python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


def sections():
    text = (ROOT / "docs/errors.md").read_text()
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        name, body = part.split("\n", 1)
        blocks = python_blocks(body)
        if blocks:
            yield pytest.param(name.strip(), *blocks, id=name.strip())


@pytest.mark.parametrize("name, broken, mended", list(sections()))
def test_error_examples(name, broken, mended, monkeypatch):
    monkeypatch.setattr(bf.config, "debug_key_reuse", False)  # restored after the example that sets it
    monkeypatch.setattr(bf.config, "debug_nans", False)  # likewise
    with pytest.raises(getattr(errors, name)) as caught:
        exec(compile(broken, "example", "exec"), {"bf": bf, "jnp": jnp})
    assert caught.value.fix, "an error says what to write instead"
    exec(compile(mended, "example", "exec"), {"bf": bf, "jnp": jnp})


def test_every_error_has_its_section():
    text = (ROOT / "docs/errors.md").read_text()
    classes = [
        c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.BlufuncError)
    ]
    for cls in classes:
        if cls is not errors.BlufuncError:
            assert f"\n## {cls.__name__}\n" in text
            bases = ", ".join(f"`{b.__name__}`" for b in cls.__bases__ if b is not errors.BlufuncError)
            assert f"| [`{cls.__name__}`](#{cls.__name__.lower()}) | {bases} |" in text


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/performance.md",
        "docs/parallelism.md",
        "docs/attention.md",
        "docs/sight.md",
    ],
)
def test_pages_run(page, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page}  # the blocks of a page are one program
    for block in python_blocks((ROOT / page).read_text()):
        exec(compile(block, page, "exec"), names)


def test_sharding_runs(capsys, monkeypatch):
    monkeypatch.setattr(bf.config, "cpu_devices", 8)
    names = {}
    for block in python_blocks((ROOT / "docs/sharding.md").read_text()):
        exec(compile(block, "docs/sharding.md", "exec"), names)


def test_extending_runs(capsys):
    """The blocks of this page form one program."""
    names = {}
    for block in python_blocks((ROOT / "docs/extending.md").read_text()):
        exec(compile(block, "docs/extending.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "softsign: 9 checks passed" in printed and "fold: 9 checks passed" in printed
    assert "polar: 8 checks passed" in printed and "row_norm: 10 checks passed" in printed
    assert "rounding(f): 12 checks passed, 0 not supported" in printed


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_paths_that_pages_name_exist():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for path in re.findall(r"`((?:blufunc|examples|benchmarks|tests|docs)/[\w/.-]+)`", page.read_text()):
            assert (ROOT / path.rstrip("/")).exists() or "NNN" in path, f"{page}: {path}"


def test_no_page_has_both_sides_of_a_merge():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]:
        assert not re.search(r"^(?:<{7}|={7}|>{7})(?: |$)", page.read_text(), flags=re.M), page
