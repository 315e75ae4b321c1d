// The host's stand-ins for CUDA intrinsics, and scalar functions that are not mathematics.
//
// Each part takes the place of the part of codegen/include/bf_scalar.h with the same names. Half precisions are converted
// by arithmetic on bits, which compilers vectorize.

//# types INFINITY NAN int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
#ifndef INFINITY
#define INFINITY __builtin_inff()
#endif
#ifndef NAN
#define NAN __builtin_nanf("")
#endif
//# memcpy
#ifndef memcpy
#define memcpy __builtin_memcpy
#endif
//# fabsf
#ifndef fabsf
#define fabsf __builtin_fabsf
#endif
//# __uint_as_float __float_as_uint bits_as_double double_as_bits
static inline float __uint_as_float(uint32_t x) {
  float y;
  __builtin_memcpy(&y, &x, 4);
  return y;
}
static inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  __builtin_memcpy(&y, &x, 4);
  return y;
}
static inline double bits_as_double(uint64_t x) {
  double y;
  __builtin_memcpy(&y, &x, 8);
  return y;
}
static inline uint64_t double_as_bits(double x) {
  uint64_t y;
  __builtin_memcpy(&y, &x, 8);
  return y;
}
//# __fmul_rn __dmul_rn
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
//# __popc __popcll
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }

