"""The intermediate representation, arrays and primitives.

In: Python values and functions. Out: jaxprs, and arrays computed eagerly. Independent of transforms and
backends. Packages, bottom first: ``ir``, ``pytree``, ``arrays``, ``primitives``, ``ops``, ``programs``.

Its names are those of JAX's ``core``, for programs that read jaxprs; ``extend.core`` has more of them.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.core.ir.avals import AbstractValue as AbstractValue
    from blufunc.core.ir.avals import ShapedArray as ShapedArray
    from blufunc.core.ir.check import check_jaxpr as check_jaxpr
    from blufunc.core.ir.jaxpr import Atom as Atom
    from blufunc.core.ir.jaxpr import DropVar as DropVar
    from blufunc.core.ir.jaxpr import Eqn as JaxprEqn  # noqa: F401
    from blufunc.core.ir.jaxpr import Jaxpr as ClosedJaxpr  # noqa: F401
    from blufunc.core.ir.jaxpr import Jaxpr as Jaxpr
    from blufunc.core.ir.jaxpr import Literal as Literal
    from blufunc.core.ir.jaxpr import Var as Var
    from blufunc.core.ir.trace import Trace as Trace
    from blufunc.core.ir.trace import Tracer as Tracer
    from blufunc.core.primitives.primitive import Primitive as Primitive
    from blufunc.core.programs.interpret import ParamDict as ParamDict
    from blufunc.core.programs.interpret import Value as Value
    from blufunc.core.programs.interpret import ensure_compile_time_eval as ensure_compile_time_eval
    from blufunc.core.programs.interpret import eval_context as eval_context
    from blufunc.core.programs.interpret import eval_jaxpr as eval_jaxpr
    from blufunc.core.programs.interpret import get_aval as get_aval
    from blufunc.core.programs.interpret import jaxpr_as_fun as jaxpr_as_fun
    from blufunc.core.programs.interpret import max_dim as max_dim
    from blufunc.core.programs.interpret import min_dim as min_dim
