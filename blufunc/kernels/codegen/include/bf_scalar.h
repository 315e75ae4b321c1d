// Scalar functions: every elementwise primitive in C++, for the device, and for the host but where it has its own
// (backends/cpu/include). codegen/source_files.py selects the parts that a kernel uses.
//
// A part begins with a line `//# names [group]` and uses only parts that precede it. A primitive `p` is `bf_p`,
// overloaded by type: float, double, the integers, bool. Half precisions and fp8 are storage types (bf16, f16, e4m3,
// e5m2): `to_float` and `from_float<T>` convert from and to float.
//
// NVRTC compiles this with every function on the device by default and no fast-math: results are those of NumPy within
// the few ulp that CUDA documents for its mathematical functions. Everything that is not C++ is in the parts `ptx_*`, so
// that a host compiler can check the rest. `ptx_to_bf16` and `ptx_max` need compute capability 8.0.

//# types INFINITY NAN int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#ifndef INFINITY
#define INFINITY __uint_as_float(0x7f800000u)
#define NAN __uint_as_float(0x7fc00000u)
#endif

//# ptx_rcp
// the reciprocal within 1 ulp; like all that follows it keeps denormals
static inline float ptx_rcp(float x) {
  float r;
  asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
//# ptx_max
static inline float ptx_max(float x, float y) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}
//# ptx_min
static inline float ptx_min(float x, float y) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}
//# ptx_from_f16
static inline float ptx_from_f16(uint16_t x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}
//# ptx_to_f16
static inline uint16_t ptx_to_f16(float x) {
  uint16_t r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
static inline uint16_t ptx_to_f16(double x) {
  uint16_t r;
  asm("cvt.rn.f16.f64 %0, %1;" : "=h"(r) : "d"(x));
  return r;
}
//# ptx_to_bf16
static inline uint16_t ptx_to_bf16(float x) {
  uint16_t r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}

//# kind_of KIND_INTEGER KIND_BOOL KIND_FLOAT KIND_STORAGE KIND_COMPLEX
enum { KIND_INTEGER, KIND_BOOL, KIND_FLOAT, KIND_STORAGE, KIND_COMPLEX };
template<class T> struct kind_of { static constexpr int value = KIND_INTEGER; };
template<> struct kind_of<bool> { static constexpr int value = KIND_BOOL; };
template<> struct kind_of<float> { static constexpr int value = KIND_FLOAT; };
template<> struct kind_of<double> { static constexpr int value = KIND_FLOAT; };

//# is_same_type
template<class A, class B> struct is_same_type { static constexpr bool value = false; };
template<class A> struct is_same_type<A, A> { static constexpr bool value = true; };

//# wrapping
// the type to compute in, in which overflow of signed integers wraps as NumPy's does
template<class T> struct wrapping { typedef T type; };
template<> struct wrapping<int8_t> { typedef uint32_t type; };
template<> struct wrapping<uint8_t> { typedef uint32_t type; };
template<> struct wrapping<int16_t> { typedef uint32_t type; };
template<> struct wrapping<uint16_t> { typedef uint32_t type; };
template<> struct wrapping<int32_t> { typedef uint32_t type; };
template<> struct wrapping<int64_t> { typedef uint64_t type; };

//# unsigned_of
template<int BYTES> struct unsigned_of;
template<> struct unsigned_of<1> { typedef uint8_t type; };
template<> struct unsigned_of<2> { typedef uint16_t type; };
template<> struct unsigned_of<4> { typedef uint32_t type; };
template<> struct unsigned_of<8> { typedef uint64_t type; };

//# bf_bitcast
template<class To, class From> inline To bf_bitcast(From x) {
  static_assert(sizeof(To) == sizeof(From), "bf_bitcast keeps the size");
  To y;
  memcpy(&y, &x, sizeof(To));
  return y;
}

//# lowest highest
// the least and the greatest value of a type: infinities where there are such
template<class T> inline T highest() {
  if constexpr (kind_of<T>::value == KIND_FLOAT) return T(INFINITY);
  else if constexpr (kind_of<T>::value == KIND_BOOL) return true;
  else if constexpr (T(-1) < T(0)) return T(typename unsigned_of<sizeof(T)>::type(-1) >> 1);
  else return T(-1);
}
template<class T> inline T lowest() {
  if constexpr (kind_of<T>::value == KIND_FLOAT) return -T(INFINITY);
  else if constexpr (kind_of<T>::value == KIND_BOOL) return false;
  else return T(~highest<T>());
}

//# to_float from_float
static inline float to_float(float x) { return x; }
template<class T> inline T from_float(float x) { return T(x); }

//# float_format
// the bits of a format: widths of mantissa and exponent
template<class T> struct float_format;
template<> struct float_format<float> { static constexpr int mantissa = 23, exponent = 8; };
template<> struct float_format<double> { static constexpr int mantissa = 52, exponent = 11; };

//# bf16
struct bf16 { uint16_t bits; };
template<> struct kind_of<bf16> { static constexpr int value = KIND_STORAGE; };
template<> struct float_format<bf16> { static constexpr int mantissa = 7, exponent = 8; };
static inline float to_float(bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }
template<> inline bf16 from_float<bf16>(float x) { return bf16{ptx_to_bf16(x)}; }

//# f16
struct f16 { uint16_t bits; };
template<> struct kind_of<f16> { static constexpr int value = KIND_STORAGE; };
template<> struct float_format<f16> { static constexpr int mantissa = 10, exponent = 5; };
static inline float to_float(f16 x) { return ptx_from_f16(x.bits); }
template<> inline f16 from_float<f16>(float x) { return f16{ptx_to_f16(x)}; }

//# round_to_fp8
// |x| to the nearest multiple, ties to even, of what the mantissa can hold; normal numbers by a carry in the bits,
// the others by adding and subtracting a power of two whose last place is the least of them
template<int MANTISSA, int BIAS> inline uint32_t round_to_fp8(float x) {
  constexpr int drop = 23 - MANTISSA;
  uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
  uint32_t normal = (bits + ((1u << (drop - 1)) - 1u) + ((bits >> drop) & 1u)) >> drop;
  float magic = __uint_as_float((uint32_t)(127 + 24 - BIAS - MANTISSA) << 23);
  uint32_t small = __float_as_uint(__uint_as_float(bits) + magic) - __float_as_uint(magic);
  return bits < ((uint32_t)(128 - BIAS) << 23) ? small : normal - ((uint32_t)(127 - BIAS) << MANTISSA);
}

//# e4m3
// no infinity: beyond 464, halfway to what would follow 448, is NaN
struct e4m3 { uint8_t bits; };
template<> struct kind_of<e4m3> { static constexpr int value = KIND_STORAGE; };
template<> struct float_format<e4m3> { static constexpr int mantissa = 3, exponent = 4; };
static inline float to_float(e4m3 x) {
  uint32_t magnitude = x.bits & 0x7fu;
  float f = ptx_from_f16((uint16_t)(((uint32_t)x.bits & 0x80u) << 8 | magnitude << 7)) * 256.0f;
  return magnitude == 0x7fu ? NAN : f;
}
template<> inline e4m3 from_float<e4m3>(float x) {
  uint32_t sign = __float_as_uint(x) >> 24 & 0x80u;
  return e4m3{(uint8_t)(sign | (fabsf(x) <= 464.0f ? round_to_fp8<3, 7>(x) : 0x7fu))};
}

//# e5m2
// the upper half of an f16
struct e5m2 { uint8_t bits; };
template<> struct kind_of<e5m2> { static constexpr int value = KIND_STORAGE; };
template<> struct float_format<e5m2> { static constexpr int mantissa = 2, exponent = 5; };
static inline float to_float(e5m2 x) { return ptx_from_f16((uint16_t)((uint32_t)x.bits << 8)); }
template<> inline e5m2 from_float<e5m2>(float x) {
  uint32_t sign = __float_as_uint(x) >> 24 & 0x80u;
  uint32_t magnitude = x != x ? 0x7eu : fabsf(x) < 61440.0f ? round_to_fp8<2, 15>(x) : 0x7cu;
  return e5m2{(uint8_t)(sign | magnitude)};
}

//# Small SMALL_IEEE SMALL_UNSIGNED_ZERO SMALL_FINITE small_from small_float
// floats of at most 8 bits in the low bits of a byte. FORMAT: with infinities, with one NaN in place of -0, or finite
enum { SMALL_IEEE, SMALL_UNSIGNED_ZERO, SMALL_FINITE };
template<int EXPONENT, int MANTISSA, int BIAS, int FORMAT> struct Small { uint8_t bits; };
template<int E, int M, int B, int F> struct kind_of<Small<E, M, B, F>> {
  static constexpr int value = KIND_STORAGE;
};
template<int E, int M, int B, int F> struct float_format<Small<E, M, B, F>> {
  static constexpr int mantissa = M, exponent = E;
};
template<int E, int M, int B, int F> inline float to_float(Small<E, M, B, F> x) {
  constexpr uint32_t sign_bit = 1u << (E + M), top = ((1u << E) - 1u) << M;
  uint32_t magnitude = x.bits & (sign_bit - 1u), sign = (x.bits & sign_bit) << (31 - E - M);
  float unit = __uint_as_float((uint32_t)(128 - B - M) << 23);  // the least number above 0
  uint32_t bits = magnitude < 1u << M ? __float_as_uint((float)magnitude * unit)
                                      : (magnitude << (23 - M)) + ((uint32_t)(127 - B) << 23);
  if (F == SMALL_IEEE && magnitude >= top) bits = magnitude == top ? 0x7f800000u : 0x7fc00000u;
  if (F == SMALL_UNSIGNED_ZERO && magnitude == 0 && sign) bits = 0x7fc00000u;
  return __uint_as_float(sign | bits);
}
template<int E, int M, int B, int F> inline Small<E, M, B, F> small_from(float x, Small<E, M, B, F>) {
  constexpr uint32_t sign_bit = 1u << (E + M), top = ((1u << E) - 1u) << M;
  constexpr uint32_t most = F == SMALL_IEEE ? top - 1u : sign_bit - 1u;
  uint32_t sign = __float_as_uint(x) >> 31 << (E + M);
  // far beyond the greatest, so that adding the last place cannot carry into the sign
  uint32_t magnitude = round_to_fp8<M, B>(fabsf(x) < 1e30f ? x : 1e30f);
  if (F == SMALL_UNSIGNED_ZERO && (x != x || magnitude > most)) return {(uint8_t)sign_bit};
  if (F == SMALL_UNSIGNED_ZERO && magnitude == 0) return {0};
  if (F == SMALL_FINITE && x != x) return {(uint8_t)(sign ^ sign_bit)};  // ml_dtypes makes a zero of NaN
  if (magnitude > most) magnitude = F == SMALL_IEEE ? top : most;
  if (F == SMALL_IEEE && x != x) magnitude = top | 1u << (M - 1);
  return {(uint8_t)(sign | magnitude)};
}
template<class T> inline T small_float(float x) { return small_from(x, T{}); }

//# e3m4 e4m3i e4m3b e4m3z e5m2z e2m1
typedef Small<3, 4, 3, SMALL_IEEE> e3m4;
typedef Small<4, 3, 7, SMALL_IEEE> e4m3i;
typedef Small<4, 3, 11, SMALL_UNSIGNED_ZERO> e4m3b;
typedef Small<4, 3, 8, SMALL_UNSIGNED_ZERO> e4m3z;
typedef Small<5, 2, 16, SMALL_UNSIGNED_ZERO> e5m2z;
typedef Small<2, 1, 1, SMALL_FINITE> e2m1;
template<> inline e3m4 from_float<e3m4>(float x) { return small_float<e3m4>(x); }
template<> inline e4m3i from_float<e4m3i>(float x) { return small_float<e4m3i>(x); }
template<> inline e4m3b from_float<e4m3b>(float x) { return small_float<e4m3b>(x); }
template<> inline e4m3z from_float<e4m3z>(float x) { return small_float<e4m3z>(x); }
template<> inline e5m2z from_float<e5m2z>(float x) { return small_float<e5m2z>(x); }
template<> inline e2m1 from_float<e2m1>(float x) { return small_float<e2m1>(x); }

//# e8m0
// powers of two from 2^-127 on; zero, negative numbers and what is too large are NaN. Ties round up, as in ml_dtypes
struct e8m0 { uint8_t bits; };
template<> struct kind_of<e8m0> { static constexpr int value = KIND_STORAGE; };
template<> struct float_format<e8m0> { static constexpr int mantissa = 0, exponent = 8; };
static inline float to_float(e8m0 x) {
  uint32_t bits = x.bits == 0xffu ? 0x7fc00000u : x.bits == 0 ? 0x400000u : (uint32_t)x.bits << 23;
  return __uint_as_float(bits);
}
template<> inline e8m0 from_float<e8m0>(float x) {
  // 0x400000 is the least power; ml_dtypes rounds subnormal numbers above it up
  uint32_t bits = __float_as_uint(x);
  uint32_t power = bits < 0x800000u ? bits > 0x400000u : (bits + 0x400000u) >> 23;
  return e8m0{(uint8_t)(bits == 0 || bits >= 0x7f000000u + 0x400000u ? 0xffu : power)};
}

//# Nibble i4_t u4_t i2_t u2_t to_int from_int wrap_to nibble_of
// integers of 4 and 2 bits in the low bits of a byte; what the others hold is ignored
template<int BITS, class Wide> struct Nibble { uint8_t bits; };
typedef Nibble<4, int8_t> i4_t;
typedef Nibble<4, uint8_t> u4_t;
typedef Nibble<2, int8_t> i2_t;
typedef Nibble<2, uint8_t> u2_t;
template<int BITS, class Wide> inline Wide to_int(Nibble<BITS, Wide> x) {
  return Wide(Wide((uint32_t)x.bits << (8 - BITS)) >> (8 - BITS));
}
template<int BITS, class Wide> inline Nibble<BITS, Wide> nibble_of(Wide x, Nibble<BITS, Wide>) {
  return {(uint8_t)(x & ((1 << BITS) - 1))};
}
template<class T, class Wide> inline T from_int(Wide x) { return nibble_of(x, T{}); }
// the low bits of an integer, with their sign
template<class T, class Wide> inline Wide wrap_to(Wide x) { return to_int(nibble_of(x, T{})); }

//# round_to
// x as float, rounded to what a storage type holds
template<class T> inline float round_to(float x) { return to_float(from_float<T>(x)); }

//# Complex c64 c128
template<class T> struct alignas(2 * sizeof(T)) Complex { T re, im; };
typedef Complex<float> c64;
typedef Complex<double> c128;
template<class T> struct kind_of<Complex<T>> { static constexpr int value = KIND_COMPLEX; };
// products are rounded before they are added: fused, z * conj(z) would have an imaginary part
static inline float product(float x, float y) { return __fmul_rn(x, y); }
static inline double product(double x, double y) { return __dmul_rn(x, y); }
template<class T> inline Complex<T> operator-(Complex<T> a) { return {-a.re, -a.im}; }
template<class T> inline Complex<T> operator+(Complex<T> a, Complex<T> b) {
  return {a.re + b.re, a.im + b.im};
}
template<class T> inline Complex<T> operator-(Complex<T> a, Complex<T> b) {
  return {a.re - b.re, a.im - b.im};
}
template<class T> inline Complex<T> operator*(Complex<T> a, Complex<T> b) {
  return {product(a.re, b.re) - product(a.im, b.im), product(a.re, b.im) + product(a.im, b.re)};
}
// R. L. Smith, "Algorithm 116: complex division" (1962), as NumPy does
template<class T> inline Complex<T> operator/(Complex<T> a, Complex<T> b) {
  T re = b.re < 0 ? -b.re : b.re, im = b.im < 0 ? -b.im : b.im;
  if (re >= im) {
    if (re == 0 && im == 0) return {a.re / re, a.im / re};
    T ratio = b.im / b.re, scale = T(1) / (b.re + b.im * ratio);
    return {(a.re + a.im * ratio) * scale, (a.im - a.re * ratio) * scale};
  }
  T ratio = b.re / b.im, scale = T(1) / (b.im + b.re * ratio);
  return {(a.re * ratio + a.im) * scale, (a.im * ratio - a.re) * scale};
}
template<class T> inline bool operator==(Complex<T> a, Complex<T> b) { return a.re == b.re && a.im == b.im; }
template<class T> inline bool operator!=(Complex<T> a, Complex<T> b) { return !(a == b); }

//# bf_convert
// integers from floats: toward zero, out of range the nearest there is, 0 of NaN; complex drop the imaginary part
template<class To, class From> inline To bf_convert(From x) {
  constexpr int to = kind_of<To>::value, from = kind_of<From>::value;
  if constexpr (is_same_type<To, From>::value) return x;
  else if constexpr (from == KIND_COMPLEX && to == KIND_COMPLEX) {
    return To{decltype(To::re)(x.re), decltype(To::im)(x.im)};
  } else if constexpr (from == KIND_COMPLEX && to == KIND_BOOL) return x.re != 0 || x.im != 0;
  else if constexpr (from == KIND_COMPLEX) return bf_convert<To>(x.re);
  else if constexpr (from == KIND_STORAGE) return bf_convert<To>(to_float(x));
  else if constexpr (to == KIND_COMPLEX) return To{decltype(To::re)(x), 0};
  else if constexpr (to == KIND_STORAGE) {
    // NumPy rounds double to float16 once, what ml_dtypes adds by way of float
    if constexpr (is_same_type<From, double>::value && float_format<To>::mantissa == 10)
      return To{ptx_to_f16(x)};
    else return from_float<To>((float)x);
  } else if constexpr (to == KIND_BOOL) return x != 0;
  else if constexpr (from == KIND_FLOAT && to == KIND_INTEGER) {
    // both ends as powers of two, or 0, which are exact; what lies between -1 and 0 is 0 in any case
    constexpr From top = From(To(1) << (sizeof(To) * 8 - 2)) * (To(-1) < To(0) ? 2 : 4);
    constexpr From bottom = To(-1) < To(0) ? -top : From(0);
    return x >= top ? highest<To>() : x < bottom ? lowest<To>() : x == x ? To(x) : To(0);
  } else return To(x);
}

//# bf_neg
template<class T> inline T bf_neg(T x) { return T(-(typename wrapping<T>::type)x); }
//# bf_add
template<class T> inline T bf_add(T x, T y) {
  typedef typename wrapping<T>::type W;
  return T(W(x) + W(y));
}
//# bf_sub
template<class T> inline T bf_sub(T x, T y) {
  typedef typename wrapping<T>::type W;
  return T(W(x) - W(y));
}
//# bf_mul
template<class T> inline T bf_mul(T x, T y) {
  typedef typename wrapping<T>::type W;
  return T(W(x) * W(y));
}

//# bf_div
// integers toward zero; by zero 0, as NumPy
template<class T> inline T bf_div(T x, T y) {
  if constexpr (kind_of<T>::value != KIND_INTEGER) return x / y;
  else if constexpr (T(-1) < T(0)) return y == T(0) ? T(0) : y == T(-1) ? bf_neg(x) : T(x / y);
  else return y == T(0) ? T(0) : T(x / y);
}
//# bf_rem
// the remainder of bf_div, with the sign of x
static inline float bf_rem(float x, float y) { return fmodf(x, y); }
static inline double bf_rem(double x, double y) { return fmod(x, y); }
template<class T> inline T bf_rem(T x, T y) {
  if constexpr (T(-1) < T(0)) return y == T(0) || y == T(-1) ? T(0) : T(x % y);
  else return y == T(0) ? T(0) : T(x % y);
}

//# bf_max
static inline float bf_max(float x, float y) { return ptx_max(x, y); }
static inline double bf_max(double x, double y) { return x > y || x != x ? x : y; }
template<class T> inline T bf_max(T x, T y) { return x > y ? x : y; }
//# bf_min
static inline float bf_min(float x, float y) { return ptx_min(x, y); }
static inline double bf_min(double x, double y) { return x < y || x != x ? x : y; }
template<class T> inline T bf_min(T x, T y) { return x < y ? x : y; }
//# bf_clamp
template<class T> inline T bf_clamp(T low, T x, T high) { return bf_min(bf_max(x, low), high); }

//# bf_abs
static inline float bf_abs(float x) { return fabsf(x); }
static inline double bf_abs(double x) { return fabs(x); }
template<class T> inline T bf_abs(T x) { return x < T(0) ? bf_neg(x) : x; }
//# bf_sign
template<class T> inline T bf_sign(T x) { return x != x ? x : T((x > T(0)) - (x < T(0))); }
//# bf_square
template<class T> inline T bf_square(T x) {
  typedef typename wrapping<T>::type W;
  return T(W(x) * W(x));
}

//# bf_pow
static inline float bf_pow(float x, float y) { return powf(x, y); }
static inline double bf_pow(double x, double y) { return pow(x, y); }
//# power_by_squaring
// of integers, which wrap, and for small powers of floats, which lose an ulp or so in it
template<class T, class N> inline T power_by_squaring(T x, N n) {
  typedef typename wrapping<T>::type W;
  W base = W(x), result = base;
  bool started = false;
  for (; n; n >>= 1) {
    if (n & 1) {
      result = started ? W(result * base) : base;
      started = true;
    }
    if (n > 1) base = W(base * base);
  }
  return T(result);
}
//# bf_pow_integers
// a power below 0 is rounded toward zero, that of 0 too
template<class T> inline T bf_pow_integers(T x, T y) {
  if constexpr (T(-1) < T(0)) {
    if (y < T(0)) return x == T(1) || x == T(-1) ? (y & T(1) ? x : T(1)) : T(0);
  }
  return y == T(0) ? T(1) : power_by_squaring(x, (uint64_t)y);
}
//# bf_integer_pow
template<class T> inline T bf_integer_pow(T x, int n) {
  if (n == 0) return T(1);
  if constexpr (kind_of<T>::value == KIND_FLOAT) {
    if (n == -1) return T(1) / x;
    if (n < 0 || n > 4) return bf_pow(x, T(n));
  }
  return power_by_squaring(x, (unsigned)n);
}

//# bf_sqrt
static inline float bf_sqrt(float x) { return sqrtf(x); }
static inline double bf_sqrt(double x) { return sqrt(x); }
//# bf_rsqrt
static inline float bf_rsqrt(float x) { return rsqrtf(x); }
static inline double bf_rsqrt(double x) { return rsqrt(x); }
//# bf_cbrt
static inline float bf_cbrt(float x) { return cbrtf(x); }
static inline double bf_cbrt(double x) { return cbrt(x); }
//# bf_hypot
static inline float bf_hypot(float x, float y) { return hypotf(x, y); }
static inline double bf_hypot(double x, double y) { return hypot(x, y); }

//# bf_exp
static inline float bf_exp(float x) { return expf(x); }
static inline double bf_exp(double x) { return exp(x); }
//# ptx_exp
// within 2 + 1.2 |x| units in the last place: for what is rounded to 16 bits
static inline float ptx_exp(float x) { return __expf(x); }
//# ptx_exp_ftz
// the same, or 0 in the place of denormals
static inline float ptx_exp_ftz(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x * 1.44269504f));
  return r;
}
//# bf_exp2
static inline float bf_exp2(float x) { return exp2f(x); }
static inline double bf_exp2(double x) { return exp2(x); }
//# bf_expm1
static inline float bf_expm1(float x) { return expm1f(x); }
static inline double bf_expm1(double x) { return expm1(x); }
//# bf_log
static inline float bf_log(float x) { return logf(x); }
static inline double bf_log(double x) { return log(x); }
//# bf_log1p
static inline float bf_log1p(float x) { return log1pf(x); }
static inline double bf_log1p(double x) { return log1p(x); }
//# bf_logistic
// the reciprocal is within 1 ulp and has no slow path: of an infinite denominator it is 0
static inline float bf_logistic(float x) { return ptx_rcp(1.0f + expf(-x)); }
static inline double bf_logistic(double x) { return 1.0 / (1.0 + exp(-x)); }
//# ptx_logistic
// within 2 + 1.2 |x| units in the last place, or 0 in the place of denormals: for what is rounded to 16 bits
static inline float ptx_logistic(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + ptx_exp_ftz(-x)));
  return r;
}
//# bf_sin
static inline float bf_sin(float x) { return sinf(x); }
static inline double bf_sin(double x) { return sin(x); }
//# bf_cos
static inline float bf_cos(float x) { return cosf(x); }
static inline double bf_cos(double x) { return cos(x); }
//# bf_tan
static inline float bf_tan(float x) { return tanf(x); }
static inline double bf_tan(double x) { return tan(x); }
//# bf_asin
static inline float bf_asin(float x) { return asinf(x); }
static inline double bf_asin(double x) { return asin(x); }
//# bf_acos
static inline float bf_acos(float x) { return acosf(x); }
static inline double bf_acos(double x) { return acos(x); }
//# bf_atan
static inline float bf_atan(float x) { return atanf(x); }
static inline double bf_atan(double x) { return atan(x); }
//# bf_atan2
static inline float bf_atan2(float x, float y) { return atan2f(x, y); }
static inline double bf_atan2(double x, double y) { return atan2(x, y); }
//# bf_sinh
static inline float bf_sinh(float x) { return sinhf(x); }
static inline double bf_sinh(double x) { return sinh(x); }
//# bf_cosh
static inline float bf_cosh(float x) { return coshf(x); }
static inline double bf_cosh(double x) { return cosh(x); }
//# bf_tanh
// CUDA's is branch-free: a polynomial below 0.6, one exponential and a reciprocal above
static inline float bf_tanh(float x) { return tanhf(x); }
static inline double bf_tanh(double x) { return tanh(x); }
//# bf_asinh
static inline float bf_asinh(float x) { return asinhf(x); }
static inline double bf_asinh(double x) { return asinh(x); }
//# bf_acosh
static inline float bf_acosh(float x) { return acoshf(x); }
static inline double bf_acosh(double x) { return acosh(x); }
//# bf_atanh
static inline float bf_atanh(float x) { return atanhf(x); }
static inline double bf_atanh(double x) { return atanh(x); }
//# bf_erf
static inline float bf_erf(float x) { return erff(x); }
static inline double bf_erf(double x) { return erf(x); }
//# bf_erfc
static inline float bf_erfc(float x) { return erfcf(x); }
static inline double bf_erfc(double x) { return erfc(x); }
//# bf_erf_inv
static inline float bf_erf_inv(float x) { return erfinvf(x); }
static inline double bf_erf_inv(double x) { return erfinv(x); }
//# bf_erfcx
static inline float bf_erfcx(float x) { return erfcxf(x); }
static inline double bf_erfcx(double x) { return erfcx(x); }
//# bf_lgamma
static inline float bf_lgamma(float x) { return lgammaf(x); }
static inline double bf_lgamma(double x) { return lgamma(x); }
//# bf_logaddexp
// equal operands first: the difference of two infinities is NaN
template<class T> inline T bf_logaddexp(T x, T y) {
  return x == y ? x + T(0.6931471805599453) : bf_max(x, y) + bf_log1p(bf_exp(-bf_abs(x - y)));
}

