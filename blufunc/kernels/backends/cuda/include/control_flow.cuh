// Loops and branches of CUDA graphs: kernels that set the conditions of nodes, and move what a round carries.
//
// Constants: MOST, of arrays of one launch, STAGED, bytes of shared memory, THREADS of a block.

//# kernels
// The driver defines it when it loads a module.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);

struct Copy {
  char *to;
  const char *from;
  long long bytes;
};

struct Copies {
  long long count;
  Copy of[MOST];
};

template<class Unit> __device__ void move(char *to, const char *from, long long bytes) {
  for (long long i = threadIdx.x; i < bytes / sizeof(Unit); i += THREADS)
    ((Unit *)to)[i] = ((const Unit *)from)[i];
}

__device__ void move_bytes(char *to, const char *from, long long bytes) {
  if (((long long)to | (long long)from | bytes) & 3) move<char>(to, from, bytes);
  else move<int>(to, from, bytes);
}

// All sources are read before anything is written: carries change places. One block.
__device__ void move_all(const Copies &copies) {
  __shared__ __align__(16) char staged[STAGED];
  int at = 0;
  for (int c = 0; c < copies.count; ++c) {
    move_bytes(staged + at, copies.of[c].from, copies.of[c].bytes);
    at += (copies.of[c].bytes + 15) / 16 * 16;
  }
  __syncthreads();
  at = 0;
  for (int c = 0; c < copies.count; ++c) {
    move_bytes(copies.of[c].to, staged + at, copies.of[c].bytes);
    at += (copies.of[c].bytes + 15) / 16 * 16;
  }
}

extern "C" __global__ void copy_all(Copies copies) { move_all(copies); }

// The end of a round, or before the first one: there is another one if `predicate`, if given, holds and fewer than
// `most` are done.
extern "C" __global__ void next_round(const bool *predicate, long long *rounds, unsigned long long handle,
                                      long long most, int first, Copies copies) {
  bool goes_on = !predicate || *predicate;  // a copy may overwrite it
  move_all(copies);
  if (threadIdx.x) return;
  long long done = first ? 0 : *rounds + 1;
  *rounds = done;
  cudaGraphSetConditional(handle, goes_on && done < most);
}

struct Handles {
  long long count;
  unsigned long long of[MOST];
};

// The branch of an index, which is clamped.
extern "C" __global__ void choose(const int *index, Handles branches) {
  int last = (int)branches.count - 1, chosen = *index < 0 ? 0 : *index < last ? *index : last;
  for (int i = threadIdx.x; i <= last; i += THREADS) cudaGraphSetConditional(branches.of[i], i == chosen);
}

// A stacked array, and memory of some of its rows outside of it, `stride` bytes from one another.
struct Stack {
  char *array;
  char *outside;
  long long bytes;
  long long stride;
};

struct Stacks {
  long long count;
  Stack of[MOST];
};

template<class Unit> __device__ void move_rows_of(const Stack &s, char *array, int rows, int loads) {
  long long each = s.bytes / sizeof(Unit), all = each * rows;
  for (long long i = blockIdx.x * THREADS + threadIdx.x; i < all; i += (long long)gridDim.x * THREADS) {
    Unit *in_array = (Unit *)array + i, *outside = (Unit *)(s.outside + i / each * s.stride) + i % each;
    if (loads) *outside = *in_array;
    else *in_array = *outside;
  }
}

// The rows of a part of a round: `count` of them, the first is at `start` and `step` further in each round.
extern "C" __global__ void move_rows(const long long *rounds, long long start, long long step, int rows,
                                     int loads, Stacks stacks) {
  const Stack &s = stacks.of[blockIdx.y];
  char *array = s.array + (start + *rounds * step) * s.bytes;
  long long together = (long long)array | (long long)s.outside | s.bytes | s.stride;
  if (!(together & 15)) move_rows_of<int4>(s, array, rows, loads);
  else if (!(together & 3)) move_rows_of<int>(s, array, rows, loads);
  else move_rows_of<char>(s, array, rows, loads);
}
