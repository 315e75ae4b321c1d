"""Typed configuration flags, each an environment variable ``BLUFUNC_<NAME>`` too.

Before the path of a program: every layer may read it; it imports only ``errors``.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from blufunc import errors

PRECISIONS = {
    "float32": "highest",
    "tensorfloat32": "tf32",
    "bfloat16": "fastest",
    "bfloat16_3x": "high",
}
"""JAX's names of precisions of float32 matmuls, and the names here."""

_OF_JAX = {
    "jax_enable_x64": (
        "64 bits are no mode: an explicit 64-bit dtype is honoured everywhere, and what has none is 32-bit.",
        "leave it out, and write the dtype where you want 64 bits: jnp.asarray(x, dtype='float64')",
    ),
    "jax_disable_jit": ("it is no flag.", "with bf.disable_jit(): ..."),
    "jax_default_prng_impl": ("threefry is the one generator.", "leave it out"),
    "jax_compilation_cache_dir": (
        "what was compiled is always kept on disk, in ~/.cache/blufunc.",
        "leave it out, or set the environment variable BLUFUNC_CACHE_DIR before the program starts",
    ),
}
"""Replacements of JAX flags that blufunc lacks: the reason, and what to write."""

_RENAMED = {
    "jax_enable_checks": "check",
    "jax_num_cpu_devices": "cpu_devices",
    "jax_default_matmul_precision": "matmul_precision",
    "jax_platforms": "default_device",
    "jax_platform_name": "default_device",
    "jax_default_device": "default_device",
}
"""JAX flags that have another name here."""

_ALWAYS = {
    "jax_enable_x64": False,
    "jax_check_tracer_leaks": (True, False),  # a tracer that leaks is always found when it is used
    "jax_threefry_partitionable": True,
    "jax_traceback_filtering": ("off", "auto", "tracebackhide", "remove_frames"),
    "jax_default_prng_impl": "threefry2x32",
}
"""JAX flags whose values here are these: setting them changes nothing."""

STAGES = (
    "jaxpr",
    "retrace",
    "fusion",
    "loopir",
    "schedule",
    "source",
    "memory",
    "compile",
    "cache",
    "launch",
)
"""The stages that ``debug`` can show."""

_CHOICES = {
    "host_compiler": ("auto", "always", "never"),
    "numpy_rank_promotion": ("allow", "warn", "raise"),
    "numpy_dtype_promotion": ("standard", "strict"),
    "matmul_precision": (
        "default", "high", "highest", "tf32", "fastest", "float32_tc", "TF32_TF32_F32", "F32_F32_F32",
        "F16_F16_F32_SCALED", "F16_F16_F32_X3",
    ),
}  # fmt: skip
"""The values of flags with a fixed set of them."""


