// Functions of generated kernels that use the prelude. render/source.py takes a part if the kernel contains its name.

//# take_up
// accumulates values in their maximum, and in the sum of their exponentials relative to it. NARROW: they were of
// 16 bits; subnormal terms vanish next to the exponential of the maximum, which is 1
template<bool NARROW = false, int V, class T> static inline void take_up(T &top, T &mass, const T (&x)[V]) {
  T most = top;
#pragma unroll
  for (int i = 0; i < V; ++i) most = bf_max(most, x[i]);
  if (!(most <= top)) {
    mass *= bf_exp(top - most);
    top = most;
  }
  const T under = top == -INFINITY ? T(0) : top;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if constexpr (NARROW) mass += ptx_exp_ftz(x[i] - under);
    else mass += bf_exp(x[i] - under);
  }
}
// the sum under a maximum that others have raised; without bounds there is none
template<class T> static inline T under_top(T mass, T own, T top) {
  return top - top == T(0) ? mass * bf_exp(own - top) : T(NAN);
}

//# round_to<bf16>
// the upper half of a pair of bfloat16, the lower one 0, is a float already
template<> inline float round_to<bf16>(float x) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(x), "f"(0.0f));
  return __uint_as_float(r);
}

//# let_next_kernel_begin
// a kernel whose launch may overlap with this one begins once all blocks of this one are here, or have ended
static inline void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

//# wait_for_previous_kernel
// until preceding kernels have ended, and what they wrote can be read
static inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
