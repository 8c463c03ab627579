// Products of linear attention that run along all features, and keys turned for them.
#pragma once

#include "linear_chunk.h"
#include "tile.h"

namespace regard {
namespace REGARD_ISA {

// to = rows * lanes over all features: rows in blocks, `count` of them; lanes [features][64], `last` vectors.
inline void along_features(const float *rows, int64_t count, const float *lanes, int64_t features, float *to, int last,
                           Ahead *ahead = nullptr) {
    for (int64_t f = 0; f < features; f += LANES, rows += LinearChunk::BLOCK, lanes += LinearChunk::BLOCK) {
        const char *from = reinterpret_cast<const char *>(rows);
        const int64_t some = features - f < LANES ? features - f : LANES;
        if (f)
            multiply<Fused<float>, Along::across, Start::out>(from, LANES * 4, count, lanes, some, to, 0, last, nullptr,
                                                              {}, ahead);
        else
            multiply<Fused<float>, Along::across>(from, LANES * 4, count, lanes, some, to, 0, last, nullptr, {}, ahead);
    }
}

// Keys in lanes.
inline void turn_keys(LinearChunk &c) {
    for (int64_t b = 0; b < c.blocks; ++b) {
        const float *keys = c.k + b * LinearChunk::BLOCK;
        const auto key = [&](int64_t lane) { return reinterpret_cast<const char *>(keys + lane * LANES); };
        gather_lanes<float, float>(key, int(c.tokens), c.some(b), c.k_lanes + b * LinearChunk::BLOCK);
    }
}

}  // namespace REGARD_ISA
}  // namespace regard
