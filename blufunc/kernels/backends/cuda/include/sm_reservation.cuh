// Kernels that spin: `keep_multiprocessors` occupies SMs, in clusters of CLUSTER blocks where there are such, and
// `pause` delays a stream.

//# kernels
#if __CUDA_ARCH__ >= 900
#define TOGETHER __cluster_dims__(CLUSTER, 1, 1)
#else
#define TOGETHER
#endif
static __device__ unsigned long long now() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}
static __device__ void wait(unsigned long long ns) {
  for (const unsigned long long end = now() + ns; now() < end;) __nanosleep(200);
}
extern "C" __global__ void TOGETHER keep_multiprocessors(unsigned long long ns) { wait(ns); }
extern "C" __global__ void pause(unsigned long long ns) { wait(ns); }
