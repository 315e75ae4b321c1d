// Fourier transforms by the loops of NumPy's ufuncs; library: steps/fourier.py.

//# fourier
typedef void (*Loop)(char **, const int64_t *, const int64_t *, void *);

// Of each ufunc the loop and the argument that NumPy gives it.
extern "C" {
void *routines[10];
}

// Parameters: passes; of each the ufunc, lengths of input and output, whether it divides, places of both (0: the
// operand, 1: the result, 2: scratch), strides of both along the axis, and for the other axes their number, shape and
// strides of both.
extern "C" void transform(const int64_t *p, char *const *operands, char *const *results, char *scratch,
                          int threads) {
  const Batch all(p);
  const int64_t *q = all.rest;
  char *const places[] = {operands[0], results[0], scratch};
  for (int64_t pass = *q++; pass > 0; --pass) {
    const int64_t which = q[0], n_in = q[1], n_out = q[2], along_in = q[6], along_out = q[7], ndim = q[8];
    REAL factor = q[3] ? REAL(1) / REAL(n_out) : REAL(1);
    const char *const from = places[q[4]];
    char *const to = places[q[5]];
    const int64_t *const shape = q + 9, *const of_in = shape + ndim, *const of_out = of_in + ndim;
    q = of_out + ndim;
    // the loop runs over the last of the other axes
    const int64_t outer = ndim - 1;
    const int64_t repeats = ndim ? shape[outer] : 1;
    const int64_t step_in = ndim ? of_in[outer] : 0, step_out = ndim ? of_out[outer] : 0;
    const int64_t dimensions[] = {repeats, n_in, n_out};
    const int64_t steps[] = {step_in, 0, step_out, along_in, along_out};
    int64_t count = 1;
    for (int64_t d = 0; d < outer; ++d) count *= shape[d];
    for (int64_t i = 0; i < count; ++i) {
      int64_t at_in = 0, at_out = 0, rest = i;
      for (int64_t d = outer - 1; d >= 0; rest /= shape[d--]) {
        at_in += rest % shape[d] * of_in[d];
        at_out += rest % shape[d] * of_out[d];
      }
      char *arguments[] = {(char *)from + at_in, (char *)&factor, to + at_out};
      ((Loop)routines[2 * which])(arguments, dimensions, steps, routines[2 * which + 1]);
    }
  }
}
