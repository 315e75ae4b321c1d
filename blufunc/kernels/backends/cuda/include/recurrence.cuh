// Pointwise recurrences along an axis: a thread has a column, or a chunk of one.
//
// Constants: STEPS of the recurrence, INNER: elements between them, COLUMNS, CHUNKS of a column and their LENGTH, a
// multiple of DEPTH, the steps that are loaded at once; REVERSE: whether it starts at the last element, THREADS of a
// block. Types: Element, one of each operand; State, one of each result. Functions: combined(a, b) of elements,
// advanced(state, element), started(element); Operands and Results load and store DEPTH steps.

//# loads
constexpr long long STEP = REVERSE ? -(long long)INNER : (long long)INNER;

// DEPTH consecutive elements as words of 16 bytes.
template<class T> __device__ void read_block(const T *p, T (&out)[DEPTH]) {
  constexpr int WORDS = DEPTH * sizeof(T) / 16;
  uint4 words[WORDS];
#pragma unroll
  for (int w = 0; w < WORDS; ++w) words[w] = __ldg(reinterpret_cast<const uint4 *>(p) + w);
  memcpy(out, words, sizeof(words));
}

// The elements of `count` steps from `at` on; of those before where `late`, and nothing before the first step.
template<bool LATE, class T>
__device__ void load_steps(const T *p, long long at, int step, int count, T (&out)[DEPTH]) {
  constexpr bool IN_BLOCKS = INNER == 1 && !LATE && STEPS % DEPTH == 0 && DEPTH * sizeof(T) % 16 == 0;
  if constexpr (IN_BLOCKS) {
    if (count <= 0) return;
    T block[DEPTH];
    read_block(p + (REVERSE ? at - (DEPTH - 1) : at), block);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) out[d] = block[REVERSE ? DEPTH - 1 - d : d];
  } else {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (d < count && !(LATE && step + d == 0)) out[d] = p[at + (d - LATE) * STEP];
      else memset(&out[d], 0, sizeof(T));
    }
  }
}

template<class T> __device__ void store_steps(T *p, long long at, int count, const T (&out)[DEPTH]) {
  constexpr bool IN_BLOCKS = INNER == 1 && STEPS % DEPTH == 0 && DEPTH * sizeof(T) % 16 == 0;
  if constexpr (IN_BLOCKS) {
    T block[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) block[d] = out[REVERSE ? DEPTH - 1 - d : d];
    uint4 words[DEPTH * sizeof(T) / 16];
    memcpy(words, block, sizeof(words));
    uint4 *to = reinterpret_cast<uint4 *>(p + (REVERSE ? at - (DEPTH - 1) : at));
#pragma unroll
    for (int w = 0; w < int(sizeof(words) / 16); ++w) to[w] = words[w];
  } else {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
      if (d < count) p[at + d * STEP] = out[d];
  }
}

//# kernels
struct Place {
  long long column, at;  // at: of the first step of the chunk
  int chunk, step, end;
  bool there;
};

// Neighboring threads have neighboring elements: of columns, or of the chunks of one where it is contiguous.
__device__ Place place_of() {
  const long long t = (long long)blockIdx.x * THREADS + threadIdx.x;
  Place p;
  p.there = t < COLUMNS * CHUNKS;
  p.chunk = INNER == 1 ? int(t % CHUNKS) : int(t / COLUMNS);
  p.column = INNER == 1 ? t / CHUNKS : t % COLUMNS;
  p.step = p.chunk * LENGTH;
  p.end = min(STEPS, p.step + LENGTH);
  const long long first = p.column / INNER * STEPS * INNER + p.column % INNER;
  p.at = first + (REVERSE ? STEPS - 1 - p.step : p.step) * (long long)INNER;
  return p;
}

// Calls take(element, step) for the steps of a chunk; the next DEPTH ones are on their way meanwhile.
template<class Take, class Done>
__device__ void walk(const Operands &operands, const Place &p, Take take, Done done) {
  Loaded next;
  next.load(operands, p.at, p.step, p.end - p.step);
#pragma unroll 1
  for (int s = p.step; s < p.end; s += DEPTH) {
    const Loaded now = next;
    const long long at = p.at + (s - p.step) * STEP;
    if (s + DEPTH < p.end) next.load(operands, at + DEPTH * STEP, s + DEPTH, p.end - s - DEPTH);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
      if (s + d < p.end) take(now.at(d), s + d, d);
    done(at, p.end - s);
  }
}

//# entries
// The elements of each chunk but the last combined.
__device__ void reduce(const Operands &operands, Element *chunks) {
  const Place p = place_of();
  if (!p.there || p.chunk == CHUNKS - 1) return;
  Element acc;
  walk(
      operands, p, [&](Element e, int s, int) { acc = s == p.step ? e : combined(acc, e); },
      [](long long, int) {});
  chunks[p.chunk * COLUMNS + p.column] = acc;
}

// The states of a chunk, from the state that the chunks before it lead to.
__device__ void scan(const Operands &operands, const Element *chunks, const Results &results) {
  const Place p = place_of();
  if (!p.there) return;
  State state;
#pragma unroll 4
  for (int q = 0; q < p.chunk; ++q) {
    const Element e = chunks[q * COLUMNS + p.column];
    state = q == 0 ? started(e) : advanced(state, e);
  }
  Stored out;
  walk(
      operands, p,
      [&](Element e, int s, int d) {
        state = s == 0 ? started(e) : advanced(state, e);
        out.set(d, state);
      },
      [&](long long at, int count) { out.store(results, at, count); });
}
