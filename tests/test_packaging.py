"""Contents of the wheel and the sdist, as the build backend lists them."""

import re
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import blufunc as bf
from blufunc.kernels.codegen import source_files

ROOT = Path(__file__).parents[1]
SOURCES = {str(p.relative_to(ROOT)) for end in ("py", "h", "cuh") for p in ROOT.glob(f"blufunc/**/*.{end}")}


@pytest.mark.parametrize("builder", [WheelBuilder, SdistBuilder])
def test_sources_are_packaged(builder):
    found = {file.relative_path for file in builder(str(ROOT)).recurse_included_files()}
    assert found >= SOURCES, sorted(SOURCES - found)
    assert any(path.endswith(".cuh") for path in SOURCES)


def test_sources_in_files_are_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    source_files.parts.cache_clear()
    for path in SOURCES:
        if not path.endswith(".py"):
            assert source_files.parts(path.removeprefix("blufunc/kernels/")), path


def test_one_version():
    metadata = ProjectMetadata(str(ROOT), PluginManager())
    assert metadata.version == bf.__version__


@pytest.mark.parametrize("address", ["", "https://host/owner/blufunc/blob/main"])
def test_links_of_the_published_readme(address, monkeypatch):
    """No published link is relative: it is absolute, or its text."""
    monkeypatch.setenv("BLUFUNC_REPOSITORY_URL", address)
    core = ProjectMetadata(str(ROOT), PluginManager()).core
    links = re.findall(r"\]\(([^)]+)\)", re.sub(r"^```.*?^```", "", core.readme, flags=re.S | re.M))
    assert all(re.match("https?://", link) for link in links)
    assert bool(links) == bool(address) and core.readme_content_type == "text/markdown"
    if address:
        assert f"{address}/docs/start.md" in links
        assert "https://host/owner/blufunc/raw/main/docs/assets/gpt2.svg" in links
        assert core.urls["Source"] == "https://host/owner/blufunc"
    else:
        assert not core.urls and "![" not in core.readme and "[docs/jax.md]" not in core.readme
