// Gates of Gated, a factor for each token and feature, within a chunk of up to 64 tokens.
//
//     w_ij = sum_f q_if k_jf (product of g_tf over j < t <= i)        j <= i
//
// Nothing is divided by a gate, so that none is too small. A chunk is cut into steps of as many tokens as a vector has
// lanes. Pairs within a step: keys are in lanes, and with each row its gate multiplies the keys before it. A row with
// the keys of earlier steps is a product: of the query times the gates since the step began, and of keys that are
// multiplied by each step's gates when it ends. Twice the instructions of a product for one pair in eight (AVX-512).
#pragma once

#include "simd.h"
#include "tile.h"

namespace regard {
namespace REGARD_ISA {

// W rows and keys of one step: q and gates in blocks of 64 features, [64 rows][64] each; keys [features][64], which
// leave with all gates of the step after them.
__attribute__((noinline)) inline void gate_step(const float *q, const float *gates, float *keys, int64_t features,
                                                float *weights) {
    constexpr int W = Vec<float>::lanes;
    F sums[W] = {};
    for (int64_t f = 0; f < features; ++f) {
        const int64_t at = f / LANES * LANES * LANES + f % LANES;
        F key = load(keys + f * LANES);
        sums[0] = fma(broadcast(q[at]), key, sums[0]);
#pragma GCC unroll 16
        for (int i = 1; i < W; ++i) {
            key = select((uint64_t(1) << i) - 1, key * gates[at + i * LANES], key);
            sums[i] = fma(broadcast(q[at + i * LANES]), key, sums[i]);
        }
        store(keys + f * LANES, key);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) store(weights + i * LANES, select((uint64_t(2) << i) - 1, sums[i], F{}));
}

// The weights of a chunk, [64][64]. q leaves with all gates since the chunk began. `near` is memory like that of q, and
// `past` and `since` have a float for each feature, in whole vectors.
inline void gate_pairs(float *q, const float *gates, float *keys, int64_t features, int64_t tokens, float *near,
                       float *past, float *since, float *weights) {
    constexpr int W = Vec<float>::lanes;
    constexpr int64_t BLOCK = LANES * LANES;
    for (int64_t f = 0; f < features; f += W) store(past + f, broadcast(1.0f));
    for (int64_t i = 0; i < tokens; i += W) {
        const int64_t count = tokens - i < W ? tokens - i : W;
        float *const w = weights + i * LANES;
        gate_step(q + i * LANES, gates + i * LANES, keys + i, features, w + i);
        for (int64_t f = 0; f < features; f += W) {
            const int64_t at = f / LANES * BLOCK + i * LANES + f % LANES;
            const F before = load(past + f);
            F all = broadcast(1.0f);
            for (int64_t r = 0; r < count; ++r) {
                all *= load(gates + at + r * LANES);
                const F one = load(q + at + r * LANES) * all;
                store(near + at + r * LANES, one);
                store(q + at + r * LANES, one * before);
            }
            store(since + f, all);
            store(past + f, before * all);
        }
        for (int64_t f = 0; i && f < features; f += LANES) {
            const int64_t some = features - f < LANES ? features - f : LANES;
            const char *rows = reinterpret_cast<const char *>(near + f * LANES + i * LANES);
            const float *lanes = keys + f * LANES;
            if (f)
                multiply<Fused<float>, Along::across, Start::out>(rows, LANES * 4, count, lanes, some, w, 0,
                                                                  int(i / W));
            else multiply<Fused<float>, Along::across>(rows, LANES * 4, count, lanes, some, w, 0, int(i / W));
        }
        for (int64_t r = 0; r < count; ++r)  // keys of later steps that are mixed with these
            for (int64_t l = i + W; l < LANES; l += W) store(w + r * LANES + l, F{});
        for (int64_t f = 0; i + W < tokens && f < features; ++f)
            for (int64_t l = 0; l < i; l += W) store(keys + f * LANES + l, load(keys + f * LANES + l) * since[f]);
    }
}

}  // namespace REGARD_ISA
}  // namespace regard
