// Complex functions: overloads of bf_scalar.h for c64 and c128, with the values of C99, which NumPy has too.
//
// A part of the group `complex` is taken if the kernel has complex numbers. The inverse functions follow W. Kahan, "Branch
// Cuts for Complex Elementary Functions, or Much Ado About Nothing's Sign Bit" (1987), which keeps both sides of a cut
// apart by the sign of zero.

//# bf_real
template<class T> inline T bf_real(Complex<T> z) { return z.re; }
//# bf_imag
template<class T> inline T bf_imag(Complex<T> z) { return z.im; }
//# bf_complex
template<class T> inline Complex<T> bf_complex(T re, T im) { return {re, im}; }
//# bf_complex_abs
template<class T> inline T bf_complex_abs(Complex<T> z) { return bf_hypot(z.re, z.im); }
//# times_i divided_by_i
template<class T> inline Complex<T> times_i(Complex<T> z) { return {-z.im, z.re}; }
template<class T> inline Complex<T> divided_by_i(Complex<T> z) { return {z.im, -z.re}; }
//# with_sign
static inline float with_sign(float x, float sign) { return copysignf(x, sign); }
static inline double with_sign(double x, double sign) { return copysign(x, sign); }

//# bf_conj complex
template<class T> inline Complex<T> bf_conj(Complex<T> z) { return {z.re, -z.im}; }
//# bf_is_finite complex
template<class T> inline bool bf_is_finite(Complex<T> z) { return bf_is_finite(z.re) && bf_is_finite(z.im); }
//# bf_sign complex
// z / |z|, 0 of 0; of one infinite part its direction, as NumPy has it
template<class T> inline Complex<T> bf_sign(Complex<T> z) {
  T r = bf_hypot(z.re, z.im);
  if (r == 0) return {0, 0};
  if (r < T(INFINITY)) return {z.re / r, z.im / r};
  bool across = bf_abs(z.re) == T(INFINITY), along = bf_abs(z.im) == T(INFINITY);
  if (across == along || z.re != z.re || z.im != z.im) return {T(NAN), T(NAN)};
  return {across ? with_sign(T(1), z.re) : T(0), along ? with_sign(T(1), z.im) : T(0)};
}

//# bf_sqrt complex
// the larger part by a root of a sum, the other by division; scaled by a power of two against overflow
template<class T> inline Complex<T> bf_sqrt(Complex<T> z) {
  if (z.re == 0 && z.im == 0) return {0, z.im};
  T x = bf_abs(z.re), y = bf_abs(z.im);
  if (y == T(INFINITY)) return {y, z.im};
  if (x == T(INFINITY)) {
    T none = y == y ? T(0) : y;
    return z.re > 0 ? Complex<T>{x, with_sign(none, z.im)} : Complex<T>{none, with_sign(x, z.im)};
  }
  if (x != x || y != y) return {T(NAN), T(NAN)};
  T top = bf_max(x, y), scale = top > T(1e18) ? T(0.25) : top < T(1e-18) ? T(16777216) : T(1);
  x *= scale;
  y *= scale;
  T a = bf_sqrt(T(0.5) * (x + bf_hypot(x, y)));
  T b = y / (T(2) * a);
  T back = scale == T(0.25) ? T(2) : scale == T(1) ? T(1) : T(0.000244140625);
  a *= back;
  b *= back;
  return z.re >= 0 ? Complex<T>{a, with_sign(b, z.im)} : Complex<T>{b, with_sign(a, z.im)};
}
//# bf_rsqrt complex
template<class T> inline Complex<T> bf_rsqrt(Complex<T> z) { return Complex<T>{1, 0} / bf_sqrt(z); }

