// Mathematical functions of the host: branch-free C++ that compilers vectorize.
//
// Each part takes the place of the part of codegen/include/bf_scalar.h with the same names. Both sides of every choice
// are computed and one is selected; no function of libm is called where the arguments are float. Polynomials are
// interpolations at Chebyshev nodes, computed to 60 digits, of the function that the comment names; argument reductions
// are those of W. J. Cody and W. Waite, "Software Manual for the Elementary Functions" (1980).
//
// Within 2 ulp in float (logistic 2.2): exp, exp2, expm1, log, log1p, tanh, erf, sin, cos; within 1 ulp what is computed
// in double. NaN, infinities, signed zeros and subnormals are as in C99. In double the exponentials and logarithms, tanh
// and logistic are done so too; the others call libm, one scalar at a time.

//# two_over_pi_high two_over_pi_low
// 2^e 2/pi modulo 4 for e from 0 to 104: 26 bits after the point, and the rest; then the entry of infinity and NaN
// clang-format off
static const double two_over_pi_high[106] = {
  0.6366197615861893, 1.2732395380735397, 2.5464790761470795, 1.0929581671953201, 2.1859163492918015,
  0.3718327134847641, 0.7436654269695282, 1.4873308539390564, 2.974661722779274, 1.949323445558548,
  3.898646891117096, 3.797293797135353, 3.5945876091718674, 3.189175233244896, 2.378350466489792,
  0.7567009329795837, 1.5134018808603287, 3.0268037617206573, 2.0536075234413147, 0.1072150468826294,
  0.21443010866641998, 0.42886021733283997, 0.8577204346656799, 1.7154408693313599, 3.4308817386627197,
  2.8617634773254395, 1.72352696955204, 3.44705393910408, 2.8941078931093216, 1.7882157862186432,
  3.5764315873384476, 3.152863174676895, 2.3057263493537903, 0.6114527136087418, 1.2229054272174835,
  2.4458108693361282, 0.8916217386722565, 1.783243477344513, 3.566486969590187, 3.1329739540815353,
  2.265947923064232, 0.5318958610296249, 1.063791736960411, 2.1275834888219833, 0.25516699254512787,
  0.5103339850902557, 1.0206679701805115, 2.041335940361023, 0.0826718807220459, 0.165343776345253,
  0.330687552690506, 0.661375105381012, 1.3227502256631851, 2.6455004662275314, 1.291000947356224,
  2.582001894712448, 1.1640038043260574, 2.328007608652115, 0.6560152322053909, 1.3120304644107819,
  2.624060943722725, 1.248121902346611, 2.4962438195943832, 0.9924876540899277, 1.9849753230810165,
  3.969950646162033, 3.9399013072252274, 3.8798026144504547, 3.7596052289009094, 3.519210457801819,
  3.038420930504799, 2.076841875910759, 0.15368376672267914, 0.30736754834651947, 0.6147351115942001,
  1.2294702231884003, 2.4589404612779617, 0.9178809225559235, 1.8357618600130081, 3.6715237200260162,
  3.3430474400520325, 2.686094895005226, 1.3721898049116135, 2.744379609823227, 1.488759234547615,
  2.97751846909523, 1.9550369381904602, 3.9100738912820816, 3.8201477974653244, 3.640295594930649,
  3.280591204762459, 2.561182424426079, 1.1223648637533188, 2.2447297275066376, 0.48945946991443634,
  0.9789189547300339, 1.957837924361229, 3.915675848722458, 3.8313516974449158, 3.6627033948898315,
  3.325406789779663, 2.650813579559326, 1.3016271591186523, 2.603254333138466, 1.206508681178093,
  0.0
};
static const double two_over_pi_low[106] = {
  1.0781392073056004e-08, 6.661622952264352e-09, 1.3323245904528703e-08, 1.1745330615209749e-08, 8.589500036571843e-09,
  2.277838879296028e-09, 4.555677758592056e-09, 9.111355517184112e-09, 3.3215498405205676e-09, 6.643099681041135e-09,
  1.328619936208227e-08, 1.1671237530316883e-08, 8.441313866786111e-09, 1.9814665397245642e-09, 3.9629330794491285e-09,
  7.925866158898257e-09, 9.505711239488593e-10, 1.9011422478977186e-09, 3.802284495795437e-09, 7.604568991590874e-09,
  3.0797678933409213e-10, 6.159535786681843e-10, 1.2319071573363685e-09, 2.463814314672737e-09, 4.927628629345474e-09,
  9.855257258690948e-09, 4.809353323534241e-09, 9.618706647068482e-09, 4.3362521002893065e-09, 8.672504200578613e-09,
  2.4438472073095704e-09, 4.887694414619141e-09, 9.775388829238282e-09, 4.649616464628909e-09, 9.299232929257818e-09,
  3.697304664667978e-09, 7.394609329335956e-09, 1.4789218658671912e-08, 1.4677276123496168e-08, 1.4453391053144678e-08,
  1.4005620912441701e-08, 1.3110080631035746e-08, 1.1319000068223836e-08, 7.736838942600013e-09, 5.725166913523703e-10,
  1.1450333827047407e-09, 2.2900667654094814e-09, 4.580133530818963e-09, 9.160267061637926e-09, 3.419372929428196e-09,
  6.838745858856392e-09, 1.3677491717712784e-08, 1.2453822241577914e-08, 1.0006483289308172e-08, 5.111805384768686e-09,
  1.0223610769537373e-08, 5.546060345227088e-09, 1.1092120690454177e-08, 7.283080187060699e-09, 1.4566160374121397e-08,
  1.4231159554395137e-08, 1.3561157914942618e-08, 1.222115463603758e-08, 9.541148078227505e-09, 4.181134962607352e-09,
  8.362269925214704e-09, 1.8233786565817506e-09, 3.646757313163501e-09, 7.293514626327002e-09, 1.4587029252654004e-08,
  1.4272897311460354e-08, 1.364463342907305e-08, 1.2388105664298447e-08, 9.875050134749237e-09, 4.848939075650817e-09,
  9.697878151301633e-09, 4.494595108755612e-09, 8.989190217511225e-09, 3.077219241174792e-09, 6.154438482349584e-09,
  1.2308876964699167e-08, 9.716592735550677e-09, 4.532024277253699e-09, 9.064048554507397e-09, 3.226935915167138e-09,
  6.453871830334276e-09, 1.2907743660668553e-08, 1.0914326127489448e-08, 6.927491061131239e-09, 1.3854982122262478e-08,
  1.28088030506773e-08, 1.0716444907506943e-08, 6.53172862116623e-09, 1.306345724233246e-08, 1.1225753290817263e-08,
  7.550345387786871e-09, 1.995295817260851e-10, 3.990591634521702e-10, 7.981183269043404e-10, 1.5962366538086808e-09,
  3.1924733076173616e-09, 6.384946615234723e-09, 1.2769893230469446e-08, 1.0638625267091236e-08, 6.376089340334816e-09,
  0.0
};
// clang-format on

