"""Pictures as SVG, alone or in a page to zoom and search.

Kernels, below the reports that draw. In: SVG elements. Out: a ``Drawing``, which notebooks show and files hold. A page
is one file: it loads nothing.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blufunc import errors
from blufunc.core.ir import source


@dataclass(frozen=True)
class Drawing:
    """A picture; a notebook shows it, ``save`` writes it.

    Attributes:
      title: its caption.
      width, height: pixels.
      body: SVG elements.
    """

    title: str
    width: float
    height: float
    body: str

    @property
    def svg(self) -> str:
        """The SVG source."""
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        style = 'font-family="system-ui, sans-serif" font-size="12" style="background:#fff;max-width:100%;height:auto"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{self.body}\n</svg>\n'

    @property
    def html(self) -> str:
        """A page of one file: drag to move, scroll to zoom, type to search."""
        head, tail = _PAGE.split("{svg}")
        return head.replace("{title}", html.escape(self.title)) + self.svg + tail

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture; missing folders are made.

        Args:
          path: ends in ``.svg``, or in ``.html`` for the page.
        Raises:
          ArgumentError: the path ends in something else.
        """
        to = Path(path)
        if to.suffix not in (".svg", ".html"):
            raise errors.ArgumentError(
                f"a picture is saved as .svg or .html, not as {to.name!r:.60}.",
                where=source.here(),
                fix='picture.save("program.html")',
            )
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(self.svg if to.suffix == ".svg" else self.html, encoding="utf-8")


def element(name: str, inside: str | None = None, **attributes: object) -> str:
    """An SVG element; underscores in names of attributes are hyphens."""
    text = "".join(f' {k.rstrip("_").replace("_", "-")}="{_value(v)}"' for k, v in attributes.items())
    return f"<{name}{text}/>" if inside is None else f"<{name}{text}>{inside}</{name}>"


def _value(x: object) -> str:
    return f"{x:.6g}" if isinstance(x, float) else html.escape(str(x))


def label(x: float, y: float, text: str, **attributes: object) -> str:
    """A line of text."""
    return element("text", html.escape(text), x=x, y=y, **attributes)


def group(parts: Sequence[str], tooltip: str = "", **attributes: object) -> str:
    """Elements together, with a text that appears under the pointer."""
    title = [element("title", html.escape(tooltip))] if tooltip else []
    return element("g", "\n".join([*title, *parts]), **attributes)


def shortened(text: str, most: int) -> str:
    """At most ``most`` characters, the end replaced by an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def stacked(title: str, drawings: Sequence[Drawing]) -> Drawing:
    """Pictures below each other, each under its title."""
    parts, y = [], 0.0
    for d in drawings:
        parts.append(label(16, y + 22, d.title, font_weight="bold"))
        parts.append(element("g", d.body, transform=f"translate(0,{y + 32:g})"))
        y += d.height + 48
    return Drawing(title, max([d.width for d in drawings], default=0), y, "\n".join(parts))


def mixed(share: float, low: Sequence[int] = (247, 249, 252), high: Sequence[int] = (255, 170, 90)) -> str:
    """A colour between two, for a share from 0 to 1."""
    return "#" + "".join(
        f"{round(a + (b - a) * min(max(share, 0), 1)):02x}" for a, b in zip(low, high, strict=True)
    )


def legend(entries: Mapping[str, str], x: float, y: float) -> Iterator[str]:
    """Names of colours in a line."""
    for name, colour in entries.items():
        yield element("rect", x=x, y=y - 10, width=12, height=12, fill=colour, stroke="#8895a7")
        yield label(x + 18, y, name, fill="#445")
        x += 40 + 7 * len(name)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { margin: 0; font: 14px system-ui, sans-serif; overflow: hidden; background: #fff; color: #223 }
header { display: flex; gap: 1em; align-items: center; padding: 8px 12px; border-bottom: 1px solid #dde }
header b { overflow: hidden; text-overflow: ellipsis; white-space: nowrap }
input { flex: 0 1 18em; padding: 4px 8px; font: inherit }
main { height: calc(100vh - 48px); cursor: grab }
main svg { width: 100%; height: 100%; max-width: none !important }
.faded { opacity: 0.15 }
</style></head><body>
<header><b>{title}</b><input id="search" type="search" placeholder="search" aria-label="search">
<span id="found"></span></header>
<main>{svg}</main>
<script>
const svg = document.querySelector("main svg"), main = document.querySelector("main");
const box = svg.viewBox.baseVal, whole = { w: box.width, h: box.height };
svg.removeAttribute("width"); svg.removeAttribute("height");
svg.setAttribute("preserveAspectRatio", "xMidYMin meet");
const first = main.clientWidth / whole.w;
if (first > 1) { box.width = main.clientWidth; box.x = (whole.w - box.width) / 2; }
box.height = box.width * main.clientHeight / main.clientWidth;
main.addEventListener("wheel", e => {
  e.preventDefault();
  if (!e.ctrlKey && !e.altKey && !e.metaKey && Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
    box.x += e.deltaX * box.width / main.clientWidth; return;
  }
  const by = Math.exp(e.deltaY / 500), r = main.getBoundingClientRect();
  const px = (e.clientX - r.left) / r.width, py = (e.clientY - r.top) / r.height;
  box.x += box.width * px * (1 - by); box.y += box.height * py * (1 - by);
  box.width *= by; box.height *= by;
}, { passive: false });
let from = null;
main.addEventListener("pointerdown", e => { from = [e.clientX, e.clientY]; main.setPointerCapture(e.pointerId); });
main.addEventListener("pointerup", () => { from = null; });
main.addEventListener("pointermove", e => {
  if (!from) return;
  const scale = box.width / main.clientWidth;
  box.x -= (e.clientX - from[0]) * scale; box.y -= (e.clientY - from[1]) * scale;
  from = [e.clientX, e.clientY];
});
const search = document.getElementById("search"), nodes = [...svg.querySelectorAll(".node")];
search.addEventListener("input", () => {
  const text = search.value.toLowerCase();
  const hits = nodes.filter(n => n.textContent.toLowerCase().includes(text));
  nodes.forEach(n => n.classList.toggle("faded", !!text && !hits.includes(n)));
  document.getElementById("found").textContent = text ? hits.length + " of " + nodes.length : "";
  if (text && hits.length) {
    const b = hits[0].getBoundingClientRect(), r = main.getBoundingClientRect();
    const scale = box.width / main.clientWidth;
    box.x += (b.left + b.width / 2 - r.left - r.width / 2) * scale;
    box.y += (b.top + b.height / 2 - r.top - r.height / 3) * scale;
  }
});
</script></body></html>
"""