class Memo(dict):
    """A memo of what depends on flags, emptied when one of them is set.

    Looking something up need not read the flags. While a thread has a value of its own of one of them
    (``Config.overridden``), nothing is memoized, since threads would disagree.
    """

    def __init__(self, *flags: str):
        super().__init__()
        self.closed = 0
        for flag in flags:
            _memos.setdefault(flag, []).append(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self.closed:
            super().__setitem__(key, value)


_memos: dict[str, list[Memo]] = {}


class _Own(threading.local):
    """The values of flags that blocks of this thread have set."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}


@dataclass
class Config:
    """Settings, the attributes of ``blufunc.config.config``.

    Setting one holds for the process. Blocks (``contexts.py``) hold for their thread, and take precedence there.

    Attributes:
      debug: stages to print to stderr as programs pass them, with commas between (``STAGES``):

        - ``jaxpr``: the traced program;
        - ``retrace``: why a function is traced again;
        - ``fusion``: fused regions, and why other equations do not fuse;
        - ``loopir``: kernels, before they become C++ or CUDA;
        - ``schedule``: the blocks and threads of each CUDA kernel, its vectors, shared memory, copies and prefetches;
        - ``source``: the generated source;
        - ``memory``: the planned peak, and the largest live values there;
        - ``compile``: compiler invocations, and their times;
        - ``cache``: plans read from and written to disk, and problems with them;
        - ``launch``: the steps of each call.
      debug_nans, debug_infs: look at every result, of single operations and of compiled programs, and raise
        ``NanError`` where there is a NaN (an infinity), naming the line that made the first one. A program that
        gives one runs once more, equation by equation. Slow; for debugging.
      debug_key_reuse: raise ``KeyReuseError`` where a random key is used twice.
      host_compiler: use of the system's C++ compiler for CPU programs: ``auto`` (if they are
        large enough to gain), ``always`` or ``never``.
      default_device: the default device of new arrays: ``cuda``, ``cuda:1``; empty for the CPU.
      matmul_precision: the precision of float32 matmuls on CUDA devices without a ``precision`` argument:
        ``default`` in IEEE float32, with the same values as on the CPU; ``tf32`` with operands rounded to 11 bits,
        several times faster, in TF32 or, where that is quicker, in float16 with a scale for each row and column;
        ``float32_tc`` as exactly as in IEEE float32 but not bit for bit the same, on tensor cores where that is
        quicker, or one of the algorithms of ``lax.DotAlgorithmPreset``. ``precision="high"`` selects tf32 for one
        matmul, ``"highest"`` for IEEE, ``"float32_tc"`` and the algorithms for themselves. Functions under ``jit``
        have a program per value of this flag; results of ``compile()`` keep theirs.
      numpy_rank_promotion: what functions of ``numpy`` do with arrays of different ranks, none of them 0: ``allow``
        broadcasts them, ``warn`` warns too, ``raise`` raises ``ShapeError``.
      numpy_dtype_promotion: ``strict`` lets only Python scalars, and what is weak as they are, take another dtype;
        operands of two dtypes raise ``DtypeError``.
      recognise: run hand-written attention, as ``softmax(q @ k.T) @ v``, on the kernels of
        ``nn.dot_product_attention`` on devices that have them. It applies to functions traced afterwards.
      cuda_graphs: replay a program that runs again on the same memory as one CUDA graph.
      cuda_streams: the number of streams for independent steps of such a graph; 1 serializes all steps. Collectives
        have one more stream.
      cuda_overlap: let a kernel begin ahead of the end of the one before it on its stream (programmatic dependent
        launch), for which it then waits. It applies to programs compiled afterwards.
      nccl_graphs: replay programs with collectives between GPUs as graphs too, with the collectives on their own
        stream. If off, their steps are launched one by one, on one stream.
      cpu_devices: the number of simulated CPU devices, which share its cores; more than one is for testing
        multi-device programs.
      simulated_network: the network between simulated hosts, ``2hosts,100us,10GB/s``: their number, and latency and
        bandwidth of the link of each, which its ranks share. Collectives of CPU devices on several hosts, of one
        process or of several, take as much longer; results are the same. Empty: one host.
      bucket_bytes: bytes of a full bucket of gradients, which share an all-reduce or a reduce-scatter in programs that
        are sharded; by default 25 MiB, about the full bandwidth of links. Fewer start the first bucket earlier, more
        launch fewer collectives. It applies to programs compiled afterwards.
      host_memory: bytes of page-locked memory of the host that ``jit(memory_budget=)`` may plan to fill for each
        device, arguments and results there included. Default: 128 GiB, half of a GPU's share of an HGX host of 2 TB.
        It applies to programs compiled afterwards.
      plan_cache: cache plans of programs on disk, with compiled kernels, for later processes.
      check: verify every jaxpr that a trace or transform produces, every kernel of LoopIR, and every memory plan.
        Slow; the tests set it.
    """

    debug: str = ""
    check: bool = False
    debug_key_reuse: bool = False
    debug_nans: bool = False
    debug_infs: bool = False
    host_compiler: str = "auto"
    default_device: str = ""
    matmul_precision: str = "default"
    numpy_rank_promotion: str = "allow"
    numpy_dtype_promotion: str = "standard"
    recognise: bool = True
    cuda_graphs: bool = True
    cuda_streams: int = 2
    cuda_overlap: bool = True
    nccl_graphs: bool = True
    cpu_devices: int = 1
    simulated_network: str = ""
    bucket_bytes: int = 25 << 20
    host_memory: int = 128 << 30
    plan_cache: bool = True

    def __post_init__(self) -> None:
        own = {"_own": _Own(), "_shared": {}, "_blocks": {}, "_lock": threading.RLock()}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:  # an unknown flag would be ignored silently
            self.update(name, value)
            return
        _check_value(name, value)
        self._set(name, value)
        if name in _CHECKED:
            self._set("guards", any(self.__dict__.get(n, self._shared_value(n)) for n in _CHECKED))
        for memo in _memos.get(name, ()):
            memo.clear()

    def _set(self, name: str, value: Any) -> None:
        """Set the value of the process."""
        if "_lock" not in self.__dict__:  # the constructor
            self.__dict__[name] = value
            return
        with self._lock:
            (self._shared if name in self._shared else self.__dict__)[name] = value

    def _shared_value(self, name: str) -> Any:
        return self.__dict__.get("_shared", {}).get(name, False)

    def __getattr__(self, name: str) -> Any:
        """A flag that a block has set: all others are attributes."""
        values = self.__dict__
        if "_own" in values:
            for place in (
                values["_own"].values,
                values["_shared"],
                values,
            ):  # the last: a block has just ended
                if name in place:
                    return place[name]
        raise AttributeError(f"config has no attribute {name!r}")

    @contextlib.contextmanager
    def overridden(self, **flags: Any) -> Iterator[None]:
        """Context manager: set flags for this thread.

        Raises:
          ArgumentError, ValueRangeError: a flag has no such value.
        """
        for name, value in flags.items():
            _check_value(name, value)
        own = self._own.values
        if not _CHECKED.isdisjoint(flags):
            flags["guards"] = any(flags.get(n, getattr(self, n)) for n in _CHECKED)
        before = {name: own[name] for name in flags if name in own}
        with self._lock:
            for name in flags:
                self._blocks[name] = self._blocks.get(name, 0) + 1
                if name in self.__dict__:  # from now on, ``__getattr__`` finds it
                    self._shared[name] = self.__dict__[name]
                    del self.__dict__[name]
                for memo in _memos.get(name, ()):
                    memo.closed += 1
                    memo.clear()
            own.update(flags)
        try:
            yield
        finally:
            with self._lock:
                for name in flags:
                    own.pop(name, None)
                    self._blocks[name] -= 1
                    if not self._blocks[name]:
                        self.__dict__[name] = self._shared[name]
                        del self._shared[name]
                    for memo in _memos.get(name, ()):
                        memo.closed -= 1
                own.update(before)

    def own_values(self) -> dict[str, Any]:
        """The flags that blocks of this thread have set, for threads that work for it."""
        return {name: value for name, value in self._own.values.items() if name != "guards"}

    def update(self, name: str, value: Any) -> None:
        """Set the flag ``name``, or its equivalent under JAX's name.

        Raises:
          ArgumentError: ``value`` is not of the flag's type.
          UnsupportedError: JAX has the flag and blufunc does not; the message has the replacement.
          ValueRangeError: there is no such flag, or the flag has no such value.
        """
        always = _ALWAYS.get(name, ()) if isinstance(name, str) else ()
        if value in always if isinstance(always, tuple) else value == always:
            return
        if name in ("jax_log_compiles", "jax_explain_cache_misses"):
            stages = {*_stages(self.debug)} - {"retrace"} | ({"retrace"} if value else set())
            name, value = "debug", ",".join(stage for stage in STAGES if stage in stages)
        if name in _RENAMED:
            name = _RENAMED[name]
            if name == "default_device":
                value = platform_of(str(value or "").partition(",")[0])
            elif name == "matmul_precision":
                value = PRECISIONS.get(value, value) or "default"
        if always and name not in _OF_JAX:
            raise errors.UnsupportedError(f"{name} is always {always!r} in blufunc.", fix="leave it out")
        if name in _OF_JAX:
            why, fix = _OF_JAX[name]
            raise errors.UnsupportedError(f"blufunc has no flag {name!r}.", why=why, fix=fix)
        flag = name.removeprefix("jax_") if isinstance(name, str) else name
        known = [f.name for f in fields(self)]
        if flag not in known:
            raise errors.ValueRangeError(
                f"blufunc has no flag {name!r:.60}.", fix=f"its flags are {', '.join(known)}"
            )
        setattr(self, flag, value)

    def shows(self, stage: str) -> bool:
        """True if ``debug`` selects ``stage``."""
        return stage in _stages(self.debug)

    def show(self, text: object) -> None:
        """Print a selected stage."""
        sys.stderr.write(f"{text}\n")


_CHECKED = frozenset(("debug_nans", "debug_infs"))
"""Flags that make results be checked; ``config.guards`` is true if one is set."""

for _field in fields(Config):  # a default of the class would hide ``__getattr__``
    delattr(Config, _field.name)


def platform_of(device: str) -> str:
    """The name of a device as ``default_device`` has it: JAX's ``gpu`` is ``cuda``."""
    platform, colon, index = device.partition(":")
    return f"{'cuda' if platform == 'gpu' else platform}{colon}{index}"