//# fused
// x * y + z, rounded once where the processor can; what uses it is accurate either way
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
static inline float fused(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline double fused(double x, double y, double z) { return __builtin_fma(x, y, z); }
#else
static inline float fused(float x, float y, float z) { return x * y + z; }
static inline double fused(double x, double y, double z) { return x * y + z; }
#endif
//# horner
// c + rest[0] x + rest[1] x^2 + ...
template<class T> inline T horner(T, T c) { return c; }
template<class T, class... Rest> inline T horner(T x, T c, Rest... rest) {
  return fused(horner(x, T(rest)...), x, c);
}
//# power_of_two power_of_two_double
// 2^n, a normal number
static inline float power_of_two(int32_t n) { return __uint_as_float((uint32_t)(n + 127) << 23); }
static inline double power_of_two_double(int32_t n) {
  return bits_as_double((uint64_t)(int64_t)(n + 1023) << 52);
}
//# scaled
// p 2^n, in two steps: 2^n alone may be subnormal or overflow
static inline float scaled(float p, int32_t n) {
  int32_t half = n >> 1;
  return p * power_of_two(half) * power_of_two(n - half);
}
static inline double scaled(double p, int32_t n) {
  int32_t half = n >> 1;
  return p * power_of_two_double(half) * power_of_two_double(n - half);
}
//# remainder_ln2
// x - n ln 2; n has few bits and so has the first part of ln 2: their product is exact
static inline float remainder_ln2(float x, float n) {
  return fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x));
}
static inline double remainder_ln2(double x, double n) {
  return fused(n, -1.90821492927058770e-10, fused(n, -0.693147180369123816, x));
}
//# expm1_near
// e^r - 1 for |r| <= ln 2 / 2: (e^r - 1 - r) / r^2 is a polynomial; in double (e^r - 1 - r - r^2/2) / r^3 is
static inline float expm1_near(float r) {
  return fused(r * r, horner(r, 0.5f, 0.166665733f, 0.0416665487f, 0.00836377405f, 0.00139269268f), r);
}
static inline double expm1_near(double r) {
  double q =
      horner(r, 0.5, 0.16666666666666669, 0.041666666666666664, 0.008333333333329793, 0.001388888888888636,
             0.00019841269864380513, 2.4801587318092064e-05, 2.75572664186123e-06, 2.755728151175639e-07,
             2.510134692835034e-08, 2.091192320685759e-09);
  return fused(r * r, q, r);
}
//# exp_middle
// e^x where it is a normal number
static inline float exp_middle(float x) {
  float n = __builtin_rintf(x * 1.44269504f);
  return (1.0f + expm1_near(remainder_ln2(x, n))) * power_of_two((int32_t)n);
}
//# bf_exp
static inline float bf_exp(float x) {
  float y = x > 89.0f ? 89.0f : x;
  y = y < -104.0f ? -104.0f : y;
  float n = __builtin_rintf(y * 1.44269504f);
  return scaled(1.0f + expm1_near(remainder_ln2(y, n)), (int32_t)n);
}
static inline double bf_exp(double x) {
  double y = x > 710.0 ? 710.0 : x;
  y = y < -746.0 ? -746.0 : y;
  double n = __builtin_rint(y * 1.4426950408889634);
  return scaled(1.0 + expm1_near(remainder_ln2(y, n)), (int32_t)n);
}
//# bf_exp2
// (2^r - 1) / r is a polynomial
static inline float bf_exp2(float x) {
  float y = x > 129.0f ? 129.0f : x;
  y = y < -151.0f ? -151.0f : y;
  float n = __builtin_rintf(y), r = y - n;
  float q =
      horner(r, 0.693147182f, 0.240226507f, 0.0555035695f, 0.00961808208f, 0.00133908866f, 0.000154531823f);
  return scaled(fused(r, q, 1.0f), (int32_t)n);
}
static inline double bf_exp2(double x) {
  double y = x > 1025.0 ? 1025.0 : x;
  y = y < -1076.0 ? -1076.0 : y;
  double n = __builtin_rint(y);
  return scaled(1.0 + expm1_near((y - n) * 0.6931471805599453), (int32_t)n);
}
//# bf_expm1
// 2^n (1 + p) - 1 = 2 (p h + (h - 1/2)) with h = 2^(n-1), which does not overflow before the result does
static inline float bf_expm1(float x) {
  float y = x > 89.0f ? 89.0f : x;
  y = y < -20.0f ? -20.0f : y;
  float n = __builtin_rintf(y * 1.44269504f), h = power_of_two((int32_t)n - 1);
  float result = 2.0f * fused(expm1_near(remainder_ln2(y, n)), h, h - 0.5f);
  return __builtin_fabsf(x) < 1e-8f ? x : result;
}
static inline double bf_expm1(double x) {
  double y = x > 710.0 ? 710.0 : x;
  y = y < -40.0 ? -40.0 : y;
  double n = __builtin_rint(y * 1.4426950408889634), h = power_of_two_double((int32_t)n - 1);
  double result = 2.0 * fused(expm1_near(remainder_ln2(y, n)), h, h - 0.5);
  return __builtin_fabs(x) < 1e-17 ? x : result;
}
//# log_plus
// log(x) + c: x = 2^k (1 + f) with 1 + f from sqrt(1/2) to sqrt(2). In float (log(1+f) - f + f^2/2) / f^3 is a
// polynomial; in double, with s = f / (2+f), (log(1+f) / (2s) - 1) / s^2 is one in s^2
static inline float log_plus(float x, float c) {
  bool tiny = x < 1.17549435e-38f;
  int32_t i = (int32_t)__float_as_uint(tiny ? x * 8388608.0f : x) - 0x3f3504f3;
  float k = (float)((i >> 23) - (tiny ? 23 : 0));
  float f = __uint_as_float((uint32_t)((i & 0x7fffff) + 0x3f3504f3)) - 1.0f, z = f * f;
  float q = horner(f, 0.333333313f, -0.24999997f, 0.20000717f, -0.166678086f, 0.142490089f, -0.124254867f,
                   0.116857193f, -0.114814773f, 0.0697307065f);
  float low = fused(-0.5f, z, fused(f * z, q, fused(k, -2.12194440e-4f, c)));
  float result = fused(k, 0.693359375f, f + low);
  return x > 0.0f ? (x < INFINITY ? result : x) : (x == 0.0f ? -INFINITY : NAN);
}
static inline double log_plus(double x, double c) {
  bool tiny = x < 2.2250738585072014e-308;
  int64_t i = (int64_t)double_as_bits(tiny ? x * 18014398509481984.0 : x) - 0x3fe6a09e667f3bcdll;
  double k = (double)(((int32_t)(i >> 32) >> 20) - (tiny ? 54 : 0));
  double f = bits_as_double((uint64_t)((i & 0xfffffffffffffll) + 0x3fe6a09e667f3bcdll)) - 1.0;
  double s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
  double q = z * horner(z, 0.6666666666666666, 0.400000000000009, 0.2857142857078885, 0.22222222395054644,
                        0.18181795283839772, 0.15386259045132328, 0.13268256124844366, 0.1309202269781453);
  double low = fused(s, half + q, fused(k, 1.90821492927058770e-10, c));
  double result = fused(k, 0.693147180369123816, f - (half - low));
  return x > 0.0 ? (x < (double)INFINITY ? result : x) : (x == 0.0 ? -(double)INFINITY : (double)NAN);
}
//# bf_log
static inline float bf_log(float x) { return log_plus(x, 0.0f); }
static inline double bf_log(double x) { return log_plus(x, 0.0); }
//# bf_log1p
// the sum u = 1 + x is rounded: what it lost, over u, is the correction
template<class T> inline T log1p_of(T x) {
  T u = T(1) + x, lost = (x - (u - T(1))) / u;
  bool usual = u > T(0) && u < T(INFINITY);
  T result = log_plus(u, usual ? lost : T(0));
  return x == T(0) ? x : result;
}
static inline float bf_log1p(float x) { return log1p_of(x); }
static inline double bf_log1p(double x) { return log1p_of(x); }
//# bf_tanh
// (tanh(x)/x - 1) / x^2 is a polynomial in x^2; above 0.6, 1 - 2 / (e^(2x) + 1)
static inline float bf_tanh(float x) {
  float a = __builtin_fabsf(x), z = a * a;
  float q = horner(z, -0.333333313f, 0.133329153f, -0.0538739488f, 0.0211109538f, -0.00626911363f);
  float near = fused(a * z, q, a);
  float far = 1.0f - 2.0f / (exp_middle(2.0f * (a > 10.0f ? 10.0f : a)) + 1.0f);
  return __builtin_copysignf(a < 0.6f ? near : far, x);
}
static inline double bf_tanh(double x) {
  double a = __builtin_fabs(x), e = bf_expm1(2.0 * (a > 22.0 ? 22.0 : a));
  return __builtin_copysign(e / (e + 2.0), x);
}
//# bf_logistic
// e^-|x| does not overflow, and so the result is right into the subnormal numbers
template<class T> inline T logistic_of(T x, T e) { return (x < T(0) ? e : T(1)) / (T(1) + e); }
static inline float bf_logistic(float x) { return logistic_of(x, bf_exp(-__builtin_fabsf(x))); }
static inline double bf_logistic(double x) { return logistic_of(x, bf_exp(-__builtin_fabs(x))); }
//# bf_erf
// erf(x)/x - 1 is a polynomial in x^2; above 0.92, 1 - e^-p where p = -log(erfc(x)) is one in x; from 3.95 it is 1
static inline float bf_erf(float x) {
  float a = __builtin_fabsf(x), z = a * a, t = a > 3.95f ? 3.95f : a;
  float near = fused(a,
                     horner(z, 0.128379166f, -0.376126349f, 0.112836912f, -0.0268591512f, 0.00520036835f,
                            -0.000813470804f, 8.33471495e-05f),
                     a);
  float p = horner(t, -0.000325905363f, 1.13026178f, 0.631769538f, 0.110140562f, -0.0264594145f,
                   0.00477437768f, -0.000600225001f, 4.64933619e-05f, -1.66059635e-06f);
  return __builtin_copysignf(a < 0.92f ? near : 1.0f - exp_middle(-p), x);
}
static inline double bf_erf(double x) { return __builtin_erf(x); }
//# bf_erfc
// (1 + 2x) e^(x^2) erfc(x) is a polynomial in (x-4)/(x+4) for x >= 0 (M. M. Shepherd and J. G. Laframboise, 1981)
static inline float bf_erfc(float x) {
  double b = __builtin_fabs((double)x), a = b > 11.0 ? 11.0 : b, t = (a - 4.0) / (a + 4.0);
  double q = horner(t, 1.2329951188180261, -0.13962111586732154, 0.015379619284312017, 0.06809699480715126,
                    -0.10103818677766951, 0.09373420393783415, -0.06633851872317256, 0.037153256379638115,
                    -0.016168666682378357, 0.005097857426512957, -0.0007792471006963455,
                    -0.00031371252067752346, 9.736563777196218e-05);
  double r = bf_exp(-a * a) * q / (1.0 + 2.0 * a);
  return (float)(x < 0.0f ? 2.0 - r : r);
}
static inline double bf_erfc(double x) { return __builtin_erfc(x); }
//# bf_erf_inv
// float: M. Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011). Double: from the asymptotic
// expansion of erfc or from the float, two steps of Halley's method
static inline float bf_erf_inv(float x) {
  float w = -bf_log((1.0f - x) * (1.0f + x)), u = w - 2.5f, v = __builtin_sqrtf(w < 5.0f ? 5.0f : w) - 3.0f;
  float near = horner(u, 1.50140941f, 0.246640727f, -0.00417768164f, -0.00125372503f, 0.00021858087f,
                      -4.39150654e-06f, -3.5233877e-06f, 3.43273939e-07f, 2.81022636e-08f);
  float far = horner(v, 2.83297682f, 1.00167406f, 0.00943887047f, -0.0076224613f, 0.00573950773f,
                     -0.00367342844f, 0.00134934322f, 0.000100950558f, -0.000200214257f);
  float result = (w < 5.0f ? near : far) * x;
  return __builtin_fabsf(x) == 1.0f ? x * INFINITY : result;
}
static inline double bf_erf_inv(double x) {
  double a = __builtin_fabs(x);
  if (!(a < 1.0)) return a == 1.0 ? x * (double)INFINITY : (double)NAN;
  double tail = -__builtin_log(1.0 - a), y;
  if (a < 0.99) y = bf_erf_inv((float)a);
  else y = __builtin_sqrt(tail - __builtin_log(__builtin_sqrt(3.141592653589793 * tail)));
  for (int step = 0; step < 2; ++step) {
    double error = a < 0.5 ? __builtin_erf(y) - a : (1.0 - a) - __builtin_erfc(y);
    double newton = error / (1.1283791670955126 * __builtin_exp(-y * y));
    y -= newton / (1.0 + y * newton);
  }
  return a < 1e-300 ? x * 0.8862269254527580 : __builtin_copysign(y, x);
}
//# sine_of cosine_of
// (sin(r)/r - 1) / r^2 and (cos(r) - 1 + r^2/2) / r^4 are polynomials in r^2 for |r| <= pi / 4
static inline float sine_of(float r) {
  float z = r * r;
  return fused(r * z, horner(z, -0.166666672f, 0.00833333191f, -0.00019840087f, 2.72499005e-06f), r);
}
static inline float cosine_of(float r) {
  float z = r * r, q = horner(z, 0.0416666679f, -0.00138888881f, 2.48005999e-05f, -2.73009391e-07f);
  return fused(z * z, q, fused(-0.5f, z, 1.0f));
}
static inline double sine_of(double r) {
  double z = r * r;
  return fused(r * z,
               horner(z, -0.16666666666666666, 0.008333333333330948, -0.00019841269836757058,
                      2.7557316101775256e-06, -2.5051131684136715e-08, 1.5918117756118847e-10),
               r);
}
static inline double cosine_of(double r) {
  double z = r * r;
  double q = horner(z, 0.041666666666666664, -0.0013888888888887398, 2.480158729876474e-05,
                    -2.75573172712436e-07, 2.087614616776727e-09, -1.138262520699969e-11);
  return fused(z * z, q, fused(-0.5, z, 1.0));
}
//# from_quadrant
// x >= 0 as quadrant pi/2 + r, |r| <= pi/4, for every float: with x = m 2^e, m below 2^24, the table has 2^e 2/pi
// modulo 4 in two parts, the product of the first of which with m is exact (M. Payne and R. Hanek, 1983)
static inline double from_quadrant(float x, int32_t &quadrant) {
  int32_t e = (int32_t)(__float_as_uint(x) >> 23) - 150;
  e = e < 0 ? 0 : e;
  double m = (double)x * power_of_two_double(-e), low = two_over_pi_low[e];
  double turns = m * two_over_pi_high[e], n = __builtin_rint(fused(m, low, turns));
  quadrant = (int32_t)n;
  return fused(m, low, turns - n) * 1.5707963267948966;
}
//# bf_sin
static inline float bf_sin(float x) {
  int32_t quadrant;
  float r = (float)from_quadrant(__builtin_fabsf(x), quadrant);
  uint32_t y = __float_as_uint(quadrant & 1 ? cosine_of(r) : sine_of(r));
  return __uint_as_float(y ^ (uint32_t)(quadrant & 2) << 30 ^ (__float_as_uint(x) & 0x80000000u));
}
static inline double bf_sin(double x) { return __builtin_sin(x); }
//# bf_cos
static inline float bf_cos(float x) {
  int32_t quadrant;
  float r = (float)from_quadrant(__builtin_fabsf(x), quadrant);
  uint32_t y = __float_as_uint(quadrant & 1 ? sine_of(r) : cosine_of(r));
  return __uint_as_float(y ^ (uint32_t)((quadrant + 1) & 2) << 30);
}
static inline double bf_cos(double x) { return __builtin_cos(x); }
//# bf_sin_alone bf_cos_alone
// of one value, which waits for each operation: a branch that is predicted is faster than both sides
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
// |x| < 2^20 as quadrant pi/2 + r: the parts of pi/2 are subtracted exactly, and rounded together
static inline float from_near_quadrant(float x, int32_t &quadrant) {
  double y = x, n = __builtin_rint(y * 0.6366197723675814);
  quadrant = (int32_t)n;
  return (float)fused(n, -6.123233995736766e-17, fused(n, -1.5707963267948966, y));
}
static inline float bf_sin_alone(float x) {
  if (!(__builtin_fabsf(x) < 1048576.0f) || x == 0.0f) return bf_sin(x);
  int32_t quadrant;
  float r = from_near_quadrant(x, quadrant), y;
  if (quadrant & 1) y = cosine_of(r);
  else y = sine_of(r);
  return quadrant & 2 ? -y : y;
}
static inline float bf_cos_alone(float x) {
  if (!(__builtin_fabsf(x) < 1048576.0f)) return bf_cos(x);
  int32_t quadrant;
  float r = from_near_quadrant(x, quadrant), y;
  if (quadrant & 1) y = sine_of(r);
  else y = cosine_of(r);
  return (quadrant + 1) & 2 ? -y : y;
}
#endif
template<class T> inline T bf_sin_alone(T x) { return bf_sin(x); }
template<class T> inline T bf_cos_alone(T x) { return bf_cos(x); }
//# bf_tan
static inline float bf_tan(float x) {
  int32_t quadrant;
  double r = from_quadrant(__builtin_fabsf(x), quadrant), s = sine_of(r), c = cosine_of(r);
  float t = (float)((quadrant & 1 ? -c : s) / (quadrant & 1 ? s : c));
  return __uint_as_float(__float_as_uint(t) ^ (__float_as_uint(x) & 0x80000000u));
}
static inline double bf_tan(double x) { return __builtin_tan(x); }
//# atan_ratio
// the angle of (x, y) in the first quadrant, to 1e-10: (atan(t)/t - 1) / t^2 is a polynomial in t^2
static inline double atan_ratio(double y, double x) {
  bool steep = y > x;
  double low = steep ? x : y, high = steep ? y : x;
  double t = low == high ? (low == 0.0 ? 0.0 : 1.0) : low / high, z = t * t;
  double q =
      horner(z, -0.33333333326942405, 0.19999998153937895, -0.1428562488771608, 0.11109392263984952,
             -0.0907355282824141, 0.07586651666281578, -0.062463121785480705, 0.047294747484507724,
             -0.029913055338897772, 0.014072883959850577, -0.004221642357731444, 0.0005930410556334488);
  double angle = fused(t * z, q, t);
  return steep ? 1.5707963267948966 - angle : angle;
}
//# bf_atan
static inline float bf_atan(float x) {
  return __builtin_copysignf((float)atan_ratio(__builtin_fabsf(x), 1.0), x);
}
static inline double bf_atan(double x) { return __builtin_atan(x); }
//# bf_atan2
static inline float bf_atan2(float y, float x) {
  double angle = atan_ratio(__builtin_fabs((double)y), __builtin_fabs((double)x));
  return __builtin_copysignf((float)(__builtin_copysignf(1.0f, x) < 0.0f ? 3.141592653589793 - angle : angle),
                             y);
}
static inline double bf_atan2(double y, double x) { return __builtin_atan2(y, x); }
//# bf_asin
static inline float bf_asin(float x) {
  double a = __builtin_fabs((double)x);
  return __builtin_copysignf((float)atan_ratio(a, __builtin_sqrt((1.0 - a) * (1.0 + a))), x);
}
static inline double bf_asin(double x) { return __builtin_asin(x); }
//# bf_acos
static inline float bf_acos(float x) {
  double a = __builtin_fabs((double)x), angle = atan_ratio(__builtin_sqrt((1.0 - a) * (1.0 + a)), a);
  return (float)(x < 0.0f ? 3.141592653589793 - angle : angle);
}
static inline double bf_acos(double x) { return __builtin_acos(x); }
//# bf_sinh
static inline float bf_sinh(float x) {
  double a = __builtin_fabs((double)x), e = bf_expm1(a > 100.0 ? 100.0 : a);
  return __builtin_copysignf((float)(0.5 * (e + e / (e + 1.0))), x);
}
static inline double bf_sinh(double x) { return __builtin_sinh(x); }
//# bf_cosh
static inline float bf_cosh(float x) {
  double a = __builtin_fabs((double)x), e = bf_exp(a > 100.0 ? 100.0 : a);
  return (float)(0.5 * (e + 1.0 / e));
}
static inline double bf_cosh(double x) { return __builtin_cosh(x); }
//# bf_asinh
static inline float bf_asinh(float x) {
  double a = __builtin_fabs((double)x), r = bf_log1p(a + a * a / (1.0 + __builtin_sqrt(fused(a, a, 1.0))));
  return __builtin_copysignf((float)(a < (double)INFINITY ? r : a), x);
}
static inline double bf_asinh(double x) { return __builtin_asinh(x); }
//# bf_acosh
static inline float bf_acosh(float x) {
  double t = (double)x - 1.0, r = bf_log1p(t + __builtin_sqrt(t * (t + 2.0)));
  return x >= 1.0f ? (float)r : NAN;
}
static inline double bf_acosh(double x) { return __builtin_acosh(x); }
//# bf_atanh
static inline float bf_atanh(float x) {
  double a = __builtin_fabs((double)x);
  return __builtin_copysignf((float)(0.5 * bf_log1p(2.0 * a / (1.0 - a))), x);
}
static inline double bf_atanh(double x) { return __builtin_atanh(x); }

