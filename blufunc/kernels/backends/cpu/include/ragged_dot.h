// Matmuls of groups of rows, by the GEMM of gemm.h; library: steps/ragged_dot.py.

//# ragged
#include <string.h>

// Sizes, and strides in elements. Operands are x (stacks, m, k) and y; `matrices` of y is 0 if all stacks share them.
// Results are in order: (stacks, m, n), or (stacks, groups, k, n) if rows are summed.
struct Ragged {
  int64_t summed, stacks, groups, m, k, n;
  int64_t x_stack, x_row, x_term, y_stack, y_group, y_row, y_column, bounds_stack, bound;

  // Matmuls: groups whose rows are summed; else also the rows ahead of all groups, and beyond.
  int64_t products() const { return stacks * (summed ? groups : groups + 2); }
};

template<typename T> struct RaggedDot {
  typedef Gemm<T> G;

  // The i-th matmul: its operands, and the first element of its result.
  struct Part {
    Product p;
    const T *x, *y;
    T *out;
  };
  static Part part_of(const Ragged &r, int64_t i, const T *x, const T *y, const int32_t *bounds, T *out) {
    const int64_t each = r.summed ? r.groups : r.groups + 2, stack = i / each;
    const int64_t group = i % each - !r.summed;  // -1, and one beyond the last: rows without a group
    const auto bound = [&](int64_t g) {
      if (g < 0) return (int64_t)0;
      if (g > r.groups) return r.m;
      return least(r.m, bounds[stack * r.bounds_stack + g * r.bound] < 0
                            ? 0
                            : bounds[stack * r.bounds_stack + g * r.bound]);
    };
    const int64_t start = bound(group), rows = bound(group + 1) > start ? bound(group + 1) - start : 0;
    const bool grouped = group >= 0 && group < r.groups;
    Part part{Product(), x + stack * r.x_stack + start * r.x_row, y + stack * r.y_stack, out};
    Product &p = part.p;
    p.columns = r.n, p.batches = 1, p.axes = 0, p.rhs_column = r.y_column;
    p.rhs_inner = r.y_row;
    if (r.summed) {
      p.rows = r.k, p.inner = rows, p.lhs_row = r.x_term, p.lhs_inner = r.x_row;
      part.y += start * r.y_row;
      part.out += (stack * r.groups + group) * r.k * r.n;
    } else {
      p.rows = rows, p.inner = grouped ? r.k : 0, p.lhs_row = r.x_row, p.lhs_inner = r.x_term;
      if (grouped) part.y += group * r.y_group;
      part.out += (stack * r.m + start) * r.n;
    }
    return part;
  }

  // Rows and columns of a block of results, so that threads have several blocks each.
  static void sizes(const Ragged &r, int threads, int64_t &rows, int64_t &columns) {
    const int64_t all = r.summed ? r.stacks * r.groups * r.k : r.stacks * r.m;
    rows = BLOCK_ROWS, columns = BLOCK_COLUMNS;
    while (rows > 32 && ceil_div(all, rows) * ceil_div(r.n, columns) < 4 * threads) rows /= 2;
    while (columns > 128 && ceil_div(all, rows) * ceil_div(r.n, columns) < 4 * threads) columns /= 2;
    rows = round_up(rows, ROWS);
  }

  static void block(const Part &part, int64_t i, int64_t j, int64_t rows, int64_t columns) {
    const Product &p = part.p;
    const T *const x = part.x + i * p.lhs_row, *const y = part.y + j * p.rhs_column;
    T *const to = part.out + i * p.columns + j;
    if (p.inner == 0) {
      for (int64_t row = 0; row < rows; ++row) memset(to + row * p.columns, 0, sizeof(T) * columns);
    } else if (p.rows < LEAST_ROWS || p.columns < LEAST_COLUMNS) {
      Product q = p;
      q.rows = rows;
      G::small(q, x, part.y, part.out + i * p.columns, j, j + columns);
    } else G::block(p, x, y, to, rows, columns);
  }

  static void run(const Ragged &r, const T *x, const T *y, const int32_t *bounds, T *out, int64_t *ends,
                  int threads) {
    int64_t rows, columns, count = 0;
    sizes(r, threads, rows, columns);
    const int64_t across = ceil_div(r.n, columns), products = r.products();
    for (int64_t i = 0; i < products; ++i)
      ends[i] = count += ceil_div(part_of(r, i, x, y, bounds, out).p.rows, rows) * across;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t at = 0; at < count; ++at) {
      int64_t low = 0, high = products - 1;  // the first matmul that ends beyond this block
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (ends[middle] > at) high = middle;
        else low = middle + 1;
      }
      const Part part = part_of(r, low, x, y, bounds, out);
      const int64_t own = at - (low ? ends[low - 1] : 0);
      const int64_t i = own / across * rows, j = own % across * columns;
      block(part, i, j, least(rows, part.p.rows - i), least(columns, r.n - j));
    }
  }
};

extern "C" void ragged_dot(const int64_t *parameters, char *const *operands, char *const *results,
                           char *scratch, int threads) {
  const Batch batch(parameters);
  RaggedDot<REAL>::run(*(const Ragged *)batch.rest, (const REAL *)operands[0], (const REAL *)operands[1],
                       (const int32_t *)operands[2], (REAL *)results[0], (int64_t *)scratch, threads);
}
