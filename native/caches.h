// How large the caches of a core are: what blocks are chosen by. No result depends on it.
#pragma once

#include <cstdint>

namespace regard {

// Bytes of data that a core has of each level.
struct Caches {
    int64_t first, second;
    int64_t near;    // what operands of 512-bit products may take before products wait for them
    bool holds_far;  // whether lines may be asked for into the second 16 KiB ahead (decode_stream.h)
};

// Those of this machine, read once; or what the environment variable REGARD_CACHES says, "32768,1048576" for example,
// of which the second may be missing.
const Caches &caches();

}  // namespace regard
