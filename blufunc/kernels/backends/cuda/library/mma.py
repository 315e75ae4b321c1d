"""Building blocks of hand-written kernels, from ``mma.cuh``, ``tma_pipeline.cuh``.

Kernels, stage 6, below ``attention``, ``split_gemm`` and ``tile_gemm``. In: the dtype of elements and the sizes of
warpgroup matmuls. Out: CUDA C++ with ``ELEMENT`` defined, which precedes the kernel; ``mma.cuh`` lists the constants
it reads. A warpgroup matmul names each of its registers, one per column pair, so its wrapper is generated here.
"""

from __future__ import annotations

from typing import NamedTuple

from blufunc.kernels.codegen import source_files

MMA = "backends/cuda/include/mma.cuh"
TMA = "backends/cuda/include/tma_pipeline.cuh"

_OF_SHARED = r"""
// c = a b, or c += a b if add, of 64 x 16 and 16 x {n}: both are in memory
inline void {name}(float (&c)[{n} / 8][4], unsigned long long a, unsigned long long b, bool add) {{
  asm volatile("{{.reg .pred add;\n setp.ne.b32 add, %{after2}, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n{n}k16.f32." ELEMENT "." ELEMENT " {{{sums}}}, %{after0}, %{after1}, "
               "add, 1, 1, {turned};}}"
               : {outputs}
               : "l"(a), "l"(b), "r"((int)add));
}}
"""

_TIMES_COLUMNS = r"""
// c += a b, of 64 x 16 and 16 x {n}: the rows of b are in memory
inline void group_times_columns(float (&c)[{n} / 8][4], const unsigned (&a)[4], unsigned long long b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32." ELEMENT "." ELEMENT " {{{sums}}}, "
               "{{%{after0}, %{after1}, %{after2}, %{after3}}}, %{after4}, 1, 1, 1, 1;"
               : {outputs}
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
"""


def panel_of(features: int) -> int:
    """Elements in a row of a tile's panel, as in ``mma.cuh``."""
    chunks = features // 8
    return 8 * min(chunks & -chunks, 8)


def slice_of(features: int, parts: int) -> int:
    """Features per float32 partial sum: registers must hold these sums twice."""
    return features // 2 if parts > 1 and features == 128 else features


class GroupSizes(NamedTuple):
    """Columns of warpgroup matmuls.

    Attributes:
      rows: those of ``times_rows``.
      columns: those of ``times_columns``.
      turned: those of ``group_times_turned``, both of whose operands store the contracted axis as rows; 0: none.
    """

    rows: int
    columns: int
    turned: int = 0


def _group_product(template: str, n: int, **more: str) -> str:
    """A warpgroup matmul with ``n`` columns."""
    count = n // 2
    return template.format(
        n=n,
        **more,
        sums=", ".join(f"%{i}" for i in range(count)),
        outputs=", ".join(f'"+f"(c[{i // 4}][{i % 4}])' for i in range(count)),
        **{f"after{i}": count + i for i in range(5)},
    )


def _instructions(dtype_name: str, *parts: str) -> str:
    """Wrappers of PTX for ``bfloat16`` or ``float16`` that do not depend on sizes."""
    element = {"bfloat16": "bf16", "float16": "f16"}[dtype_name]
    return source_files.source(MMA, "instructions", f"unpack {element}", *parts, ELEMENT=f'"{element}"')


def instructions(dtype_name: str, groups: GroupSizes | None = None) -> str:
    """The part of the source that is PTX, for ``bfloat16`` or ``float16``.

    Args:
      groups: sizes of warpgroup matmuls; None without Hopper's instructions.
    """
    if groups is None:
        return _instructions(dtype_name)
    products = _group_product(_OF_SHARED, groups.rows, name="group_times_rows", turned="0, 0")
    products += _group_product(_TIMES_COLUMNS, groups.columns)
    if groups.turned:
        products += _group_product(_OF_SHARED, groups.turned, name="group_times_turned", turned="1, 1")
    return _instructions(dtype_name, "wgmma") + products


def shared_instructions(dtype_name: str, columns: int, turned: tuple[bool, bool]) -> str:
    """PTX of TMA pipelines and warpgroup matmuls with operands in shared memory.

    Args:
      turned: of each operand, whether the rows of a tile run along the contracted axis.
    """
    how = ", ".join(str(int(t)) for t in turned)
    product = _group_product(_OF_SHARED, columns, name="multiply", turned=how)
    return _instructions(dtype_name, "wgmma") + product + source_files.source(TMA, "instructions")


def source(dtype_name: str, groups: GroupSizes | None = None) -> str:
    """Both layers, to follow their constants; arguments as for ``instructions``."""
    products = "wgmma_products" if groups else "warp_products"
    return instructions(dtype_name, groups) + source_files.source(MMA, "tiles", products, "add_columns")
