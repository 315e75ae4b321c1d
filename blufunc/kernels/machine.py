"""The speed of a device, as cost models take it: bytes, arithmetic and launches.

Kernels, below every cost model. ``inspect/roofline.py`` measures a machine; compilation takes fixed figures, so that
programs are the same wherever they are compiled.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The speed of a device.

    Attributes:
      name: the device.
      bandwidth: bytes a second, read and written ones together.
      flops: additions of floats a second that kernels may reach; that of products, for want of a better bound.
      products: multiplications and additions a second, of products of float32 matrices.
      narrow_products: those of products of 16 bits; None: like the others.
      launch: seconds that a launch or a library call takes besides. The roofline leaves them out.
    """

    name: str
    bandwidth: float
    flops: float
    products: float
    narrow_products: float | None = None
    launch: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}: {self.bandwidth / 1e9:.0f} GB/s, {self.products / 1e9:.0f} GFLOP/s in float32 products"
