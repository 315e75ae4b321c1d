"""The site of ``make docs``: links, anchors, requests, pages in a browser.

All of it skips where there is no site, or one older than the pages; the browser's part also without Chromium.
"""

import functools
import html
import http.server
import json
import queue
import re
import shutil
import subprocess
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "site-build"
CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
PAGES = (
    "index.html",
    "start.html",
    "tutorial/5-training.html",
    "tutorial/8-mesh.html",
    "howto/index.html",
    "howto/from-pytorch.html",
    "howto/several-gpus.html",
    "sight.html",
    "explanation/how-it-works.html",
    "reference/blufunc.html",
    "reference/blufunc.numpy/reductions.html",
    "benchmarks.html",
    "errors.html",
    "examples/index.html",
)
"""Pages that are loaded in a browser."""


@pytest.fixture(scope="module")
def site():
    """The folder of a site that is as new as the pages."""
    index = SITE / "index.html"
    if not index.exists():
        pytest.skip("no site: make docs builds it")
    sources = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("website/*"), ROOT / "mkdocs.yml"]
    if newer := [p.name for p in sources if p.is_file() and p.stat().st_mtime > index.stat().st_mtime]:
        pytest.skip(f"the site is older than {newer[0]}: make docs builds it")
    return SITE


@pytest.fixture(scope="module")
def pages(site):
    """Each page's HTML, by its path."""
    return {p.relative_to(site).as_posix(): p.read_text() for p in site.glob("**/*.html")}


def test_links_and_anchors_exist(site, pages):
    ids = {path: set(re.findall(r'\sid="([^"]+)"', text)) for path, text in pages.items()}
    missing = []
    for path, text in pages.items():
        if path == "404.html":  # its links are absolute, for a server's root
            continue
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            url = urlsplit(html.unescape(target))
            if url.scheme or url.netloc:
                continue
            file = (site / path).parent / unquote(url.path) if url.path else site / path
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                missing.append(f"{path}: {target}")
            elif url.fragment and file.suffix == ".html":
                found = ids[file.resolve().relative_to(site.resolve()).as_posix()]
                if unquote(url.fragment) not in found and url.fragment != "__skip":
                    missing.append(f"{path}: {target}")
    assert len(pages) > 150 and not missing, missing[:10]


def test_nothing_is_loaded_from_another_host(pages):
    sources = r'<(?:script|img|iframe|source)[^>]+src="https?:'
    loads = rf'{sources}|<link[^>]+rel="(?:stylesheet|preconnect|preload)"[^>]+href="https?:'
    assert [path for path, text in pages.items() if re.search(loads, text)] == []


def test_every_public_name_has_an_anchor(pages):
    reference = "".join(text for path, text in pages.items() if path.startswith("reference/"))
    for name in ("blufunc.shard_map", "blufunc.numpy.sum", "blufunc.lax.scan", "blufunc.io.Checkpointer"):
        assert f'id="{name}"' in reference, name


def test_each_tutorial_page_is_a_notebook(site):
    notebooks = sorted(site.glob("tutorial/*.ipynb"))
    assert len(notebooks) == 8
    for path in notebooks:
        notebook = json.loads(path.read_text())
        assert notebook["nbformat"] == 4 and any(c["cell_type"] == "code" for c in notebook["cells"])


# -- in a browser ----------------------------------------------------------------------------------------

browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def chromium(*options: str) -> list[str]:
    """A command without a window."""
    return [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *options]


def console(log: str) -> str:
    """The messages of pages in a log."""
    return "\n".join(line for line in log.splitlines() if "CONSOLE" in line)


@pytest.mark.slow
@browser
def test_search_works_without_a_server(site):
    url = f"{(site / 'index.html').as_uri()}?q=shard_map"
    command = chromium("--virtual-time-budget=20000", "--dump-dom", url)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    results = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', done.stdout)
    assert any("#blufunc.shard_map" in unquote(r) for r in results), results[:10]
    assert not console(done.stderr)


PROBE = """<!doctype html><body><script>
async function probe(pages) {
  const found = {}
  for (const page of pages) {
    const frame = document.createElement("iframe")
    frame.style.cssText = "width:390px;height:800px;border:0"
    frame.src = "/" + page
    const loaded = new Promise(done => frame.onload = done)
    document.body.append(frame)
    await loaded
    const inside = frame.contentDocument, code = inside.querySelectorAll("article pre > code").length
    for (let i = 0; code && i < 100 && !inside.querySelector(".md-code__button"); ++i)
      await new Promise(done => setTimeout(done, 100))
    found[page] = { width: inside.documentElement.scrollWidth, code,
                    copy: inside.querySelectorAll("article .md-code__button").length,
                    title: inside.querySelector("h1")?.textContent ?? "" }
    frame.remove()
  }
  fetch("/found", { method: "POST", body: JSON.stringify(found) })
}
probe(%s)
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files of the site, the page that probes them, and what it finds."""

    found: queue.Queue

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/probe":
            self.answer((PROBE % json.dumps(PAGES)).encode())
        else:
            super().do_GET()

    def do_POST(self):
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer(b"")

    def log_message(self, *args):
        pass


@pytest.mark.slow
@browser
def test_pages_on_a_phone(site, tmp_path):
    """Pages load without errors, fit a phone, and have buttons to copy code."""
    Handler.found = queue.Queue()
    log = tmp_path / "log"
    with (
        http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Handler, directory=site)
        ) as server,
        log.open("w") as errors,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/probe"
        options = chromium(f"--user-data-dir={tmp_path / 'profile'}", "--remote-debugging-port=0", url)
        with subprocess.Popen(options, stdout=errors, stderr=errors) as process:
            try:
                found = Handler.found.get(timeout=120)
            finally:
                process.kill()
                server.shutdown()
    assert not console(log.read_text())
    assert list(found) == list(PAGES)
    for page, facts in found.items():
        assert facts["title"], page
        assert facts["width"] <= 390, f"{page} is {facts['width']} px wide"
        assert facts["copy"] > 0 or not facts["code"], f"{page} has no copy button"
