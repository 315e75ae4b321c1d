// Scatters: rows of updates combined into rows of an array, in the order of the updates.
//
// Constants: THREADS and SCAN_THREADS of blocks, CHUNK: updates that are combined by themselves, VECTOR:
// elements of a row that a thread takes, CLIP: whether rows out of range are the nearest in range, or left
// out. Macros: the types Index, Storage and Wide, which elements are combined in; LOADED and STORED convert
// between the last two, COMBINED(acc, u) combines. AT(k) and ROW(k) are the place among the updates, and the row, of the
// k-th update in the order: of `order`, or of updates that are sorted, with their rows as `order`.

//# kernels
// The row of an update, or -1 if there is no such row.
__device__ int row_of(Index row, int height) {
  if (CLIP) return row < 0 ? 0 : row < height ? int(row) : height - 1;
  return row >= 0 && row < height ? int(row) : -1;
}

// Number of updates of each row; the rank of an update among them, in order of arrival.
extern "C" __global__ void count(const Index *rows, int *counts, int *place, int n, int height) {
  int j = blockIdx.x * THREADS + threadIdx.x;
  if (j >= n) return;
  int row = row_of(rows[j], height);
  place[j] = row < 0 ? -1 : atomicAdd(&counts[row], 1);
}

// Where the updates of each row begin, and after the last row where they end. One block.
extern "C" __global__ void begin(const int *__restrict__ counts, int *__restrict__ starts, int height) {
  __shared__ int sums[SCAN_THREADS];
  int t = threadIdx.x, each = (height + SCAN_THREADS - 1) / SCAN_THREADS;
  int first = min(t * each, height), last = min(first + each, height), sum = 0;
#pragma unroll 8  // a block is alone with all rows: what it waits for is memory
  for (int r = first; r < last; ++r) sum += counts[r];
  sums[t] = sum;
  for (int step = 1; step < SCAN_THREADS; step *= 2) {
    __syncthreads();
    int before = t >= step ? sums[t - step] : 0;
    __syncthreads();
    sums[t] += before;
  }
  int start = sums[t] - sum;
#pragma unroll 8
  for (int r = first; r < last; ++r) {
    starts[r] = start;
    start += counts[r];
  }
  if (t == SCAN_THREADS - 1) starts[height] = sums[t];
}

// The updates of each row side by side, in any order.
extern "C" __global__ void gather(const Index *rows, const int *starts, const int *place, int *found, int n,
                                  int height) {
  int j = blockIdx.x * THREADS + threadIdx.x;
  if (j < n && place[j] >= 0) found[starts[row_of(rows[j], height)] + place[j]] = j;
}

// And in their order: the rank of an update is the number of those before it.
extern "C" __global__ void rank(const Index *rows, const int *starts, const int *place, const int *found,
                                int *order, int n, int height) {
  int j = blockIdx.x * THREADS + threadIdx.x;
  if (j >= n || place[j] < 0) return;
  int row = row_of(rows[j], height), first = starts[row], last = starts[row + 1], before = 0;
  for (int k = first; k < last; ++k) before += found[k] < j;
  order[first + before] = j;
}

// What a row of very many updates would otherwise wait for, one after the other: the updates in each CHUNK places of
// the order are combined by themselves, where they are of one row.
extern "C" __global__ void partial(const Index *rows, const Storage *updates, const int *starts,
                                   const int *order, Wide *partials, long long size, int width, int height) {
  long long i = ((long long)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
  if (i >= size) return;
  int first = int(i / width) * CHUNK, column = int(i % width);
  if (first + CHUNK > starts[height]) return;
  if (ROW(first) != ROW(first + CHUNK - 1)) return;
  Wide acc[VECTOR];
#pragma unroll 8  // the additions wait for each other; what they add need not
  for (int k = first; k < first + CHUNK; ++k) {
    const Storage *from = updates + (long long)AT(k) * width + column;
    for (int v = 0; v < VECTOR; ++v) {
      Wide u = LOADED(from[v]);
      acc[v] = k == first ? u : COMBINED(acc[v], u);
    }
  }
  for (int v = 0; v < VECTOR; ++v) partials[i + v] = acc[v];
}

// Each element of the result accumulates its updates: before the first whole chunk, in chunks, and after them.
extern "C" __global__ void combine(const Storage *x, const Storage *updates, const int *starts,
                                   const int *order, Storage *out, const Wide *partials, long long size,
                                   int width) {
  long long i = ((long long)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
  if (i >= size) return;
  int row = int(i / width), column = int(i % width);
  Wide acc[VECTOR];
  for (int v = 0; v < VECTOR; ++v) acc[v] = LOADED(x[i + v]);
  int begin = starts[row], end = starts[row + 1];
  int chunk = (begin + CHUNK - 1) / CHUNK, chunks = end / CHUNK;  // whole ones
  int upto = chunk < chunks ? chunk * CHUNK : end;
  for (int part = 0; part < 2; ++part) {
#pragma unroll 8
    for (int k = begin; k < upto; ++k) {
      const Storage *from = updates + (long long)AT(k) * width + column;
      for (int v = 0; v < VECTOR; ++v) {
        Wide u = LOADED(from[v]);
        acc[v] = COMBINED(acc[v], u);
      }
    }
#pragma unroll 8
    for (; chunk < chunks; ++chunk)
      for (int v = 0; v < VECTOR; ++v) {
        Wide u = partials[(long long)chunk * width + column + v];
        acc[v] = COMBINED(acc[v], u);
      }
    begin = upto < end ? chunks * CHUNK : end;
    upto = end;
  }
  for (int v = 0; v < VECTOR; ++v) out[i + v] = STORED(acc[v]);
}
