// Memory of a thread: `scratch.of(bytes)`.

//# scratch
// memory of this thread, kept from call to call
#include <stdlib.h>
struct Scratch {
  void *block = nullptr;
  size_t size = 0;
  ~Scratch() { free(block); }
  char *of(size_t bytes) {
    if (bytes > size) {
      free(block);
      block = aligned_alloc(64, size = (bytes + 63) / 64 * 64);  // some libraries refuse other sizes
    }
    return (char *)block;
  }
};
static thread_local Scratch scratch;
