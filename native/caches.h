// How large the caches of a core are: what blocks are chosen by. No result depends on it.
#pragma once

#include <cstdint>

namespace regard {

// Bytes of data. The third level is what all cores share, and 0 where there is none.
struct Caches {
    int64_t first, second, third;
    int64_t near;  // what operands of 512-bit products may take before products wait for them
};

// Those of this machine, read once; or what the environment variable REGARD_CACHES says: three numbers of bytes,
// "32768,1048576,33554432", of which the last ones may be missing.
const Caches &caches();

}  // namespace regard