//# bf_floor
static inline float bf_floor(float x) { return floorf(x); }
static inline double bf_floor(double x) { return floor(x); }
//# bf_ceil
static inline float bf_ceil(float x) { return ceilf(x); }
static inline double bf_ceil(double x) { return ceil(x); }
//# bf_trunc
static inline float bf_trunc(float x) { return truncf(x); }
static inline double bf_trunc(double x) { return trunc(x); }
//# bf_round
static inline float bf_round(float x) { return rintf(x); }
static inline double bf_round(double x) { return rint(x); }
//# bf_is_finite
static inline bool bf_is_finite(float x) { return fabsf(x) < INFINITY; }
static inline bool bf_is_finite(double x) { return fabs(x) < (double)INFINITY; }

//# bf_nextafter
// storage types step in their own grid: away from zero the bits go up, towards it down
static inline float bf_nextafter(float x, float y) { return nextafterf(x, y); }
static inline double bf_nextafter(double x, double y) { return nextafter(x, y); }
template<class T> inline T bf_nextafter(T x, T y) {
  typedef typename unsigned_of<sizeof(T)>::type U;
  constexpr U sign = U(1u << (sizeof(T) * 8 - 1));
  float a = to_float(x), b = to_float(y);
  if (a != a) return x;
  if (b != b || a == b) return y;
  if (a == 0.0f) return bf_bitcast<T>(U(1u | (b < 0.0f ? sign : 0u)));
  U bits = bf_bitcast<U>(x);
  return bf_bitcast<T>(U((a < b) == (a > 0.0f) ? bits + 1u : bits - 1u));
}

