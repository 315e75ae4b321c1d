// Complex functions of the host: libm's, as NumPy's are.
//
// Each part takes the place of the part of codegen/include/bf_complex.h with the same names.

//# to_c99 from_c99
static inline float _Complex to_c99(c64 z) {
  float _Complex w;
  __builtin_memcpy(&w, &z, sizeof w);
  return w;
}
static inline double _Complex to_c99(c128 z) {
  double _Complex w;
  __builtin_memcpy(&w, &z, sizeof w);
  return w;
}
static inline c64 from_c99(float _Complex w) {
  c64 z;
  __builtin_memcpy(&z, &w, sizeof z);
  return z;
}
static inline c128 from_c99(double _Complex w) {
  c128 z;
  __builtin_memcpy(&z, &w, sizeof z);
  return z;
}
//# bf_sqrt complex
static inline c64 bf_sqrt(c64 z) { return from_c99(__builtin_csqrtf(to_c99(z))); }
static inline c128 bf_sqrt(c128 z) { return from_c99(__builtin_csqrt(to_c99(z))); }
//# bf_exp complex
static inline c64 bf_exp(c64 z) { return from_c99(__builtin_cexpf(to_c99(z))); }
static inline c128 bf_exp(c128 z) { return from_c99(__builtin_cexp(to_c99(z))); }
//# bf_log complex
static inline c64 bf_log(c64 z) { return from_c99(__builtin_clogf(to_c99(z))); }
static inline c128 bf_log(c128 z) { return from_c99(__builtin_clog(to_c99(z))); }
//# bf_sin complex
static inline c64 bf_sin(c64 z) { return from_c99(__builtin_csinf(to_c99(z))); }
static inline c128 bf_sin(c128 z) { return from_c99(__builtin_csin(to_c99(z))); }
//# bf_cos complex
static inline c64 bf_cos(c64 z) { return from_c99(__builtin_ccosf(to_c99(z))); }
static inline c128 bf_cos(c128 z) { return from_c99(__builtin_ccos(to_c99(z))); }
//# bf_tan complex
// the zero at infinity as bf_tanh has it
static inline c64 bf_tan(c64 z) {
  c64 w = from_c99(__builtin_ctanf(to_c99(z)));
  return {__builtin_isinf(z.im) ? __builtin_copysignf(0.0f, z.re) : w.re, w.im};
}
static inline c128 bf_tan(c128 z) {
  c128 w = from_c99(__builtin_ctan(to_c99(z)));
  return {__builtin_isinf(z.im) ? __builtin_copysign(0.0, z.re) : w.re, w.im};
}
//# bf_asin complex
static inline c64 bf_asin(c64 z) { return from_c99(__builtin_casinf(to_c99(z))); }
static inline c128 bf_asin(c128 z) { return from_c99(__builtin_casin(to_c99(z))); }
//# bf_acos complex
static inline c64 bf_acos(c64 z) { return from_c99(__builtin_cacosf(to_c99(z))); }
static inline c128 bf_acos(c128 z) { return from_c99(__builtin_cacos(to_c99(z))); }
//# bf_atan complex
static inline c64 bf_atan(c64 z) { return from_c99(__builtin_catanf(to_c99(z))); }
static inline c128 bf_atan(c128 z) { return from_c99(__builtin_catan(to_c99(z))); }
//# bf_sinh complex
static inline c64 bf_sinh(c64 z) { return from_c99(__builtin_csinhf(to_c99(z))); }
static inline c128 bf_sinh(c128 z) { return from_c99(__builtin_csinh(to_c99(z))); }
//# bf_cosh complex
static inline c64 bf_cosh(c64 z) { return from_c99(__builtin_ccoshf(to_c99(z))); }
static inline c128 bf_cosh(c128 z) { return from_c99(__builtin_ccosh(to_c99(z))); }
//# bf_tanh complex
// the zero at infinity has the sign of the imaginary part, as in the array API standard, and not that of sin(2 im)
static inline c64 bf_tanh(c64 z) {
  c64 w = from_c99(__builtin_ctanhf(to_c99(z)));
  return {w.re, __builtin_isinf(z.re) ? __builtin_copysignf(0.0f, z.im) : w.im};
}
static inline c128 bf_tanh(c128 z) {
  c128 w = from_c99(__builtin_ctanh(to_c99(z)));
  return {w.re, __builtin_isinf(z.re) ? __builtin_copysign(0.0, z.im) : w.im};
}
//# bf_asinh complex
static inline c64 bf_asinh(c64 z) { return from_c99(__builtin_casinhf(to_c99(z))); }
static inline c128 bf_asinh(c128 z) { return from_c99(__builtin_casinh(to_c99(z))); }
//# bf_acosh complex
static inline c64 bf_acosh(c64 z) { return from_c99(__builtin_cacoshf(to_c99(z))); }
static inline c128 bf_acosh(c128 z) { return from_c99(__builtin_cacosh(to_c99(z))); }
//# bf_atanh complex
static inline c64 bf_atanh(c64 z) { return from_c99(__builtin_catanhf(to_c99(z))); }
static inline c128 bf_atanh(c128 z) { return from_c99(__builtin_catanh(to_c99(z))); }
