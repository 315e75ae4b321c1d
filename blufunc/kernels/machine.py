"""Speed of a device for cost models: bandwidth, arithmetic and launch latency.

Kernels, below every cost model. In: nothing; ``inspect/roofline.py`` measures a machine, compilation takes constants,
so that programs are the same wherever they are compiled. Out: a ``Machine``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The speed of a device.

    Attributes:
      name: the device.
      bandwidth: bytes per second, reads and writes together.
      flops: peak float additions per second of kernels; that of matmuls, for lack of a better bound.
      products: multiplications and additions per second of float32 matmuls.
      narrow_products: the same for 16-bit matmuls; default None: as ``products``.
      launch: seconds of overhead per launch or library call, not in the roofline; default 0.
      host_link: bytes per second between the device and page-locked memory of its host, in each direction; default 0:
        there is one memory.
      copy: seconds of overhead per copy on that link; default 0.
    """

    name: str
    bandwidth: float
    flops: float
    products: float
    narrow_products: float | None = None
    launch: float = 0.0
    host_link: float = 0.0
    copy: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}: {self.bandwidth / 1e9:.0f} GB/s, {self.products / 1e9:.0f} GFLOP/s in float32 products"