//# bf_reduce_precision
// ties to even; too large is infinite, below the normal numbers 0. T is the type as stored
template<class T> inline T bf_reduce_precision(T x, int exponent_bits, int mantissa_bits) {
  typedef typename unsigned_of<sizeof(T)>::type U;
  constexpr int mantissa = float_format<T>::mantissa, width = float_format<T>::exponent;
  constexpr U sign_bit = U(U(1) << (mantissa + width)), exponents = U((U(1) << width) - 1);
  U original = bf_bitcast<U>(x), bits = original;
  bool finite;
  if constexpr (kind_of<T>::value == KIND_STORAGE) finite = fabsf(to_float(x)) < INFINITY;
  else finite = U(original >> mantissa & exponents) != exponents;
  int drop = mantissa - mantissa_bits;
  if (drop > 0) {
    U odd = U(bits >> drop & U(1));
    bits = U(U(U(bits + U((U(1) << (drop - 1)) - 1) + odd) >> drop) << drop);
  }
  if (exponent_bits < width) {
    int exponent = int(bits >> mantissa & exponents);
    int middle = (1 << (width - 1)) - 1, reach = (1 << (exponent_bits - 1)) - 1;
    U sign = U(bits & sign_bit);
    bits = exponent > middle + reach    ? U(sign | U(exponents << mantissa))
           : exponent <= middle - reach ? sign
                                        : bits;
  }
  return bf_bitcast<T>(finite ? bits : original);
}

