// Matrices before and after cuSOLVER: transposes between row-major and column-major order, and permutations.
//
// Constants: Word, an integer type as large as an element; of results of Cholesky: Real, the type of a diagonal element,
// PARTS of an element in such numbers, and UNDEFINED, an element that is NaN; LOWER: whether transposes are of lower
// triangles; IN_SHARED: whether a permutation fits in shared memory.

//# tiles
constexpr int TILE = 32, STEP = 8;

// Part of a matrix that a block moves: the first row and column, and the index of the matrix.
struct Place {
  int row, column;
  size_t matrix;
};

__device__ Place place_of_block(int rows, int columns) {
  const int across = (columns + TILE - 1) / TILE, down = (rows + TILE - 1) / TILE;
  const unsigned tile = blockIdx.x;
  return {int(tile / across % down) * TILE, int(tile % across) * TILE, tile / across / down};
}

// A tile of x (rows, columns) to shared memory.
__device__ void load_tile(Word (&tile)[TILE][TILE + 1], const Word *x, int rows, int columns, int row,
                          int column) {
  const int lane = threadIdx.x % TILE;
  for (int r = threadIdx.x / TILE; r < TILE; r += STEP)
    if (row + r < rows && column + lane < columns)
      tile[r][lane] = x[(size_t)(row + r) * columns + column + lane];
  __syncthreads();
}

//# transpose
// x (rows, columns) to y (columns, rows), for each matrix.
extern "C" __global__ void __launch_bounds__(TILE *STEP)
    transpose_matrices(const Word *x, Word *y, int rows, int columns) {
  __shared__ Word tile[TILE][TILE + 1];
  const Place p = place_of_block(rows, columns);
  if (LOWER && p.column > p.row) return;
  const size_t from = p.matrix * rows * columns;
  load_tile(tile, x + from, rows, columns, p.row, p.column);
  const int lane = threadIdx.x % TILE;
  for (int r = threadIdx.x / TILE; r < TILE; r += STEP)
    if (p.column + r < columns && p.row + lane < rows)
      y[from + (size_t)(p.column + r) * rows + p.row + lane] = tile[lane][r];
}

//# triangle
// Lower triangles in column-major order to matrices in row-major order, with zeros above the diagonal. A NaN anywhere
// reaches the last element of the diagonal; a matrix with one, or that cuSOLVER reports, has no factor.
extern "C" __global__ void __launch_bounds__(TILE *STEP)
    place_triangles(const Word *x, Word *y, const int *found, int n) {
  __shared__ Word tile[TILE][TILE + 1];
  const Place p = place_of_block(n, n);
  const size_t from = p.matrix * n * n;
  const bool above = p.column > p.row;
  const bool good = !found[p.matrix] && ((const Real *)(x + from + (size_t)n * n - 1))[0] > 0;
  if (!above) load_tile(tile, x + from, n, n, p.column, p.row);
  const int lane = threadIdx.x % TILE, column = p.column + lane;
  for (int r = threadIdx.x / TILE; r < TILE; r += STEP) {
    const int row = p.row + r;
    if (row >= n || column >= n) continue;
    Word value = {};
    if (column <= row) value = good ? tile[lane][r] : UNDEFINED;
    y[from + (size_t)row * n + column] = value;
  }
}

//# permutation
// The permutation of m rows that k swaps make, for each matrix. One thread swaps: each swap depends on those before.
extern "C" __global__ void __launch_bounds__(THREADS)
    permute_rows(const int *__restrict__ pivots, int *order, int k, int m) {
  extern __shared__ int memory[];
  pivots += (size_t)blockIdx.x * k;
  order += (size_t)blockIdx.x * m;
  int *now = IN_SHARED ? memory : order;
  for (int j = threadIdx.x; j < m; j += THREADS) now[j] = j;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll 8
    for (int j = 0; j < k; ++j) {
      const int p = pivots[j];
      if (p < 0 || p >= m) continue;
      const int row = now[j];
      now[j] = now[p];
      now[p] = row;
    }
  }
  __syncthreads();
  if (IN_SHARED)
    for (int j = threadIdx.x; j < m; j += THREADS) order[j] = now[j];
}
