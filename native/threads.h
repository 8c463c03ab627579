// Work on several threads, those of torch where there are any.
#pragma once

#include <cstdint>

namespace regard {

// work(data, thread) on `threads` threads at once, thread counting from 0; returns when all are done. On one thread it
// is a plain call.
//
// torch's pool is used, found by name in the process (GOMP_parallel, which both GNU's and LLVM's OpenMP offer):
// entering it costs 1 us, and a second pool beside it would make mixed small calls 3 to 15 times slower. Without it,
// threads are started.
void parallel(int64_t threads, void (*work)(void *data, int64_t thread), void *data);

}  // namespace regard
