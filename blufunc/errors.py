"""Error classes of blufunc, and the common structure of their messages.

Before the path of a program: it imports nothing of the package.

A message says what happened, where (the user's line), why, and the fix. Each class also derives from the
builtin exception that a Python programmer would expect to catch, so that ``except TypeError`` keeps working.
"""

from __future__ import annotations


class BlufuncError(Exception):
    """Base of all errors that blufunc raises deliberately.

    Args:
      what: one sentence: what happened, naming the argument, path or value.
      where: the user's source line, as a string (see ``core.ir.source.describe``).
      why: the reason, if ``what`` does not make it obvious.
      fix: what to write instead, as code where possible.
    """

    def __init__(
        self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None
    ):
        self.what, self.where, self.why, self.fix = what, where, why, fix
        lines = [what]
        for label, text in (("at", where), ("why", why), ("fix", fix)):
            if text:
                lines.append(f"  {label + ':':<5}" + str(text).replace("\n", "\n       "))
        super().__init__("\n".join(lines))

    def __reduce__(self):
        kwargs = {"where": self.where, "why": self.why, "fix": self.fix}
        return (_rebuild, (type(self), self.what, kwargs))


def _rebuild(cls, what, kwargs):
    return cls(what, **kwargs)


class ShapeError(BlufuncError, TypeError, ValueError):
    """Shapes that an operation does not accept."""


class DtypeError(BlufuncError, TypeError, ValueError):
    """Dtypes that an operation does not accept, or promotion that is not allowed."""


class ArgumentError(BlufuncError, TypeError, ValueError):
    """An argument that is not an array, pytree or option of the expected kind."""


class CheckError(BlufuncError, ValueError, RuntimeError):
    """A failed ``checkify.check``, or an automatic check of ``checkify``."""


class ValueRangeError(BlufuncError, ValueError):
    """An argument of the right kind whose value is out of range."""


class IndexRangeError(BlufuncError, IndexError):
    """An index, or a number of indices, out of range for an array."""


class AxisRangeError(ValueRangeError, IndexError):
    """An axis out of range for an array, as ``numpy.exceptions.AxisError``."""


class TreeError(BlufuncError, ValueError, TypeError):
    """Pytrees whose structures differ, or that hold leaves that are not arrays."""


class VmapSizeError(BlufuncError, ValueError):
    """Arguments of ``vmap`` whose mapped axes have different sizes, or do not exist."""


class AxisNameError(BlufuncError, NameError):
    """A collective over a named axis that no ``vmap`` or ``shard_map`` around it has."""


class ShardingError(BlufuncError, ValueError):
    """A mesh, spec or sharding that does not fit devices, array or other shardings."""


class GradError(BlufuncError, TypeError):
    """No derivative exists: a non-scalar output, an integer input, a missing rule."""


class ClosureError(GradError):
    """A function with derivative rules of its own closes over what is differentiated."""


class ConcretizationError(BlufuncError, TypeError):
    """A traced value where Python needs a concrete one: ``bool``, ``int``, an index."""


class LeakedTracerError(BlufuncError, RuntimeError, TypeError):
    """A traced value used after the end of its transform."""


class ImmutableArrayError(BlufuncError, TypeError):
    """In-place assignment to an array."""


class DonatedArrayError(BlufuncError, RuntimeError):
    """An array used after it was donated to a ``jit`` call."""


class StaticArgumentError(BlufuncError, ValueError):
    """A static argument that is unhashable or missing."""


class RetraceError(BlufuncError, RuntimeError):
    """``jit(max_traces=...)`` was exceeded."""


class CarryError(BlufuncError, TypeError):
    """A loop body that changes the type of its carry."""


class BranchError(BlufuncError, TypeError):
    """The branches of ``cond`` or ``switch`` return different structures or types."""


class JaxprTypeError(BlufuncError, TypeError):
    """An ill-typed jaxpr or rule result: an error in a rule or transform."""


class UnsupportedError(BlufuncError, NotImplementedError):
    """A named combination that blufunc does not support."""


class KeyReuseError(BlufuncError, ValueError, TypeError):
    """A random key that was used before, found with ``config.debug_key_reuse``."""


class NanError(BlufuncError, FloatingPointError):
    """A NaN or infinite result, found with ``config.debug_nans`` or ``debug_infs``."""


class InteropError(BlufuncError, BufferError):
    """An array that cannot be passed to, or taken from, another library."""


class DataError(BlufuncError, ValueError):
    """A file that is missing, damaged or of another format, or cannot be written."""


class DeviceError(BlufuncError, RuntimeError):
    """Base of what goes wrong on a device while programs are compiled and run."""


class CompileError(DeviceError):
    """Generated source that its compiler rejected; shows its line and the user's."""


class OutOfMemoryError(DeviceError, MemoryError):
    """Insufficient device memory for an array or a program; lists the largest users."""


class MemoryBudgetError(BlufuncError, ValueError):
    """A ``memory_budget`` without a plan; shows the minimum and its live values."""


class CollectiveError(DeviceError):
    """A failed collective: a rank failed, ended or is late, or collectives differ."""


class HostPrimitiveWarning(UserWarning):
    """A primitive without ``lower=`` in a compiled program: NumPy runs it on the host."""


# -- names that JAX's users catch --------------------------------------------------------------------

ConcretizationTypeError = TracerBoolConversionError = TracerIntegerConversionError = ConcretizationError
TracerArrayConversionError = ConcretizationError


class NonConcreteBooleanIndexError(ConcretizationError, IndexError):
    """A traced array of booleans as an index: the size of the result is not known."""


UnexpectedTracerError = LeakedTracerError
JAXTypeError, JAXIndexError = ConcretizationError, IndexRangeError
JaxRuntimeError = DeviceError


class InconclusiveDimensionOperation(Exception):
    """A comparison of symbolic sizes: never raised, as sizes are integers."""
