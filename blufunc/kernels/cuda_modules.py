"""Stages 6 to 8 for kernels on a CUDA device: LoopIR is rendered, compiled in threads, and loaded.

Kernels. In: the kernels of a schedule, or a user's ``CudaSource``. Out: ``Loaded`` functions, of which executors make
launches. Kernels with one text are one function. A compiler takes long for a module and little for each kernel in it,
so that some of them share one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blufunc.config import config
from blufunc.kernels import cuda_runtime, nvrtc
from blufunc.kernels.cstyle_cuda import CudaKernel, render_many
from blufunc.kernels.cuda_source import CudaSource
from blufunc.kernels.loopir import Kernel

_PER_MODULE = 16


@dataclass(frozen=True)
class Loaded:
    """A function on a device, and how it is launched.

    Attributes:
      counters: how many addresses of 32-bit counters it takes behind those of its buffers. They are 0 before each
        launch, and after it.
    """

    function: cuda_runtime.Kernel
    grid: Sequence[int]
    block: Sequence[int]
    shared: int
    counters: int = 0

    def prepare(self, addresses: Sequence[int]) -> cuda_runtime.Launch:
        """A launch with these parameters."""
        return self.function.prepare(self.grid, self.block, self.shared, addresses)


class Wanted(NamedTuple):
    """A kernel, and the names of its buffers that may lie in one place with another of them."""

    kernel: Kernel
    aliased: frozenset[str]


def load(wanted: Sequence[Wanted], device: int, name: str) -> tuple[list[str], list[Loaded]]:
    """The sources of a program's modules, and the functions for its kernels, in their order."""
    keys = [(str(w.kernel), w.aliased) for w in wanted]
    distinct = dict(zip(keys, wanted, strict=True))
    texts, rendered = _render(list(distinct.values()))
    if config.shows("source"):
        config.show("\n".join(texts))
    functions = _compiled(texts, device, name)
    made = {
        key: Loaded(functions[module].kernel(k.entry), k.grid, k.block, k.shared_bytes, int(k.finished))
        for key, (module, k) in zip(distinct, rendered, strict=True)
    }
    return texts, [made[key] for key in keys]


def _render(wanted: Sequence[Wanted]) -> tuple[list[str], list[tuple[int, CudaKernel]]]:
    """Texts of modules, and for each kernel its module's number and what was rendered."""
    texts: list[str] = []
    rendered: list[tuple[int, CudaKernel]] = []
    named = _named_apart(wanted)
    for module, start in enumerate(range(0, len(named), _PER_MODULE)):
        group = named[start : start + _PER_MODULE]
        kernels = render_many([w.kernel for w in group], [w.aliased for w in group])
        texts.append(kernels[0].source)
        rendered += [(module, k) for k in kernels]
    return texts, rendered


def _named_apart(wanted: Sequence[Wanted]) -> list[Wanted]:
    """The kernels, with numbers to the names of those that are called alike."""
    taken: dict[str, int] = {}
    out = []
    for w in wanted:
        k = w.kernel
        count = taken[k.name] = taken.get(k.name, 0) + 1
        if count > 1:
            k = Kernel(f"{k.name}_{count}", k.buffers, k.grid, k.body, k.notes, k.finish)
        out.append(Wanted(k, w.aliased))
    return out


def _compiled(texts: Sequence[str], device: int, name: str) -> list[cuda_runtime.Module]:
    """The modules of texts; those that this process has are taken as they are."""
    new = [text for text in dict.fromkeys(texts) if (device, text) not in _modules]
    arch = cuda_runtime.properties(device).arch
    with _lock:
        for text, cubin in zip(new, nvrtc.compile_many([(t, name) for t in new], arch), strict=True):
            cuda_runtime.use_device(device)
            _modules[device, text] = cuda_runtime.Module(cubin)
    return [_modules[device, text] for text in texts]


_lock = threading.Lock()
_modules: dict[tuple[int, str], cuda_runtime.Module] = {}


def load_source(text: CudaSource, device: int) -> Loaded:
    """The function of a kernel that a user wrote."""
    if config.shows("source"):
        config.show(text.text)
    (module,) = _compiled([text.text], device, text.entry)
    return Loaded(module.kernel(text.entry), text.grid, text.block, text.shared)