//# bf_eq
template<class T> inline bool bf_eq(T x, T y) { return x == y; }
//# bf_ne
template<class T> inline bool bf_ne(T x, T y) { return x != y; }
//# bf_lt
template<class T> inline bool bf_lt(T x, T y) { return x < y; }
//# bf_le
template<class T> inline bool bf_le(T x, T y) { return x <= y; }
//# bf_gt
template<class T> inline bool bf_gt(T x, T y) { return x > y; }
//# bf_ge
template<class T> inline bool bf_ge(T x, T y) { return x >= y; }

//# bf_not
static inline bool bf_not(bool x) { return !x; }
template<class T> inline T bf_not(T x) { return T(~x); }
//# bf_and
template<class T> inline T bf_and(T x, T y) { return T(x & y); }
//# bf_or
template<class T> inline T bf_or(T x, T y) { return T(x | y); }
//# bf_xor
template<class T> inline T bf_xor(T x, T y) { return T(x ^ y); }
//# bf_shift_left
// by the width or more, or by less than 0: 0
template<class T> inline T bf_shift_left(T x, T y) {
  typedef typename unsigned_of<sizeof(T)>::type U;
  return U(y) < sizeof(T) * 8 ? T((typename wrapping<T>::type)U(x) << U(y)) : T(0);
}
//# bf_shift_right_logical
template<class T> inline T bf_shift_right_logical(T x, T y) {
  typedef typename unsigned_of<sizeof(T)>::type U;
  return U(y) < sizeof(T) * 8 ? T(U(x) >> U(y)) : T(0);
}
//# bf_shift_right_arithmetic
template<class T> inline T bf_shift_right_arithmetic(T x, T y) {
  typedef typename unsigned_of<sizeof(T)>::type U;
  return U(y) < sizeof(T) * 8 ? T(x >> U(y)) : x < T(0) ? T(-1) : T(0);
}
//# bf_population_count
template<class T> inline T bf_population_count(T x) {
  typedef typename unsigned_of<sizeof(T)>::type U;
  if constexpr (sizeof(T) == 8) return T(__popcll(U(x)));
  else return T(__popc(U(x)));
}
//# bf_gcd
// Euclid's algorithm on magnitudes
template<class T> inline T bf_gcd(T x, T y) {
  typedef typename unsigned_of<sizeof(T)>::type U;
  U a = x < T(0) ? U(-(typename wrapping<T>::type)x) : U(x),
    b = y < T(0) ? U(-(typename wrapping<T>::type)y) : U(y);
  while (b) {
    U r = U(a % b);
    a = b;
    b = r;
  }
  return T(a);
}

