"""Causal attention in PyTorch, by one of its backends; needs torch and NumPy.

    python -m benchmarks.peers.attention_torch --backend cudnn --precision bf16

Device times are from Triton's ``do_bench``: events around each call, with L2 overwritten in between. Every backend gets
its preferred layout, [batch, heads, tokens, features].
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers import attention_cases, clock
from benchmarks.peers.kernels_torch import milliseconds

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def main() -> None:
    """Emit two rows per case."""
    parser = attention_cases.parser()
    parser.add_argument("--backend", choices=list(BACKENDS), help="by default PyTorch chooses")
    parser.add_argument("--compile", action="store_true")
    o = parser.parse_args()
    clock.emit_versions("torch", "triton")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = o.precision == "tf32"
    for case in attention_cases.cases(o):
        clock.attempt(case.label("attention"), functools.partial(time_case, case, o))


def time_case(case: attention_cases.Case, o) -> None:
    """Times and errors of a case."""
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    first = [torch.from_numpy(x).to(o.platform).to(dtype) for x in case.operands()]
    q, k, v, ct = (x.transpose(1, 2).contiguous().requires_grad_() for x in first)
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    attend = torch.compile(attend, dynamic=False) if o.compile else attend

    def forward():
        with torch.no_grad():
            return attend(q, k, v)

    def both():
        out = attend(q, k, v)
        return out, *torch.autograd.grad(out, (q, k, v), ct)

    with sdpa_kernel(BACKENDS[o.backend]) if o.backend else torch.enable_grad():
        results = [attention_cases.sampled(x.detach().transpose(1, 2).double().cpu().numpy()) for x in both()]
        operands = [attention_cases.sampled(x.double().cpu().numpy()) for x in first]
        errors = attention_cases.errors(operands, results)
        for part, call in zip(attention_cases.PARTS, (forward, both), strict=True):
            attention_cases.tell(case, part, milliseconds(call, o.platform), **errors)


if __name__ == "__main__":
    main()
