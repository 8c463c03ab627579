// How large the caches of a core are: what blocks are chosen by. No result depends on it.
#pragma once

#include <cstdint>

namespace regard {

// How whole blocks of keys and values ask for lines (stream_asks.h).
enum class Asks {
    keys,    // those of keys into the first level, 8 KiB ahead; the machine's own prefetching reads values
    all,     // those of values as well
    far,     // all of them into the second level, 16 KiB ahead
    places,  // the same a block of 128 tokens ahead, from its four quarters in turns
};

// What is streamed (decode_stream.h), and how.
struct Streams {
    Asks floats, pairs, apart;  // all but pairs; bf16 in pairs; either, in pages that do not follow each other
    bool few, few_pairs;        // whether one and two rows are, of any type but pairs, and of pairs
    bool pages;                 // whether pages are
};

// Bytes of data that a core has of each level.
struct Caches {
    int64_t first, second;
    int64_t near;          // what operands of 512-bit products may take before products wait for them
    bool shares;           // whether two tiles share keys and values that are read in place
    bool asks_into_first;  // whether lists of lines (source.h) are asked for into the first
    bool lists_each;       // whether these have each line also of rows that are read in order (AVX-512)
    Streams streams;
};

// Those of this machine, read once; or what the environment variable REGARD_CACHES says, "32768,1048576" for example,
// of which the second may be missing.
const Caches &caches();

}  // namespace regard