def _stages(text: str) -> list[str]:
    return [stage for stage in map(str.strip, text.split(",")) if stage]


NETWORK = re.compile(
    r"([1-9]\d*)hosts,(\d+(?:\.\d+)?)(s|ms|us),(?!0+(?:\.0+)?[MG]?B)(\d+(?:\.\d+)?)(B/s|MB/s|GB/s)"
)
"""Values of ``simulated_network``: hosts, latency and bandwidth, with their units."""


def _check_value(name: str, value: Any) -> None:
    """Raise for an invalid value of a flag, which would otherwise be ignored."""
    kind = Config.__dataclass_fields__[name].type
    if type(value).__name__ != kind:
        raise errors.ArgumentError(
            f"the flag {name!r} is a {kind}, not {value!r:.60}.", fix=f"bf.config.{name} = ..."
        )
    if kind == "int" and value < 1:
        raise errors.ValueRangeError(f"the flag {name!r} cannot be {value}.", fix="it is at least 1")
    if name == "simulated_network" and value and not NETWORK.fullmatch(value.replace(" ", "")):
        raise errors.ValueRangeError(
            f"the flag {name!r} cannot be {value!r:.60}.",
            fix="hosts, the latency and the bandwidth of the link of each: '2hosts,100us,10GB/s'",
        )
    choices = STAGES if name == "debug" else _CHOICES.get(name, (value,))
    wrong = [one for one in (_stages(value) if name == "debug" else [value]) if one not in choices]
    if wrong:
        raise errors.ValueRangeError(
            f"the flag {name!r} cannot be {wrong[0]!r:.60}.", fix=f"use {', '.join(choices)}"
        )


_SWITCH = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
"""Values of on/off flags in the environment."""


def from_environment(environ=os.environ) -> Config:
    """A ``Config`` from ``BLUFUNC_*`` variables; empty ones are ignored.

    Raises:
      ValueRangeError: a flag has no such value.
    """
    values: dict[str, Any] = {}
    for f in fields(Config):
        variable = f"BLUFUNC_{f.name.upper()}"
        text = environ.get(variable)
        if not text:
            continue
        if f.type == "bool" and text.lower() not in _SWITCH:
            raise errors.ValueRangeError(f"{variable} is {text!r:.60}.", fix=f"use {', '.join(_SWITCH)}")
        if f.type == "int" and not text.isdecimal():
            raise errors.ValueRangeError(f"{variable} is {text!r:.60}.", fix="use a number")
        values[f.name] = _SWITCH[text.lower()] if f.type == "bool" else int(text) if f.type == "int" else text
    return Config(**values)


config = from_environment()