//# bf_select
template<class T> inline T bf_select(bool p, T x, T y) { return p ? x : y; }
//# bf_copy
template<class T> inline T bf_copy(T x) { return x; }
//# bf_stop_gradient
template<class T> inline T bf_stop_gradient(T x) { return x; }
//# bf_conj
template<class T> inline T bf_conj(T x) { return x; }

//# prng_key
struct prng_key { uint32_t hi, lo; };
//# bf_threefry2x32 Bits2
// the cipher of the counter (x0, x1) under the key (k0, k1), 20 rounds: Salmon et al., "Parallel Random Numbers: As
// Easy as 1, 2, 3" (2011)
struct Bits2 { uint32_t a, b; };
static inline Bits2 bf_threefry2x32(uint32_t k0, uint32_t k1, uint32_t x0, uint32_t x1) {
  constexpr int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t key[3] = {k0, k1, k0 ^ k1 ^ 0x1bd11bdau};
  uint32_t a = x0 + k0, b = x1 + k1;
#pragma unroll
  for (int group = 0; group < 5; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int r = rotations[group % 2][i];
      a += b;
      b = (b << r | b >> (32 - r)) ^ a;
    }
    a += key[(group + 1) % 3];
    b += key[(group + 2) % 3] + (uint32_t)(group + 1);
  }
  return {a, b};
}
