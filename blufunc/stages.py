"""The stages of ``jit`` under the names of JAX's ``stages``.

Face over ``transforms.staging``.
"""

from blufunc.transforms.staging.jit import Jitted as Wrapped
from blufunc.transforms.staging.signatures import ArgInfo
from blufunc.transforms.staging.stages import Compiled, Lowered, Traced

__all__ = ["ArgInfo", "Compiled", "CompilerOptions", "Lowered", "Traced", "Wrapped"]

CompilerOptions = dict[str, str | bool]
