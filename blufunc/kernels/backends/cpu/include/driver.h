// What the function of a native program needs at run time; driver.py writes these functions.

//# driver
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

// One call of a program; ``Run`` of native/run.py.
struct Run {
  void *(*save)();                                 // PyEval_SaveThread
  void (*restore)(void *);                         // PyEval_RestoreThread
  int (*signals)();                                // PyErr_CheckSignals
  void *(*call)(void *, const char *format, ...);  // PyObject_CallFunction
  void (*release)(void *);                         // Py_DecRef
  void *steps;  // the Python function of a step's number and a table of addresses
  void *state;  // of the thread that called
  int64_t threads;
  int64_t left;    // estimated nanoseconds until a loop reads the clock
  int64_t asked;   // the time of the last look for signals
  int64_t *times;  // when each step of the program began, and the end; null if nothing records them
};

#ifdef __APPLE__
#define BF_CLOCK CLOCK_UPTIME_RAW
#else
#define BF_CLOCK CLOCK_MONOTONIC
#endif

// Nanoseconds on the clock of Python's time.perf_counter_ns.
static int64_t nanoseconds() {
  timespec t;
  clock_gettime(BF_CLOCK, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

// The beginning of a step of the program, and the end of the one before it.
static inline void mark(Run *run, int64_t step) {
  if (run->times) run->times[step] = nanoseconds();
}

// Loops read the clock about once a millisecond, and look for signals twenty times a second.
enum : int64_t { CLOCK_PERIOD = 1000000, SIGNAL_PERIOD = 50000000 };

static int check_signals(Run *run) {
  run->left = CLOCK_PERIOD;
  const int64_t now = nanoseconds();
  if (now - run->asked < SIGNAL_PERIOD) return 0;
  run->asked = now;
  run->restore(run->state);
  const int code = run->signals();  // the exception stays set, and the caller raises it
  run->state = run->save();
  return code;
}

// Run a step in Python; 0 if all is well. Otherwise an exception stays set, and the caller raises it.
static int host(Run *run, int64_t step, void *const *addresses) {
  run->restore(run->state);
  void *const result = run->call(run->steps, "nn", (ptrdiff_t)step, (ptrdiff_t)addresses);
  if (result) run->release(result);
  run->state = run->save();
  return !result;
}

// Whether a loop must end before a round of about ``cost`` nanoseconds.
static inline int interrupted(Run *run, int64_t cost) {
  return (run->left -= cost) < 0 && check_signals(run);
}

// The first element of a NumPy array, whose address follows the header of the Python object.
template<int HEADER> static inline char *data_of(const void *array) {
  return *(char *const *)((const char *)array + HEADER);
}

static inline void copy(char *to, const char *from, size_t bytes) {
  if (to != from) memcpy(to, from, bytes);
}

// Move the values of carries from where a loop left them to the results: each is in its own buffer, which may be the
// result of another. Empty ones may lie anywhere, also where another one is.
static inline void settle(int count, char **at, char *const *results, const int64_t *bytes) {
  for (int k = 0; k < count; ++k) {
    if (!bytes[k] || at[k] == results[k]) continue;
    int other = k + 1;
    while (other < count && (at[other] != results[k] || bytes[other] != bytes[k])) ++other;
    if (other == count) {
      memcpy(results[k], at[k], bytes[k]);
    } else {  // two buffers of one size change places
      for (int64_t i = 0; i < bytes[k]; ++i) {
        const char x = results[k][i];
        results[k][i] = at[k][i];
        at[k][i] = x;
      }
      at[other] = at[k];
    }
    at[k] = results[k];
  }
}

//# library
// A function of a library of steps; ``steps/form.py``.
typedef void (*Library)(const int64_t *, char *const *, char *const *, char *, int);
