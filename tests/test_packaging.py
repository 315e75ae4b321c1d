"""Contents of the wheel and the sdist, as the build backend lists them."""

from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

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
