"""Programs, and which of their results are weakly typed like Python numbers.

In: programs over the names of ``names``. Out: ``TYPES``, by group and text: the types of the leaves of the result as
jaxprs print them, ``~`` for weak ones. The test here holds blufunc to it; one of ``tests/peers`` compares with JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as onp

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.dtypes import SCALARS, short_name

_TABLE: dict[str, str] = {
    "grad": """
        jax.grad(lambda x: x*x)(2.0) => ~f32[]
        jax.grad(np.sin)(2.0) => ~f32[]
        jax.grad(lambda x: x**3)(2.0) => ~f32[]
        jax.grad(lambda x: x*x)(f0) => f32[]
        jax.grad(lambda x, y: x*y, argnums=(0,1))(2.0, f0) => ~f32[] f32[]
        jax.grad(lambda x, y: x*y, argnums=1)(f0, 2.0) => ~f32[]
        jax.grad(lambda x: (x*f1).sum())(2.0) => ~f32[]
        jax.grad(lambda x: (x*b1).sum())(2.0) => ~f32[]
        jax.grad(lambda p: p["a"]*p["b"])({"a": 2.0, "b": f0}) => ~f32[] f32[]
        jax.grad(lambda x: f0)(2.0) => ~f32[]
        jax.grad(lambda x, y: y, argnums=(0,1))(2.0, f0) => ~f32[] f32[]
        jax.grad(lambda x: x)(2.0) => ~f32[]
        jax.grad(lambda x: 1.0)(2.0) => ~f32[]
        jax.grad(lambda x: (x*x, x+1), has_aux=True)(2.0) => ~f32[] ~f32[]
        jax.grad(jax.grad(lambda x: x**3))(2.0) => ~f32[]
        jax.grad(jax.jit(lambda x: x*x))(2.0) => ~f32[]
        jax.jit(jax.grad(lambda x: x*x))(2.0) => ~f32[]
        jax.jit(jax.grad(lambda x: x*x))(f0) => f32[]
        jax.grad(lambda x: (x*x).real, holomorphic=False)(2.0+1j) => ~c64[]
        jax.grad(lambda x: x*x, holomorphic=True)(2.0+1j) => ~c64[]
        jax.value_and_grad(lambda x: x*x)(3.0) => ~f32[] ~f32[]
        jax.value_and_grad(lambda x: x*f0)(3.0) => f32[] ~f32[]
        jax.value_and_grad(lambda x: (x*f0, x), has_aux=True)(3.0) => f32[] ~f32[] ~f32[]
        jax.jit(jax.value_and_grad(lambda x: x*x))(3.0) => ~f32[] ~f32[]
        jax.grad(lambda x: x*x)(onp.float32(3.0)) => f32[]
        jax.grad(lambda x: x*x)(np.asarray(3.0)) => ~f32[]
        jax.grad(lambda x: x*x)(np.float16(3.0)) => f16[]
        jax.vmap(jax.grad(lambda x: x*x))(f1) => f32[4]
        jax.grad(jax.checkpoint(lambda x: np.sin(x)*x))(1.0) => ~f32[]
        jax.jit(jax.grad(jax.checkpoint(lambda x: np.sin(x)*x)))(1.0) => ~f32[]
        jax.eval_shape(jax.grad(lambda x: x*x), 1.0) => ~f32[]
        jax.grad(jax.nn.relu)(2.0) => ~f32[]
        jax.grad(jax.nn.gelu)(2.0) => ~f32[]
        jax.grad(jax.nn.silu)(2.0) => ~f32[]
        jax.grad(jax.nn.softplus)(2.0) => ~f32[]
        jax.grad(np.logaddexp)(2.0, 1.0) => ~f32[]
        jax.grad(np.sqrt)(2.0) => ~f32[]
        jax.grad(np.abs)(2.0) => ~f32[]
        jax.grad(lambda x: np.where(x > 0, x, 0.0))(2.0) => ~f32[]
        jax.grad(lambda x: np.maximum(x, 0))(2.0) => ~f32[]
        jax.grad(lambda x: x ** 2.5)(2.0) => ~f32[]
        jax.grad(lambda x: np.log(np.exp(x)+1))(2.0) => ~f32[]
        jax.grad(np.tanh)(2.0) => ~f32[]
        jax.grad(lambda x: np.sum(np.stack([x, x])))(2.0) => ~f32[]
        jax.grad(lambda x: np.array([x, 2*x]).sum())(2.0) => ~f32[]
        jax.grad(lambda x: f1.at[0].set(x).sum())(2.0) => ~f32[]
        jax.grad(lambda x: np.full((3,), x).sum())(2.0) => ~f32[]
        jax.grad(lambda x: x.astype("bfloat16") * 2)(2.0) => ~f32[]
        jax.grad(lambda x: np.polyval(f1, x))(2.0) => ~f32[]
        jax.grad(lambda x: np.linalg.norm(x * f1))(2.0) => ~f32[]
        jax.grad(lambda x: lax.custom_root(lambda y: y*y - x, 1.0, lambda f, y: y + 0.4142135,
            lambda g, y: y / g(1.0)))(2.0)
            => ~f32[]
    """,
    "derivatives": """
        jax.jvp(np.sin, (1.0,), (1.0,)) => ~f32[] ~f32[]
        jax.jvp(lambda x, y: x*y, (1.0, f0), (1.0, f0)) => f32[] f32[]
        jax.jvp(np.sin, (f0,), (f0,)) => f32[] f32[]
        jax.jvp(lambda x: f0, (1.0,), (1.0,)) => f32[] f32[]
        jax.jvp(lambda x: x, (1.0,), (1.0,)) => ~f32[] ~f32[]
        jax.jvp(jax.jit(lambda x: x*x), (2.0,), (1.0,)) => ~f32[] ~f32[]
        (lambda r: (r[0], r[1](1.0)))(jax.vjp(lambda x: x*x, 2.0)) => ~f32[] ~f32[]
        (lambda r: (r[0], r[1](r[0])))(jax.vjp(lambda x: x*f0, 2.0)) => f32[] ~f32[]
        (lambda r: (r[0], r[1](r[0])))(jax.vjp(lambda x, y: x*y, 2.0, f0)) => f32[] ~f32[] f32[]
        (lambda r: (r[0], r[1](r[0])))(jax.vjp(lambda x, y: y*y, 2.0, f0)) => f32[] ~f32[] f32[]
        (lambda r: (r[0], r[1](r[0])))(jax.vjp(lambda x: x, 2.0)) => ~f32[] ~f32[]
        (lambda r: (r[0], r[1](1.0)))(jax.linearize(lambda x: x*x, 2.0)) => ~f32[] ~f32[]
        (lambda r: (r[0], r[1](1.0)))(jax.linearize(lambda x: x*f0, 2.0)) => f32[] f32[]
        jax.linear_transpose(lambda x: x*2, 2.0)(1.0) => ~f32[]
        jax.jacfwd(lambda x: x*x)(2.0) => ~f32[]
        jax.jacrev(lambda x: x*x)(2.0) => ~f32[]
        jax.jacrev(lambda x: x*f1)(2.0) => f32[4]
        jax.jacfwd(lambda x: x*f1)(2.0) => f32[4]
        jax.hessian(lambda x: x*x*x)(2.0) => ~f32[]
        jax.grad(lambda x, y: x ** y, argnums=(0, 1))(2.0, 3.0) => ~f32[] ~f32[]
    """,
    "scan": """
        lax.scan(lambda c, x: (c*2, c), 1.0, None, length=3) => ~f32[] f32[3]
        lax.scan(lambda c, x: (c+x, c), 1.0, f1) => f32[] f32[4]
        lax.scan(lambda c, x: (c+x, c), 1, f1) => f32[] f32[4]
        lax.scan(lambda c, x: (c+x, c), 1.0, b1) => bf16[] bf16[4]
        lax.scan(lambda c, x: (c+x, c), 1, s1) => i8[] i8[4]
        lax.scan(lambda c, x: (1.0, c), f0, f1) => ~f32[] f32[4]
        lax.scan(lambda c, x: ((c[1], c[1]+x), None), (1.0, 2.0), f1) => ~f32[] f32[]
        lax.scan(lambda c, x: ((c[1], c[0]), None), (1.0, f0), None, length=2) => f32[] ~f32[]
        lax.scan(lambda c, x: ((c[0]*2, c[1]+x), c[0]), (1.0, 2.0), f1) => ~f32[] f32[] f32[4]
        lax.scan(lambda c, x: (c*1.5, c), 1, None, length=3) => f32[] f32[3]
        lax.scan(lambda c, x: (c & True, c), True, None, length=3) => bool[] bool[3]
        lax.scan(lambda c, x: (c, 1.0), 1.0, None, length=3) => ~f32[] f32[3]
        lax.scan(lambda c, x: (c*2, c), 1.0, None, length=0) => ~f32[] f32[0]
        lax.scan(lambda c, x: (c+x, c), 1.0, f1[:0]) => f32[] f32[0]
        lax.scan(lambda c, x: (0.0, c), 1.0, None, length=2) => ~f32[] f32[2]
        jax.jit(lambda a: lax.scan(lambda c, x: (c*2, c), a, None, length=3))(1.0) => ~f32[] f32[3]
        jax.jit(lambda a: lax.scan(lambda c, x: (c*a, c), 1.0, None, length=3))(f0) => f32[] f32[3]
        jax.grad(lambda a: lax.scan(lambda c, x: (c*a, None), 1.0, None, length=3)[0])(2.0) => ~f32[]
        jax.grad(lambda a: lax.scan(lambda c, x: (c*2, None), a, None, length=3)[0])(2.0) => ~f32[]
        jax.grad(lambda a: lax.scan(lambda c, x: (c*x, None), a, f1+1)[0])(2.0) => ~f32[]
        jax.jvp(lambda a: lax.scan(lambda c, x: (c*2, None), a, None, length=3)[0], (2.0,), (1.0,))
            => ~f32[] ~f32[]
        jax.vmap(lambda a: lax.scan(lambda c, x: (c*2, None), a, None, length=3)[0])(f1) => f32[4]
        jax.vmap(lambda a: lax.scan(lambda c, x: (c+x, None), 1.0, a)[0])(f2) => f32[3]
        lax.map(lambda x: 1.0, f1) => f32[4]
        lax.map(lambda x: x*2, i1) => i32[4]
        jax.grad(lambda a: lax.scan(jax.checkpoint(lambda c, x: (c*a, None)), 1.0, None, length=3)[0])(2.0)
            => ~f32[]
        lax.scan(lambda c, x: ({"n": c["n"]+1, "s": c["s"]+x}, c["n"]), {"n": 0, "s": 0.0}, f1)
            => ~i32[] f32[] i32[4]
        lax.scan(lambda c, x: (c+1, c), 0, f1) => ~i32[] i32[4]
        lax.scan(lambda c, x: (c, c*x), 2.0, b1) => ~f32[] bf16[4]
        lax.scan(lambda c, x: (2.5, None), 1, None, length=2) => ~f32[]
    """,
    "while_loop": """
        lax.while_loop(lambda c: c < 10, lambda c: c*2, 1.0) => ~f32[]
        lax.while_loop(lambda c: c < 10, lambda c: c*2, 1) => ~i32[]
        lax.while_loop(lambda c: c < 10, lambda c: c*2+f0, 1.0) => f32[]
        lax.while_loop(lambda c: c < 10, lambda c: c*2+f0, 1) => f32[]
        lax.while_loop(lambda c: c < 10, lambda c: c*1.5, 1) => f32[]
        lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0]+1, c[1]*2), (0, 1.0)) => ~i32[] ~f32[]
        lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0]+1, c[1]*f0), (0, 1.0)) => ~i32[] f32[]
        lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0]+1, c[2], c[1]*f0), (0, 1.0, 2.0))
            => ~i32[] ~f32[] f32[]
        lax.while_loop(lambda c: c < 1, lambda c: 2.0, f0) => ~f32[]
        lax.while_loop(lambda c: c < 10, lambda c: c+np.int8(2), 1) => i8[]
        jax.jvp(lambda a: lax.while_loop(lambda c: c < 10, lambda c: c*2, a), (1.0,), (1.0,))
            => ~f32[] ~f32[]
        jax.vmap(lambda a: lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0]+a, c[1]+1), (0.0,
            0)))(np.abs(f1)+1)
            => f32[4] i32[4]
        lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0]+1, c[1]*c[0]), (0, b1)) => ~i32[] bf16[4]
        lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0]+1.0, c[1]*c[0]), (0.0, b1)) => ~f32[] bf16[4]
    """,
    "fori_loop": """
        lax.fori_loop(0, 3, lambda i, c: c*2, 1.0) => ~f32[]
        lax.fori_loop(0, 3, lambda i, c: c+i, 1) => ~i32[]
        lax.fori_loop(0, 3, lambda i, c: c+i, 1.0) => ~f32[]
        lax.fori_loop(0, 3, lambda i, c: i, 1) => ~i32[]
        lax.fori_loop(0, 3, lambda i, c: c+i, f0) => f32[]
        lax.fori_loop(0, 3, lambda i, c: c+i, np.int8(3)) => i8[]
        lax.fori_loop(0, 3, lambda i, c: c*i, s1) => i8[4]
        lax.fori_loop(0, 3, lambda i, c: c*i, b1) => bf16[4]
        lax.fori_loop(0, 3, lambda i, c: c*f0, 1.0) => f32[]
        jax.jit(lambda n: lax.fori_loop(0, n, lambda i, c: c+i, 0))(3) => ~i32[]
        jax.jit(lambda n: lax.fori_loop(0, n, lambda i, c: c+i, 0))(np.int32(3)) => ~i32[]
        lax.fori_loop(onp.int32(0), onp.int32(3), lambda i, c: c+i, 0) => ~i32[]
        lax.fori_loop(np.int8(0), np.int8(3), lambda i, c: c+i, 0) => i8[]
        lax.fori_loop(0, np.int8(3), lambda i, c: c+i, 0) => i8[]
        lax.fori_loop(0, 0, lambda i, c: c+f0, 1.0) => f32[]
        lax.fori_loop(3, 0, lambda i, c: c*2, 1.0) => ~f32[]
        jax.grad(lambda a: lax.fori_loop(0, 3, lambda i, c: c*a, 1.0))(2.0) => ~f32[]
        lax.fori_loop(0, 3, lambda i, c: (c[0]*0.5, c[1]*c[0]), (1.0, b1)) => ~f32[] bf16[4]
    """,
    "cond": """
        lax.cond(True, lambda: 1.0, lambda: 2.0) => ~f32[]
        lax.cond(True, lambda: 1.0, lambda: f0) => f32[]
        lax.cond(True, lambda: 1, lambda: 2.0) => ~f32[]
        lax.cond(True, lambda: 1, lambda: f0) => f32[]
        lax.cond(True, lambda: 1, lambda: np.int8(1)) => i8[]
        lax.cond(True, lambda x: x, lambda x: x*2, 3.0) => ~f32[]
        lax.cond(True, lambda x: x*f0, lambda x: x*2, 3.0) => ~f32[]
        lax.cond(True, lambda x: (x, f0), lambda x: (x*2, x), 3.0) => ~f32[] ~f32[]
        jax.jit(lambda p, x: lax.cond(p, lambda: x, lambda: x*2))(True, 3.0) => ~f32[]
        jax.grad(lambda x: lax.cond(True, lambda: x, lambda: x*2))(3.0) => ~f32[]
        jax.grad(lambda x: lax.cond(True, lambda: x*f0, lambda: x*2))(3.0) => ~f32[]
        jax.jvp(lambda x: lax.cond(True, lambda: x, lambda: x*2), (3.0,), (1.0,)) => ~f32[] ~f32[]
        jax.vmap(lambda x: lax.cond(x > 0, lambda: 1.0, lambda: 2.0))(f1) => f32[4]
        jax.vmap(lambda x: lax.cond(True, lambda: x, lambda: 2.0))(f1) => f32[4]
        lax.switch(1, [lambda: 1.0, lambda: 2.0, lambda: 3.0]) => ~f32[]
        lax.switch(1, [lambda: 1.0, lambda: f0, lambda: 3.0]) => ~f32[]
        lax.switch(1, [lambda x: x, lambda x: x*2], 3) => ~i32[]
        lax.switch(1, [lambda: 1, lambda: b1[0], lambda: 3.0]) => bf16[]
        lax.cond(False, lambda x: x, lambda x: 1, f0) => f32[]
    """,
    "vmap": """
        jax.vmap(lambda x: 1.0)(f1) => f32[4]
        jax.vmap(lambda x, y: y, in_axes=(0, None))(f1, 2.0) => f32[4]
        jax.vmap(lambda x, y: y*2, in_axes=(0, None), out_axes=None)(f1, 2.0) => ~f32[]
        jax.vmap(lambda x, y: x*y, in_axes=(0, None))(b1, 2.0) => bf16[4]
        jax.vmap(lambda x, y: x*y, in_axes=(0, None))(i1, 2.0) => f32[4]
        jax.vmap(jax.grad(lambda x, y: x*y), in_axes=(None, 0))(2.0, f1) => f32[4]
        jax.vmap(lambda x: lax.psum(1, "i"), axis_name="i", out_axes=None)(f1) => ~i32[]
        jax.vmap(lambda x: lax.psum(1.0, "i"), axis_name="i", out_axes=None)(f1) => ~f32[]
        jax.vmap(lambda x: lax.axis_index("i"), axis_name="i")(f1) => i32[4]
    """,
    "jit": """
        jax.jit(lambda x: x*2)(1.5) => ~f32[]
        jax.jit(lambda: 1.5)() => ~f32[]
        jax.jit(lambda: 1)() => ~i32[]
        jax.jit(lambda: True)() => bool[]
        jax.jit(lambda x: x)(1.5) => ~f32[]
        jax.jit(lambda x: (x, 1, True))(2) => ~i32[] ~i32[] bool[]
        jax.jit(lambda x: x)(onp.float32(1.5)) => f32[]
        jax.jit(lambda x: jax.jit(lambda y: y+1)(x))(2) => ~i32[]
        jax.jit(lambda x, y: x*y)(2.0, b1[0]) => bf16[]
        jax.jit(np.sin)(2) => ~f32[]
    """,
    "custom": """
        CJ(2.0) => ~f32[]
        jax.grad(CJ)(2.0) => ~f32[]
        jax.jvp(CJ, (2.0,), (1.0,)) => ~f32[] ~f32[]
        jax.jit(jax.grad(CJ))(2.0) => ~f32[]
        jax.grad(CJ)(f0) => f32[]
        jax.jvp(CJS, (2.0,), (1.0,)) => ~f32[] ~f32[]
        jax.grad(CJS)(2.0) => ~f32[]
        CV(2.0) => ~f32[]
        jax.grad(CV)(2.0) => ~f32[]
        jax.jit(jax.grad(CV))(2.0) => ~f32[]
        jax.grad(CV)(f0) => f32[]
        jax.grad(CVS)(2.0) => ~f32[]
        jax.value_and_grad(CV)(2.0) => ~f32[] ~f32[]
        (lambda r: (r[0], r[1](r[0])))(jax.vjp(CV, 2.0)) => ~f32[] ~f32[]
        jax.grad(CVN)(2.0) => ~f32[]
    """,
    "checkpoint": """
        jax.checkpoint(np.sin)(1.0) => ~f32[]
        jax.grad(jax.checkpoint(lambda x: np.sin(x)*f0))(1.0) => ~f32[]
    """,
    "shapes": """
        jax.eval_shape(lambda x: x*2, 1.0) => ~f32[]
        jax.eval_shape(lambda x: x*2, 1) => ~i32[]
        jax.eval_shape(lambda x: x*f0, 1.0) => f32[]
        jax.eval_shape(lambda x: 1.0, 1.0) => ~f32[]
        jax.eval_shape(lambda x: True, 1.0) => bool[]
        jax.eval_shape(lambda x: x*2, jax.ShapeDtypeStruct((), np.float32)) => f32[]
        jax.eval_shape(lambda x: x*2, jax.ShapeDtypeStruct((), np.float32, weak_type=True)) => ~f32[]
        jax.eval_shape(lambda x: x*b1, jax.ShapeDtypeStruct((), np.float32, weak_type=True)) => bf16[4]
        jax.eval_shape(lambda x: {"a": x, "b": [x+f0]}, 1.0) => ~f32[] f32[]
        jax.eval_shape(lambda x: lax.scan(lambda c, _: (c*2, c), x, None, length=3), 1.0) => ~f32[] f32[3]
        jax.eval_shape(jax.jit(lambda x: x*2), 1.0) => ~f32[]
        jax.jit(lambda x: x*2).eval_shape(1.0) => ~f32[]
        jax.make_jaxpr(lambda x: (x*2, x*f0), return_shape=True)(1.0)[1] => ~f32[] f32[]
        jax.jit(lambda x: (x*2, x*f0)).lower(1.0).out_info => ~f32[] f32[]
        jax.jit(lambda x: 1.0).lower(1.0).out_info => ~f32[]
        jax.jit(lambda x: (x*2, x*f0)).lower(1.0).compile().out_info => ~f32[] f32[]
        jax.jit(lambda x: (x*2, x*f0)).trace(1.0).out_info => ~f32[] f32[]
        jax.jit(lambda x: x*2).lower(jax.ShapeDtypeStruct((), np.float32, weak_type=True)).out_info
            => ~f32[]
    """,
    "numpy": """
        jax.pure_callback(lambda x: onp.float32(x), jax.ShapeDtypeStruct((), np.float32), 1.0) => f32[]
        jax.device_put(1.0) => ~f32[]
        jax.device_put(2) => ~i32[]
        np.asarray(2.0).astype(np.float32) => f32[]
        np.asarray(2).astype(float) => f32[]
        np.asarray(2.0).astype(int) => i32[]
        np.asarray(2.0, dtype=float) => f32[]
        np.array(2.0) => ~f32[]
        np.array(2.0, dtype="float32") => f32[]
        np.asarray(np.asarray(2.0)) => ~f32[]
        np.full_like(np.asarray(2.0), 3) => ~f32[]
        np.zeros_like(2.0) => ~f32[]
        np.ones_like(2) => ~i32[]
        np.where(True, 1.0, 2.0) => ~f32[]
        np.where(True, 1.0, f0) => f32[]
        np.where(True, 1, 2.0) => ~f32[]
        np.where(f1 > 0, 1.0, 2.0) => f32[4]
        np.select([True], [1.0], 2.0) => ~f32[]
        np.clip(2.0, 0, 1) => ~f32[]
        np.sum(2.0) => f32[]
        np.max(2.0) => f32[]
        np.maximum(1.0, 2.0) => ~f32[]
        np.power(2.0, 3) => ~f32[]
        np.asarray(2) ** 3 => ~i32[]
        np.asarray(2) / 3 => ~f32[]
        np.asarray(2) // 3 => ~i32[]
        -np.asarray(2) => ~i32[]
        abs(np.asarray(-2)) => ~i32[]
        round(np.asarray(-2.5), 1) => ~f32[]
        np.asarray(2.0).reshape(()) => ~f32[]
        np.asarray(2.0)[()] => ~f32[]
        np.asarray(2.0).T => ~f32[]
        np.squeeze(2.0) => ~f32[]
        np.real(np.asarray(2.0+1j)) => ~f32[]
        lax.associative_scan(np.add, f1) => f32[4]
        np.dot(2.0, 3.0) => ~f32[]
        np.einsum("i->", f1) => f32[]
        jax.nn.relu(2.0) => ~f32[]
        jax.nn.sigmoid(2.0) => ~f32[]
        np.logaddexp(2.0, 1.0) => ~f32[]
        jax.random.uniform(jax.random.key(0), ()) => f32[]
    """,
    "lax": """
        lax.stop_gradient(2.0) => ~f32[]
        lax.convert_element_type(2.0, np.float32) => f32[]
        lax.convert_element_type(np.asarray(2.0), np.float32) => f32[]
        lax.convert_element_type(2, float) => f32[]
        lax.convert_element_type(2.5, int) => i32[]
        lax.add(2.0, 3.0) => ~f32[]
        lax.mul(2.0, f0) => f32[]
        lax.select(True, 2.0, 3.0) => ~f32[]
        lax.max(2, 3) => ~i32[]
        lax.clamp(0.0, 2.0, 3.0) => ~f32[]
        lax.full((), 2.0) => ~f32[]
        lax.integer_pow(2.0, 3) => ~f32[]
        lax.neg(2) => ~i32[]
    """,
}

TYPES: dict[str, dict[str, str]] = {
    group: dict(row.split(" => ") for row in text.strip().replace("\n            ", " ").split("\n        "))
    for group, text in _TABLE.items()
}


def types_of(leaves: Sequence[Any]) -> str:
    """The types of arrays, shapes and Python numbers; with axes none is weak."""
    found = []
    for x in leaves:
        x = getattr(x, "aval", x)
        weak = not x.shape and x.weak_type if hasattr(x, "shape") else x.__class__ is not bool
        x = x if hasattr(x, "shape") else ShapedArray((), SCALARS[x.__class__][0])
        found.append(f"{'~' * weak}{short_name(onp.dtype(x.dtype))}[{','.join(map(str, x.shape))}]")
    return " ".join(found)


def names(library: Any, np: Any) -> dict[str, Any]:
    """Names of the programs, in ``library``, whose array functions are ``np``."""
    square = lambda x: x * x
    f0, f1 = np.asarray(onp.float32(0.75)), np.asarray(onp.array([0.5, -1.25, 2.0, 0.0], onp.float32))
    i1 = np.asarray(onp.array([3, -1, 2, 0], onp.int32))
    f2 = np.asarray(onp.arange(12, dtype=onp.float32).reshape(3, 4))
    by_jvp, by_strong_jvp = library.custom_jvp(square), library.custom_jvp(square)
    by_jvp.defjvp(lambda x, t: (x[0] * x[0], 2 * x[0] * t[0]))
    by_strong_jvp.defjvp(lambda x, t: (x[0] * x[0], f0 * t[0]))
    by_vjp, by_strong_vjp, by_no_vjp = (library.custom_vjp(square) for _ in range(3))
    forward = lambda x: (x * x, x)
    by_vjp.defvjp(forward, lambda x, g: (2 * x * g,))
    by_strong_vjp.defvjp(forward, lambda x, g: (f0 * x * g,))
    by_no_vjp.defvjp(forward, lambda x, g: (None,))
    return {
        "jax": library, "np": np, "lax": library.lax, "onp": onp, "f0": f0, "f1": f1, "f2": f2, "i1": i1,
        "b1": f1.astype("bfloat16"), "s1": i1.astype("int8"), "CJ": by_jvp, "CJS": by_strong_jvp, "CV": by_vjp,
        "CVS": by_strong_vjp, "CVN": by_no_vjp,
    }  # fmt: skip