//# bf_exp complex
// exp(x) as a square, so that it overflows only if the result does
template<class T> inline Complex<T> bf_exp(Complex<T> z) {
  if (z.im == 0) return {bf_exp(z.re), z.im};
  if (bf_abs(z.re) == T(INFINITY) && !bf_is_finite(z.im))
    return z.re < 0 ? Complex<T>{0, 0} : Complex<T>{z.re, T(NAN)};
  T half = bf_exp(T(0.5) * z.re), e = bf_exp(z.re);
  bool large = e == T(INFINITY);
  T f = large ? half : e, g = large ? half : T(1);
  return {bf_cos(z.im) * f * g, bf_sin(z.im) * f * g};
}
//# bf_expm1 complex
template<class T> inline Complex<T> bf_expm1(Complex<T> z) {
  if (z.im == 0) return {bf_expm1(z.re) + T(0), z.im};
  if (bf_abs(z.re) == T(INFINITY) && !bf_is_finite(z.im))
    return z.re < 0 ? Complex<T>{-1, 0} : Complex<T>{z.re, T(NAN)};
  T s = bf_sin(T(0.5) * z.im);
  return {bf_expm1(z.re) * bf_cos(z.im) - T(2) * s * s, bf_exp(z.re) * bf_sin(z.im)};
}
//# log_modulus
// log|z|, near |z| = 1 by log1p of |z|^2 - 1
template<class T> inline T log_modulus(T re, T im) {
  T x = bf_abs(re), y = bf_abs(im), big = x > y ? x : y, small = x > y ? y : x,
    square = big * big + small * small;
  if (square > T(0.5) && square < T(3)) return T(0.5) * bf_log1p((big - T(1)) * (big + T(1)) + small * small);
  return bf_log(bf_hypot(re, im));
}
//# bf_log complex
template<class T> inline Complex<T> bf_log(Complex<T> z) {
  return {log_modulus(z.re, z.im), bf_atan2(z.im, z.re)};
}
//# bf_log1p complex
template<class T> inline Complex<T> bf_log1p(Complex<T> z) {
  T outer = z.re + T(1);
  T near = T(0.5) * bf_log1p(z.re * (T(2) + z.re) + z.im * z.im);
  bool close = bf_abs(z.re) < T(0.5) && bf_abs(z.im) < T(0.5);
  return {close ? near : log_modulus(outer, z.im), bf_atan2(z.im, outer)};
}
//# bf_logistic complex
template<class T> inline Complex<T> bf_logistic(Complex<T> z) {
  Complex<T> one = {1, 0};
  return one / (one + bf_exp(-z));
}
//# bf_pow complex
// integer exponents below 100 by squaring, as NumPy does
template<class T> inline Complex<T> bf_pow(Complex<T> x, Complex<T> y) {
  if (y.re == 0 && y.im == 0) return {1, 0};
  if (x.re == 0 && x.im == 0) return y.re > 0 ? Complex<T>{0, 0} : Complex<T>{T(NAN), T(NAN)};
  if (y.im == 0 && y.re == bf_floor(y.re) && bf_abs(y.re) < T(100)) {
    return power_by_squaring(y.re < 0 ? Complex<T>{1, 0} / x : x, (unsigned)bf_abs(y.re));
  }
  return bf_exp(y * bf_log(x));
}
//# bf_integer_pow complex
template<class T> inline Complex<T> bf_integer_pow(Complex<T> x, int n) {
  return bf_pow(x, Complex<T>{T(n), 0});
}

//# bf_sinh complex
template<class T> inline Complex<T> bf_sinh(Complex<T> z) {
  if (z.im == 0) return {bf_sinh(z.re), z.im};
  if (z.re == 0) return {z.re, bf_sin(z.im)};
  if (bf_abs(z.re) == T(INFINITY) && !bf_is_finite(z.im)) return {z.re, T(NAN)};
  return {bf_sinh(z.re) * bf_cos(z.im), bf_cosh(z.re) * bf_sin(z.im)};
}
//# bf_cosh complex
template<class T> inline Complex<T> bf_cosh(Complex<T> z) {
  if (z.im == 0) return {bf_cosh(z.re), z.re * z.im == z.re * z.im ? z.re * z.im : z.im};
  if (z.re == 0) return {bf_cos(z.im), bf_is_finite(z.im) ? z.re * z.im : z.re};
  if (bf_abs(z.re) == T(INFINITY) && !bf_is_finite(z.im)) return {bf_abs(z.re), T(NAN)};
  return {bf_cosh(z.re) * bf_cos(z.im), bf_sinh(z.re) * bf_sin(z.im)};
}
//# bf_tanh complex
// Kahan's: one tangent and one hyperbolic sine; beyond |x| = 22 the sine's square would overflow in float
template<class T> inline Complex<T> bf_tanh(Complex<T> z) {
  if (z.im == 0) return {bf_tanh(z.re), z.im};
  if (z.re == 0) return {z.re, bf_tan(z.im)};
  if (bf_abs(z.re) == T(INFINITY)) return {with_sign(T(1), z.re), with_sign(T(0), z.im)};
  if (bf_abs(z.re) > T(22)) {
    T e = bf_exp(-bf_abs(z.re)), decay = T(4) * bf_sin(z.im) * bf_cos(z.im) * e * e;
    return {decay == decay ? with_sign(T(1), z.re) : decay, decay};
  }
  T t = bf_tan(z.im), beta = T(1) + t * t, s = bf_sinh(z.re), rho = bf_sqrt(T(1) + s * s);
  T scale = T(1) / (T(1) + beta * s * s);
  return {beta * rho * s * scale, t * scale};
}
//# bf_sin complex
template<class T> inline Complex<T> bf_sin(Complex<T> z) { return divided_by_i(bf_sinh(times_i(z))); }
//# bf_cos complex
template<class T> inline Complex<T> bf_cos(Complex<T> z) { return bf_cosh(times_i(z)); }
//# bf_tan complex
template<class T> inline Complex<T> bf_tan(Complex<T> z) { return divided_by_i(bf_tanh(times_i(z))); }

