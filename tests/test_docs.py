"""Pages of the documentation that are programs, and each error with its fix."""

import dataclasses
import inspect
import itertools
import re
from pathlib import Path

import pytest

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import errors
from website import programs

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs/tutorial", "docs/howto", "docs/explanation")
"""Folders whose pages are programs; outputs that they show are compared."""


def python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


def sections():
    text = (ROOT / "docs/errors.md").read_text()
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        name, body = part.split("\n", 1)
        blocks = python_blocks(body)
        if blocks:
            yield pytest.param(name.strip(), *blocks, id=name.strip())


@pytest.mark.second
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


@pytest.mark.second
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


PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "docs/README.md",
        ROOT / "docs/start.md",
        *sorted(p for f in FOLDERS for p in (ROOT / f).glob("*.md")),
    )
    if python_blocks(path.read_text())
]


@pytest.mark.second
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore::blufunc.errors.HostPrimitiveWarning")  # a page says when it comes
def test_pages_print_what_they_show(page, monkeypatch, tmp_path):
    for field in dataclasses.fields(bf.config):  # restored after a page that sets them
        monkeypatch.setattr(bf.config, field.name, getattr(bf.config, field.name))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for block in programs.run((ROOT / page).read_text(), page):
        assert block.agrees(), (
            f"{page} shows\n{block.shown}\nand prints\n{block.printed}\nafter\n{block.code}"
        )


def test_pages_of_the_tutorial_lead_to_the_next_one():
    pages = sorted((ROOT / "docs/tutorial").glob("[0-9]*.md"))
    assert len(pages) == 8
    for page, following in itertools.pairwise(pages):
        assert "Next: [" in page.read_text() and f"({following.name}).\n" in page.read_text()


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


def anchors(page):
    """Anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    found = {}
    for title in re.findall(r"^#{1,6} (.+)$", text, flags=re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title.strip()).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{i}" if i else slug for slug, n in found.items() for i in range(n + 1)}


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
            file = page.parent / target if target else page
            assert file.exists(), f"{page}: {target}"
            if anchor and file.suffix == ".md":
                assert anchor in anchors(file), f"{page}: {target}#{anchor}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_paths_that_pages_name_exist():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for path in re.findall(r"`((?:blufunc|examples|benchmarks|tests|docs)/[\w/.-]+)`", page.read_text()):
            assert (ROOT / path.rstrip("/")).exists() or "NNN" in path, f"{page}: {path}"


def test_no_page_has_both_sides_of_a_merge():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]:
        assert not re.search(r"^(?:<{7}|={7}|>{7})(?: |$)", page.read_text(), flags=re.M), page
