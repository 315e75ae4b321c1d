"""Causal attention in blufunc or JAX, forward and with gradients, under ``jit``.

python -m benchmarks.peers.attention --library blufunc --precision bf16

blufunc's times are from events on the device, with L2 overwritten ahead of each call; JAX's, and blufunc's second
figure, from the wall clock over back-to-back calls.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace

from benchmarks.peers import attention_cases, clock
from benchmarks.suites import kernel_cases


def main() -> None:
    """Emit two rows per case."""
    parser = attention_cases.parser()
    parser.add_argument("--library", choices=["blufunc", "jax"], required=True)
    parser.add_argument("--implementation", help="of JAX: cudnn or xla")
    o = parser.parse_args()
    packages = ("blufunc", "numpy", "cupy-cuda13x") if o.library == "blufunc" else ("jax",)
    clock.emit_versions(*packages)
    lib, attend = _jax(o) if o.library == "jax" else _blufunc(o)
    for case in attention_cases.cases(o):
        events = o.library == "blufunc" and o.platform == "cuda"
        clock.attempt(case.label("attention"), functools.partial(time_case, lib, attend, case, events))


def _blufunc(o) -> tuple:
    import blufunc as bf

    lib = kernel_cases.in_blufunc(o.platform)
    bf.config.update(
        "matmul_precision", {"tf32": "tf32", "float32_tc": "float32_tc"}.get(o.precision, "default")
    )
    return lib, functools.partial(bf.nn.dot_product_attention, is_causal=True)


def _jax(o) -> tuple:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["JAX_PLATFORMS"] = o.platform
    import jax

    exact = {"tf32": "tensorfloat32", "bf16": "default"}.get(o.precision, "highest")
    jax.config.update("jax_default_matmul_precision", exact)
    attend = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=o.implementation or "xla"
    )
    return kernel_cases.in_jax(), attend


def time_case(lib: SimpleNamespace, attend, case: attention_cases.Case, events: bool) -> None:
    """Times and errors of a case."""
    low = lib.numpy.bfloat16 if case.precision == "bf16" else lib.numpy.float32
    cast = lib.jit(lambda x: x.astype(low))
    args = [cast(lib.put(x)) for x in case.operands()]

    def both(q, k, v, ct):
        out, pullback = lib.vjp(attend, q, k, v)
        return out, *pullback(ct)

    of = {"forward": (lib.jit(attend), args[:3]), "forward and backward": (lib.jit(both), args)}
    results = [attention_cases.sampled(x) for x in of["forward and backward"][0](*args)]
    errors = attention_cases.errors([attention_cases.sampled(x) for x in args], results)
    calls = {part: lambda _, f=f, operands=operands: f(*operands) for part, (f, operands) in of.items()}
    times: dict[str, dict[str, float]] = {part: {} for part in calls}
    # event times of all parts first, in PyTorch's order: the wall clock's calls heat the device
    if events:
        from blufunc.kernels.backends.cuda.driver import driver

        for part, call in calls.items():
            times[part]["event_ms"] = clock.event_ms(call, driver.compute_stream(0))
    for part, call in calls.items():
        times[part]["wall_ms"] = clock.wall_ms(call, lib.wait)
    for part, found in times.items():
        attention_cases.tell(case, part, found.get("event_ms", found["wall_ms"]), **found, **errors)


if __name__ == "__main__":
    main()
