"""Bar charts of the records in ``benchmarks/results``, as SVG.

In: the records. Out: figures that ``hooks.py`` inserts into the page of benchmarks at build time, and the picture of
the README for ``pictures.py``. Classes carry the colours, so a figure follows the theme of the page; the picture, a
file of its own, has its own styles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

BARS, ROW, LETTER, FIGURES = 230, 19, 6.3, 64
"""Units of a chart: the longest bar, a row, a letter of a label, the figures."""

STYLE = """<style>
text { font: 11px system-ui, sans-serif; fill: #24292f } .own { fill: #4051b5 } .peer { fill: #b8bfc9 }
line { stroke: #8b949e }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .own { fill: #7c8cf8 } .peer { fill: #57606a } }
</style>"""


class Bar(NamedTuple):
    """A bar of a chart.

    Attributes:
      label: what it measures.
      value: its length.
      figure: the value as text.
      own: drawn in the colour of blufunc.
    """

    label: str
    value: float
    figure: str
    own: bool = True


def svg(title: str, bars: Sequence[Bar], line: float | None = None, style: str = "") -> str:
    """A chart of horizontal bars.

    Args:
      title: title, above the bars.
      bars: the bars, from the top on.
      line: a value to mark by a vertical line, such as a ratio of 1.
      style: a ``style`` element, for a file of its own.
    """
    longest = max([b.value for b in bars] + ([line] if line else []))
    labels = round(LETTER * max(len(b.label) for b in bars)) + 8
    width = max(labels + BARS + FIGURES, round(6.4 * len(title)))
    scale = BARS / longest
    height = 26 + ROW * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        style,
        f'<text x="0" y="13" font-weight="bold" font-size="12">{escape(title)}</text>',
    ]
    for i, bar in enumerate(bars):
        y = 24 + ROW * i
        length = max(bar.value * scale, 1)
        parts.append(
            f'<text x="{labels - 6}" y="{y + 12}" text-anchor="end" font-size="11">{escape(bar.label)}</text>'
            f'<rect class="{"own" if bar.own else "peer"}" x="{labels}" y="{y + 2}" width="{length:.1f}" '
            f'height="{ROW - 6}" rx="2"/>'
            f'<text x="{labels + length + 5:.1f}" y="{y + 12}" font-size="11">{escape(bar.figure)}</text>'
        )
    if line:
        x = labels + line * scale
        parts.append(f'<line x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="{height}" stroke-dasharray="3 2"/>')
    return "".join(parts) + "</svg>"


def _record(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _rows(name: str, **having: object) -> list[dict]:
    return [r for r in _record(name)["rows"] if all(r.get(k) == v for k, v in having.items())]


LIBRARIES = {
    "blufunc": "blufunc",
    "torch-compile": "torch.compile",
    "torch-eager": "PyTorch, eager",
    "jax-cudnn": "JAX, cuDNN attention",
    "jax-xla": "JAX",
}


def _tokens(name: str, title: str, style: str = "") -> str:
    """Tokens per second of GPT-2's training step, the fastest library first."""
    rows = [r for r in _rows(name) if "tokens_s" in r and r["library"] in LIBRARIES]
    best = {r["library"]: r for r in sorted(rows, key=lambda r: r["tokens_s"])}
    bars = [
        Bar(LIBRARIES[name], r["tokens_s"], f"{r['tokens_s'] / 1e3:,.0f}k", name == "blufunc")
        for name, r in sorted(best.items(), key=lambda item: -item[1]["tokens_s"])
    ]
    return svg(title, bars, style=style)


def _float32(title: str) -> str:
    """Tokens per second in TF32, and in float32 with the accuracy of IEEE arithmetic."""
    bars = []
    for record, kind in (("gpu_gpt2_tf32", "TF32"), ("gpu_gpt2_fp32", "float32")):
        for r in sorted((r for r in _rows(record) if "tokens_s" in r), key=lambda r: -r["tokens_s"]):
            library, _, options = r["library"].partition(" ")
            label = f"{LIBRARIES[library]}, {'float32_tc' if 'float32_tc' in options else kind}"
            bars.append(Bar(label, r["tokens_s"], f"{r['tokens_s'] / 1e3:,.0f}k", library == "blufunc"))
    return svg(title, bars)


def _several(name: str, title: str) -> str:
    """Tokens per second on all GPUs of a record, by library and layout."""
    rows = [r for r in _rows(name) if r.get("tokens_s") and r["gpus"] > 1]
    bars = [
        Bar(r["library"], r["tokens_s"], f"{r['tokens_s'] / 1e3:,.0f}k", r["library"].startswith("blufunc"))
        for r in sorted(rows, key=lambda r: -r["tokens_s"])
    ]
    return svg(title, bars)


def _memory(name: str, title: str) -> str:
    """Peak of the libraries' own allocators, with and without a budget."""
    rows = [r for r in _rows(name) if "peak_GB" in r and "tokens_s" in r]
    bars = []
    for r in sorted(rows, key=lambda r: r["peak_GB"]):
        library, _, budget = r["library"].partition(" ")
        if library in LIBRARIES:
            label = f"{LIBRARIES[library]}, a budget" if budget else LIBRARIES[library]
            bars.append(Bar(label, r["peak_GB"], f"{r['peak_GB']:.1f} GB", library == "blufunc"))
    return svg(title, bars)


def _ratios(name: str, title: str) -> str:
    """Time ratios to the peer, the smallest first; at most 24, evenly spaced."""
    rows = sorted((r for r in _rows(name) if r["unit"] != "tokens/s"), key=lambda r: r["ratio"])
    if len(rows) > 24:
        rows = [rows[i * (len(rows) - 1) // 23] for i in range(24)]
        title += ", 24 of them, from the fastest to the slowest"
    shown = [Bar(r["what"], min(r["ratio"], 2.0), f"{r['ratio']:.2f}", r["ratio"] <= 1) for r in rows]
    return svg(title, shown, line=1.0)


def _speedups(name: str, title: str) -> str:
    """Speedup over the best peer for each kernel of a record."""
    times: dict[str, dict[str, float]] = {}
    for r in _rows(name):
        if "ms" in r:
            times.setdefault(r["what"], {})[r["library"]] = r["ms"]
    bars = []
    for what, of in times.items():
        peers = [t for library, t in of.items() if library != "blufunc"]
        if "blufunc" in of and peers:
            speedup = min(peers) / of["blufunc"]
            bars.append(Bar(what, speedup, f"{speedup:.2f}x", speedup >= 1))
    return svg(title, sorted(bars, key=lambda b: -b.value), line=1.0)


CHARTS: dict[str, list[Callable[[], str]]] = {
    "cpu_kernels": [lambda: _ratios("cpu_kernels-cpu", "Kernels on a CPU: time relative to JAX")],
    "eager": [lambda: _ratios("eager-cpu", "Eager programs on a CPU: time relative to JAX")],
    "loops": [lambda: _ratios("loops-cpu", "Loops on a CPU: time relative to JAX")],
    "loops on a GPU": [lambda: _ratios("loops-cuda", "Loops on an H100: time relative to JAX")],
    "small": [lambda: _ratios("small-cpu", "Small programs on a CPU: time relative to JAX")],
    "Benchmarks": [lambda: _tokens("gpu_gpt2", "GPT-2 124M, bfloat16, one H200: tokens per second")],
    "On a GPU": [
        lambda: _memory("gpu_gpt2", "GPT-2 124M, bfloat16: memory of arrays"),
        lambda: _float32("GPT-2 124M in TF32 and float32, one H200: tokens per second"),
        lambda: _several("gpu_multi_4", "GPT-2 124M, bfloat16, four H200s: tokens per second"),
        lambda: _speedups("gpu_kernels", "Kernels on an H200: speedup over the best peer"),
    ],
}
"""Charts below each heading; those of the title precede the first section."""


FIRST = "has the figures that matter most.\n"
"""The end of the text that precedes the first section."""


def inserted(page: str) -> str:
    """The page of benchmarks with its charts, each below its heading."""
    for heading, makers in CHARTS.items():
        marker = f"\n## {heading}\n" if heading != "Benchmarks" else FIRST
        if marker not in page:
            raise ValueError(
                f"docs/benchmarks.md has no heading {heading!r}: CHARTS of website/charts.py names it"
            )
        figures = "\n\n".join(f'<figure class="chart">{make()}</figure>' for make in makers)
        page = page.replace(marker, f"{marker}\n{figures}\n")
    return page


def picture() -> str:
    """The picture of the README, a file of its own."""
    title = "GPT-2 124M, training in bfloat16 on one H200: tokens per second"
    return _tokens("gpu_gpt2", title, STYLE).replace("<svg ", '<svg width="640" ', 1) + "\n"
