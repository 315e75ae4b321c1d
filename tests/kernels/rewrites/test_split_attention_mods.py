"""Split float32 attention kernels with ``mask_mod`` and ``score_mod``."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import nn
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.attention import kernels as cuda_attention
from blufunc.kernels.backends.cuda.library.attention.kernels import Shape
from blufunc.kernels.backends.cuda.library.attention.mods import code_of, lists
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.source_files import DEVICE
from blufunc.nn.attention import call as attention_call
from blufunc.nn.attention.mods import traced
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.emulated_mma import Emulator, maps
from tests.kernels.rewrites.test_split_float32_attention import DEVIATION, F16, IN_PARTS, KERNELS, SMALL, Case

IDS = np.sort(np.random.default_rng(0).integers(0, 4, (2, 150)), 1).astype(np.int32)
BIAS = (np.random.default_rng(1).standard_normal((4, 21)) * 30).astype(np.float32)

# mask_mod, score_mod
MODS = {
    "documents": (nn.masks.document(IDS), None),
    "some see nothing": (lambda b, h, q, k: (q > 40) & (k < 20) & (h != 1), None),
    "large biases": (nn.masks.sliding_window(50), nn.score_mods.relative_bias(BIAS)),
    "biases that hide": (None, lambda s, b, h, q, k: s + bnp.where((q - k) % 3 == b, 0.0, -bnp.inf)),
    "soft cap": (nn.masks.document(IDS), nn.score_mods.soft_cap(1.5)),
    "slopes": (None, lambda s, b, h, q, k: bnp.where(h == 0, 1e-6, 1e3) * bnp.tanh(s * 1e-2)),
}


def given(name):
    """The mods of a name, their tables, and the code of a kernel."""
    mods, tables = traced(*MODS[name], np.dtype(np.float32))
    return mods, tables, code_of(mods, tuple(t.aval for t in tables))


class Modified(Case):
    """A case with mods; what is right is the definition, in float64."""

    def __init__(self, name, shape, parts, sizes):
        super().__init__(shape, parts, sizes)
        self.mods, self.tables, self.code = given(name)
        self.numbers = [np.arange(n, dtype=np.int32) for n in (shape.batch, shape.heads)]

    def results(self, dtype, causal):
        extras = [*map(bnp.asarray, self.numbers), *self.tables]
        how = {"scale": self.scale, "is_causal": causal, "mods": self.mods}
        q, k, v, dout = (bnp.asarray(self.whole[n].astype(dtype)) for n in IN_PARTS)
        out, lse = attention_call._forward(q, k, v, *extras, **how)
        found = out, lse, *attention_call._backward(q, k, v, out, lse, dout, *extras, **how)
        return dict(zip(("out", "lse", "dq", "dk", "dv"), map(np.asarray, found), strict=True))

    def deviations(self, causal):
        """Rows that see nothing have the logarithm minus infinity in both."""
        want = self.results(np.float64, causal)
        nothing = want["lse"] == -np.inf
        assert (self.arrays["lse"][nothing] == -np.inf).all()
        want["lse"], self.arrays["lse"] = (np.where(nothing, 1, x) for x in (want["lse"], self.arrays["lse"]))
        return {n: np.abs(self.arrays[n] - x).max() / np.abs(x).max() for n, x in want.items()}

    def run(self, emulator, causal, arch):
        """All kernels, each after that of its lists."""
        types = {"scratch": "float2 *"} | dict.fromkeys(("out", "dq", "dk", "dv", "lse"), "float *")
        for kernel in KERNELS:
            tiling = kernel.tiling(self.shape.features, arch, self.code, self.parts)
            made = np.full(kernel.list_bytes(self.shape, tiling, self.code) // 4 + 1, -1, np.int32)
            extras = [("const int *", n) for n in (*self.numbers, made)]
            extras += [(f"const {scalar_ops.storage_type(t.dtype)} *", np.asarray(t)) for t in self.tables]
            extras += [("Problem", cuda_attention.problem(kernel, self.shape, self.scale, self.strides()))]
            if self.code.masked:
                rows = kernel.tiles_of(self.shape, tiling)[0]
                grid = lists(self.code, self.shape.batch, self.shape.heads, rows)
                self.launch(emulator, kernel.lists, tiling, causal, extras, grid, 0)
            own = [(types.get(n, "unsigned short *"), self.arrays[n]) for n in kernel.operands]
            own += [("unsigned short *", self.rests[n]) for n in IN_PARTS]
            own += [("float *", self.units[n]) for n in IN_PARTS]
            shared = kernel.shared_bytes(self.shape.features, tiling, self.parts)
            grid = kernel.blocks(self.shape, tiling)
            given = [*own, *extras, *maps(kernel, self.shape, self.strides(), tiling, self.arrays)]
            self.launch(emulator, kernel, tiling, causal, given, grid, shared)

    def launch(self, emulator, kernel, tiling, causal, parameters, grid, shared):
        features = self.shape.features
        sizes = cuda_attention.group_sizes(features, tiling, self.parts)
        emulator.launch(
            cuda_attention.source(kernel, F16, features, causal, tiling, self.code, self.parts),
            mma.instructions("float16", sizes),
            "float16", kernel.entry, parameters, grid, tiling.launched if shared else tiling.threads, shared,
        )  # fmt: skip


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("split_attention_mods"))


ONES = 1, 1, 1, 1
CASES = [(name, Shape(2, 70, 130, 4, 2, 16), 2, False, "sm_80", ONES) for name in MODS]
CASES += [
    ("documents", Shape(1, 130, 130, 2, 1, 64), 1, True, "sm_90a", SMALL),
    ("large biases", Shape(1, 130, 130, 2, 1, 64), 1, False, "sm_80", ONES),
    ("large biases", Shape(1, 70, 150, 2, 1, 128), 2, True, "sm_90a", SMALL),
    ("soft cap", Shape(1, 150, 70, 2, 1, 64), 2, True, "sm_90a", SMALL),
    ("soft cap", Shape(1, 70, 70, 2, 2, 128), 2, True, "sm_90a", ONES),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, shape, parts, causal, arch, sizes", CASES)
def test_kernels_on_the_host(emulator, name, shape, parts, causal, arch, sizes):
    case = Modified(name, shape, parts, sizes)
    case.run(emulator, causal, arch)
    for result, deviation in case.deviations(causal).items():
        assert deviation < 2 * DEVIATION[parts], result


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("features", [64, 128])
def test_compiles(features, arch):
    """Two parts, a mask and slopes: few spills, except for sums of many features."""
    *_, code = given("soft cap")
    for kernel in KERNELS:
        tiling = kernel.tiling(features, arch, code, 2)
        text = DEVICE.with_prelude(cuda_attention.source(kernel, F16, features, True, tiling, code, 2))
        binary = nvrtc.build(text, arch, kernel.entry)
        assert resources(binary)[kernel.entry].spill_stores <= (32 if features <= 64 else 240)
        assert "serialized" not in binary.log
