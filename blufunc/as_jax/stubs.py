"""Names that libraries import and use with XLA only: they say so when used.

Under the face ``as_jax``. A stub of a class is a class, so that ``isinstance`` and unions work, and none of its
instances exists. No class on which libraries choose a derivative is a stub: they would silently take the wrong branch.
"""

from __future__ import annotations

from typing import Any

from blufunc import errors

# For each module of JAX: classes, and functions (with parentheses).
STUBS: dict[str, str] = {
    "jax.core": "AbstractToken Token DebugInfo JaxprPpContext JaxprPpSettings",
    "jax.extend.core": "CallPrimitive DebugInfo Token AbstractToken",
    "jax._src.earray": "EArray",
    "jax._src.literals": "LiteralArray",
    "jax._src.state.types": "AbstractRef",
    "jax.experimental.array_serialization.serialization": "GlobalAsyncCheckpointManager get_tensorstore_spec()",
    "jax.experimental.array_serialization.tensorstore_impl": "async_serialize() async_deserialize()",
    "jax.experimental.colocated_python": "colocated_python() colocated_python_class() colocated_cpu_devices()",
    "jax.experimental.topologies": "TopologyDescription get_topology_desc()",
    "jax.extend.ifrt_programs": "Program",
    "jax.interpreters.ad": "JVPTrace",
    "jax.interpreters.mlir": "LoweringRuleContext emit_python_callback()",
    "jax.interpreters.partial_eval": "DynamicJaxprTracer JaxprTracer trace_to_jaxpr_dynamic() dce_jaxpr()",
    "jax._src.interpreters.pxla": "MeshPspecSharding",
    "jax.sharding": "PmapSharding GSPMDSharding",
}


class _Stub(type):
    """The class of classes without instances."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("_is_stub"):
            raise _missing(cls.__module__, cls.__name__)
        return super().__call__(*args, **kwargs)


def _missing(module: str, name: str) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        f"{module}.{name} is not in blufunc.",
        why="blufunc serves the name so that libraries can be imported; what it does needs XLA, or is not there yet.",
    )


def find(module: str, name: str) -> Any:
    """The stub of a name, or None."""
    listed = STUBS.get(module, "").split()
    if name in listed:
        return _Stub(
            name, (), {"_is_stub": True, "__module__": module, "__doc__": f"A stub of {module}.{name}."}
        )
    if name + "()" in listed:

        def stub(*args: Any, **kwargs: Any) -> Any:
            raise _missing(module, name)

        stub.__name__ = name
        return stub
    return None


def names(module: str) -> list[str]:
    """The stubs of a module."""
    return [name.removesuffix("()") for name in STUBS.get(module, "").split()]
