"""Tensor maps: arguments of the driver call, its errors, and re-encoding."""

import ctypes

import pytest

from blufunc import errors
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda.driver import driver as cuda_runtime
from blufunc.kernels.backends.cuda.driver import tensor_map
from blufunc.kernels.backends.cuda.driver.tensor_map import BYTES, Box
from blufunc.kernels.backends.cuda.library.attention import kernels as cuda_attention
from blufunc.kernels.backends.cuda.library.attention.kernels import (
    FORWARD_KERNEL,
    KEY_KERNEL,
    QUERY_KERNEL,
    Shape,
    Strides,
)

BOX = Box((64, 12, 1000, 2), (128, 1536, 1536000), (64, 1, 128, 1))


def numbers(address, ctype, count):
    return list((ctype * count).from_address(address))


@pytest.fixture
def driver(monkeypatch):
    """Fake cuTensorMapEncodeTiled: records calls and returns a given status."""

    class Driver:
        status, calls = 0, []

        def __call__(self, to, dtype, rank, address, sizes, strides, box, steps, *options):
            assert to % 64 == 0
            found = [list(x) for x in (sizes, strides, box, steps)]
            self.calls.append((dtype, rank, address, *found, *options))
            ctypes.memset(to, 7, BYTES)
            return self.status

    made = Driver()
    made.calls = []
    monkeypatch.setattr(tensor_map, "_encoder", lambda: made)
    return made


@pytest.mark.parametrize("columns, swizzle", [(16, 1), (32, 2), (64, 3)])
def test_what_the_driver_is_asked_for(driver, columns, swizzle):
    box = BOX._replace(box=(columns, 1, 128, 1))
    assert box.map(4096) == bytes([7]) * BYTES
    two_bytes, interleaved, promoted, zeros = 1, 0, 3, 0
    assert driver.calls == [
        (two_bytes, 4, 4096, [*BOX.sizes], [*BOX.strides], [columns, 1, 128, 1], [1] * 4,
         interleaved, swizzle, promoted, zeros)
    ]  # fmt: skip


def test_refusal(driver):
    driver.status = 1
    with pytest.raises(errors.UnsupportedError, match="cuTensorMapEncodeTiled returned 1"):
        BOX.map(4100)


def test_where_there_is_one_the_driver_gets_a_stride_that_it_takes(driver):
    BOX._replace(sizes=(64, 1, 1000, 1), strides=(0, 1536, 1536)).map(4096)
    assert driver.calls[0][4] == [16, 1536, 1536]


def test_a_map_is_made_anew_where_its_operand_lies_elsewhere(driver):
    arguments = cuda_runtime.Arguments([0, 0, bytes(BYTES)])
    of = tensor_map.Mapped(2, 1, BOX)
    for pointers in ([1024, 2048], [512, 2048], [512, 4096], [512, 4096], [512, 2048]):
        of.set(arguments, pointers)
    assert [address for _, _, address, *_ in driver.calls] == [2048, 4096, 2048]


def test_boxes():
    """Boxes of each kernel at 80 features, whose tiles have panels of 16."""
    shape, of = Shape(2, 100, 300, 6, 3, 80), Strides(30000, 720, 80)
    strides = dict.fromkeys(("q", "k", "v", "dout"), of)
    found = {
        kernel.entry: cuda_attention.boxes(kernel, shape, strides, kernel.tiling(80, "sm_90a"))
        for kernel in (FORWARD_KERNEL, QUERY_KERNEL, KEY_KERNEL)
    }
    queries, keys = (80, 6, 100, 2), (80, 3, 300, 2)
    rows = {entry: {n: (box.sizes, box.box[2]) for n, box in boxes.items()} for entry, boxes in found.items()}
    assert rows == {
        "attention_forward": {"q": (queries, 192), "k": (keys, 96), "v": (keys, 96)},
        "attention_query_gradient": {
            "q": (queries, 192), "k": (keys, 64), "v": (keys, 64), "dout": (queries, 192),
        },
        "attention_key_gradient": {
            "q": (queries, 64), "k": (keys, 128), "v": (keys, 128), "dout": (queries, 64),
        },
    }  # fmt: skip
    for boxes in found.values():
        for box in boxes.values():
            assert box.strides == (160, 1440, 60000)
            assert box.box[0] == 16 and max(box.box) <= 256  # limits of the driver


@pytest.mark.gpu
@pytest.mark.skipif(cuda_runtime.available() is not None, reason=str(cuda_runtime.available()))
def test_the_driver_makes_one():
    assert BOX.map(1 << 20) != bytes(BYTES)
    with pytest.raises(errors.UnsupportedError, match="rejected a tensor map"):
        BOX._replace(strides=(130, 1536, 1536000)).map(1 << 20)


@pytest.mark.parametrize(
    "features, arch, parts, masked, scored, pipelined",
    [
        (64, "sm_90a", 0, False, False, True),
        (128, "sm_90a", 0, True, False, True),
        (128, "sm_90a", 1, False, False, True),
        (64, "sm_90a", 2, False, False, False),  # tiles of two parts do not fit
        (64, "sm_90a", 0, False, True, False),  # a score modification needs the registers
        (144, "sm_90a", 0, False, False, False),
        (64, "sm_80", 0, False, False, False),
        (64, "sm_100", 0, False, False, False),
    ],
)
def test_who_has_the_pipelined_kernels(features, arch, parts, masked, scored, pipelined):
    code = cuda_attention.NO_CODE
    if masked or scored:
        code = code._replace(masked=masked, scored=scored)
    for kernel in (FORWARD_KERNEL, QUERY_KERNEL, KEY_KERNEL):
        tiling = kernel.tiling(features, arch, code, parts)
        assert (tiling.stages > 0) == pipelined
        assert (
            "TensorMap" in cuda_attention.source(kernel, dtypes.float16, features, True, tiling)
        ) == pipelined


def test_gradients_of_few_features_are_quicker_in_the_other_form():
    stages = [k.tiling(32, "sm_90a").stages for k in (FORWARD_KERNEL, QUERY_KERNEL, KEY_KERNEL)]
    assert stages[0] > 0 and stages[1:] == [0, 0]


def test_a_mask_takes_registers_from_a_group():
    code = cuda_attention.NO_CODE._replace(masked=True)
    plain, masked = (QUERY_KERNEL.tiling(128, "sm_90a", c) for c in (cuda_attention.NO_CODE, code))
    assert (plain.rows, masked.rows) == (192, 128)
