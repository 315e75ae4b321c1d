"""Pictures and charts: well formed, complete, and the files current."""

import os
from xml.etree import ElementTree

import pytest

import blufunc as bf
from website import charts, pictures


def test_golden_pictures(monkeypatch):
    monkeypatch.setattr(bf.config, "cpu_devices", 8)
    for name, text in pictures.pictures().items():
        ElementTree.fromstring(text)
        file = pictures.ASSETS / name
        if os.environ.get("BLUFUNC_UPDATE_GOLDENS"):
            file.write_text(text)
        assert file.read_text() == text, f"{name} is not current: python -m website.pictures"


@pytest.mark.parametrize("heading", charts.CHARTS)
def test_charts_have_a_bar_for_each_row(heading):
    for make in charts.CHARTS[heading]:
        root = ElementTree.fromstring(make())
        bars = root.findall("{*}rect")
        assert len(bars) >= 3 and all(float(b.get("width")) >= 1 for b in bars)
        widths = float(root.get("viewBox").split()[2])
        assert all(float(b.get("x")) + float(b.get("width")) <= widths for b in bars)


def test_a_chart_names_what_is_slower_than_the_peer():
    bars = [charts.Bar("a", 0.5, "0.50"), charts.Bar("b", 1.5, "1.50", own=False)]
    classes = [
        b.get("class") for b in ElementTree.fromstring(charts.svg("t", bars, line=1)).findall("{*}rect")
    ]
    assert classes == ["own", "peer"]


def test_charts_are_below_their_headings():
    page = charts.FIRST + "".join(f"\n## {h}\n\ntext\n" for h in charts.CHARTS)
    assert charts.inserted(page).count("<svg") == sum(map(len, charts.CHARTS.values()))
    with pytest.raises(ValueError, match="cpu_kernels"):
        charts.inserted(charts.FIRST)