//# ptx_to_bf16
// to nearest, ties to even, by a carry in the bits; of a NaN the quiet one with its sign
static inline uint16_t ptx_to_bf16(float x) {
  uint32_t bits = __float_as_uint(x), rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return (uint16_t)((x != x ? (bits & 0x80000000u) | 0x7fc00000u : rounded) >> 16);
}
//# ptx_from_f16
// the bits of f16 as those of a float are 2^-112 too small; the exponent of infinities and NaN is put right
static inline float ptx_from_f16(uint16_t x) {
  uint32_t magnitude = (uint32_t)(x & 0x7fffu) << 13, sign = (uint32_t)(x & 0x8000u) << 16;
  uint32_t finite = __float_as_uint(__uint_as_float(magnitude) * 5.192296858534828e+33f);
  return __uint_as_float(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
}
//# ptx_to_f16
// normal numbers by a carry in the bits, the others by adding and subtracting 1/2, whose last place is the least f16
static inline uint16_t ptx_to_f16(float x) {
  uint32_t bits = __float_as_uint(x), a = bits & 0x7fffffffu;
  uint32_t normal = (a - 0x38000000u + 0xfffu + (a >> 13 & 1u)) >> 13;
  uint32_t small = __float_as_uint(__uint_as_float(a) + 0.5f) - 0x3f000000u;
  uint32_t finite = a < 0x38800000u ? small : normal;
  uint32_t result = a >= 0x477ff000u ? (a > 0x7f800000u ? 0x7e00u : 0x7c00u) : finite;
  return (uint16_t)(result | bits >> 16 & 0x8000u);
}
// by way of a float rounded to odd, from which the second rounding is right (S. Boldo and G. Melquiond, 2008)
static inline uint16_t ptx_to_f16(double x) {
  float f = (float)x;
  uint32_t bits = __float_as_uint(f);
  double rest = __builtin_fabs(x) - __builtin_fabs((double)f);
  bool exact = rest == 0.0 || x != x || __builtin_fabsf(f) == INFINITY;
  uint32_t odd = (bits - (rest < 0.0 ? 1u : 0u)) | 1u;
  return ptx_to_f16(__uint_as_float(exact ? bits : odd));
}

//# bf_rem
// the remainder of bf_div, with the sign of x
static inline float bf_rem(float x, float y) { return __builtin_fmodf(x, y); }
static inline double bf_rem(double x, double y) { return __builtin_fmod(x, y); }
template<class T> inline T bf_rem(T x, T y) {
  if constexpr (T(-1) < T(0)) return y == T(0) || y == T(-1) ? T(0) : T(x % y);
  else return y == T(0) ? T(0) : T(x % y);
}
//# nan_or
// x where it is NaN, else y. Selected by bits, since GCC threads jumps through comparisons of floats, and vectorizes no
// reduction over rows then. measured: max of f32[8,4096,256] over axis 1, GCC 12, EPYC, one thread: 3.1 ms; 47.9 with
// `x > y || x != x ? x : y`, and 16 with two selects (2026-11-28)
template<class T, class I> inline T nan_or_as(T x, T y) {
  I nan = -I(x != x), bits, other;
  memcpy(&bits, &x, sizeof(T));
  memcpy(&other, &y, sizeof(T));
  bits = (bits & nan) | (other & ~nan);
  memcpy(&x, &bits, sizeof(T));
  return x;
}
static inline float nan_or(float x, float y) { return nan_or_as<float, int32_t>(x, y); }
static inline double nan_or(double x, double y) { return nan_or_as<double, int64_t>(x, y); }
//# bf_max
// NaN where either is
static inline float bf_max(float x, float y) { return nan_or(x, x > y ? x : y); }
static inline double bf_max(double x, double y) { return nan_or(x, x > y ? x : y); }
template<class T> inline T bf_max(T x, T y) { return x > y ? x : y; }
//# bf_min
static inline float bf_min(float x, float y) { return nan_or(x, x < y ? x : y); }
static inline double bf_min(double x, double y) { return nan_or(x, x < y ? x : y); }
template<class T> inline T bf_min(T x, T y) { return x < y ? x : y; }
//# bf_abs
static inline float bf_abs(float x) { return __builtin_fabsf(x); }
static inline double bf_abs(double x) { return __builtin_fabs(x); }
template<class T> inline T bf_abs(T x) { return x < T(0) ? bf_neg(x) : x; }
//# bf_lgamma
static inline float bf_lgamma(float x) { return __builtin_lgammaf(x); }
static inline double bf_lgamma(double x) { return __builtin_lgamma(x); }
//# bf_floor
static inline float bf_floor(float x) { return __builtin_floorf(x); }
static inline double bf_floor(double x) { return __builtin_floor(x); }
//# bf_ceil
static inline float bf_ceil(float x) { return __builtin_ceilf(x); }
static inline double bf_ceil(double x) { return __builtin_ceil(x); }
//# bf_trunc
static inline float bf_trunc(float x) { return __builtin_truncf(x); }
static inline double bf_trunc(double x) { return __builtin_trunc(x); }
//# bf_round
static inline float bf_round(float x) { return __builtin_rintf(x); }
static inline double bf_round(double x) { return __builtin_rint(x); }
//# bf_is_finite
static inline bool bf_is_finite(float x) { return __builtin_fabsf(x) < INFINITY; }
static inline bool bf_is_finite(double x) { return __builtin_fabs(x) < (double)INFINITY; }
//# bf_nextafter
// in the grid of the type: away from zero the bits go up, towards it down
template<class T> inline float number_of(T x) { return to_float(x); }
static inline double number_of(double x) { return x; }
template<class T> inline T bf_nextafter(T x, T y) {
  typedef typename unsigned_of<sizeof(T)>::type U;
  typedef decltype(number_of(x)) F;
  constexpr U sign = U(U(1) << (sizeof(T) * 8 - 1));
  F a = number_of(x), b = number_of(y);
  U bits = bf_bitcast<U>(x), step = U((a < b) == (a > F(0)) ? bits + 1u : bits - 1u);
  U result = a == F(0) ? U(U(1) | (b < F(0) ? sign : U(0))) : step;
  result = a == b || b != b ? bf_bitcast<U>(y) : result;
  return bf_bitcast<T>(a != a ? bits : result);
}

//# with_sign
static inline float with_sign(float x, float sign) { return __builtin_copysignf(x, sign); }
static inline double with_sign(double x, double sign) { return __builtin_copysign(x, sign); }