//# bf_sqrt
static inline float bf_sqrt(float x) { return __builtin_sqrtf(x); }
static inline double bf_sqrt(double x) { return __builtin_sqrt(x); }
//# bf_rsqrt
static inline float bf_rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
static inline double bf_rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
//# bf_cbrt
// a third of the bits of the exponent and mantissa is within 4%; two steps of Halley's method
static inline float bf_cbrt(float x) {
  double a = __builtin_fabs((double)x);
  double y = bits_as_double((uint64_t)((uint32_t)(double_as_bits(a) >> 32) / 3u + 715094163u) << 32),
         cube = y * y * y;
  y = y * (cube + 2.0 * a) / (2.0 * cube + a);
  cube = y * y * y;
  y = y * (cube + 2.0 * a) / (2.0 * cube + a);
  return a > 0.0 && a < (double)INFINITY ? __builtin_copysignf((float)y, x) : x;
}
static inline double bf_cbrt(double x) { return __builtin_cbrt(x); }
//# bf_hypot
// infinite where either is, even if the other is NaN
static inline float bf_hypot(float x, float y) {
  double a = x, b = y;
  bool infinite = __builtin_fabsf(x) == INFINITY || __builtin_fabsf(y) == INFINITY;
  return infinite ? INFINITY : (float)__builtin_sqrt(a * a + b * b);
}
static inline double bf_hypot(double x, double y) { return __builtin_hypot(x, y); }
//# bf_pow
// e^(y log|x|) in double. The sign is that of x to an odd power; other powers of x < 0 must be integers; x^0 and 1^y
// are 1, and so is (-1)^infinity
static inline float bf_pow(float x, float y) {
  double a = __builtin_fabs((double)x), b = y;
  float r = (float)bf_exp(b * bf_log(a));
  bool whole = __builtin_rint(b) == b, odd = whole && __builtin_rint(0.5 * b) != 0.5 * b;
  bool minus = __builtin_copysignf(1.0f, x) < 0.0f;
  r = a == 1.0 && __builtin_fabs(b) == (double)INFINITY ? 1.0f : r;
  r = minus && odd ? -r : r;
  r = x < 0.0f && !whole && x > -INFINITY ? NAN : r;
  return b == 0.0 || x == 1.0f ? 1.0f : r;
}
static inline double bf_pow(double x, double y) {
  // GCC's vectorizer takes the root for a constant exponent of 0.5, which differs from the power at -0 and -infinity
  double r = __builtin_pow(x, y);
  r = y == 0.5 && x == 0.0 ? 0.0 : r;
  return y == 0.5 && x == -INFINITY ? INFINITY : r;
}