//# endless_modulus endless_angle
// of the inverse functions where a part of z is infinite or NaN: their logarithm, and the angle from the real axis
template<class T> inline T endless_modulus(Complex<T> z) {
  return bf_abs(z.re) == T(INFINITY) || bf_abs(z.im) == T(INFINITY) ? T(INFINITY) : T(NAN);
}
template<class T> inline T endless_angle(Complex<T> z) {
  return z.re == 0 ? T(1.5707963267948966) : bf_atan2(bf_abs(z.im), z.re);
}
//# bf_asin complex
template<class T> inline Complex<T> bf_asin(Complex<T> z) {
  if (!bf_is_finite(z)) {
    T m = endless_modulus(z);
    return {z.re == 0 && m != m ? z.re : bf_atan2(z.re, bf_abs(z.im)), with_sign(m, z.im)};
  }
  Complex<T> a = bf_sqrt(Complex<T>{T(1) - z.re, -z.im}), b = bf_sqrt(Complex<T>{T(1) + z.re, z.im});
  return {bf_atan2(z.re, a.re * b.re - a.im * b.im), bf_asinh(a.re * b.im - a.im * b.re)};
}
//# bf_acos complex
template<class T> inline Complex<T> bf_acos(Complex<T> z) {
  if (!bf_is_finite(z)) return {endless_angle(z), -with_sign(endless_modulus(z), z.im)};
  Complex<T> a = bf_sqrt(Complex<T>{T(1) - z.re, -z.im}), b = bf_sqrt(Complex<T>{T(1) + z.re, z.im});
  return {T(2) * bf_atan2(a.re, b.re), bf_asinh(b.re * a.im - b.im * a.re)};
}
//# bf_asinh complex
template<class T> inline Complex<T> bf_asinh(Complex<T> z) { return divided_by_i(bf_asin(times_i(z))); }
//# bf_acosh complex
template<class T> inline Complex<T> bf_acosh(Complex<T> z) {
  if (!bf_is_finite(z)) return {endless_modulus(z), with_sign(endless_angle(z), z.im)};
  Complex<T> a = bf_sqrt(Complex<T>{z.re - T(1), z.im}), b = bf_sqrt(Complex<T>{z.re + T(1), z.im});
  return {bf_asinh(a.re * b.re + a.im * b.im), T(2) * bf_atan2(a.im, b.re)};
}
//# bf_atanh complex
// log((1 + z) / (1 - z)) / 2 at |re|, the modulus by log1p of what it is away from 1
template<class T> inline Complex<T> bf_atanh(Complex<T> z) {
  T x = bf_abs(z.re), y = z.im, away = (T(1) - x) * (T(1) - x) + y * y;
  if (!(away < T(1e18))) {  // about 1 / z, with half a turn
    T r = bf_hypot(x, y);
    if (r != r) return {z.re == 0 ? z.re : r, r};
    T turn = y == y ? T(1.5707963267948966) : y;
    return {with_sign(r < T(INFINITY) ? x / r / r : T(0), z.re), with_sign(turn, y)};
  }
  T angle = T(0.5) * bf_atan2(T(2) * y, (T(1) - x) * (T(1) + x) - y * y);
  return {with_sign(T(0.25) * bf_log1p(T(4) * x / away), z.re), angle};
}
//# bf_atan complex
template<class T> inline Complex<T> bf_atan(Complex<T> z) { return divided_by_i(bf_atanh(times_i(z))); }
