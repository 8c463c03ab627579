// Gates of Gated, a factor for each token and feature, within a chunk of up to 64 tokens.
//
//     w_ij = sum_f q_if k_jf (product of g_tf over j < t <= i)        j <= i
//
// Nothing is divided by a gate, so that none is too small. A chunk is cut into steps of as many tokens as a vector has
// lanes. Pairs within a step: keys are in lanes, and with each row its gate multiplies the keys before it. A row with
// the keys of earlier steps is a product: of the query times the gates since the step began, and of keys that are
// multiplied by each step's gates when it ends. Twice the instructions of a product for one pair in eight (AVX-512).
#pragma once

#include "exp.h"
#include "linear_products.h"

namespace regard {
namespace REGARD_ISA {

// The gates of a chunk, and of all its tokens together.
inline void set_gates(LinearChunk &c) {
    constexpr int W = LinearChunk::W;
    const regard_tensor &t = c.call.log_gate;
    F bad{};
    for (int64_t j = 0; j < c.tokens; ++j) {
        const float *logs = static_cast<const float *>(t.data) + c.batch() * t.batch + c.key_head() * t.head +
                            (c.first_token() + j) * t.token;
        for (int64_t f = 0; f < c.dim; f += W) {
            F log = broadcast(*logs);
            if (c.call.log_gate_feature) {
                float rest[W] = {};
                if (c.dim - f < W) memcpy(rest, logs + f, size_t(c.dim - f) * sizeof(float));
                log = load(c.dim - f < W ? rest : logs + f);
            }
            log = larger(broadcast(-200.0f), log);  // -inf, which is no error
            bad = fma(log, F{}, bad);
            const F gate = exp_below(log);
            store(c.gates + LinearChunk::column(f) + j * LANES, gate);
            store(c.whole + f, j ? load(c.whole + f) * gate : gate);
        }
    }
    c.bad += bad;
}

// Keys times all gates after them, in `near`: N vectors of features at once, so that their chains of products do not
// wait for each other.
template <int N>
REGARD_INLINE void gate_keys(LinearChunk &c, int64_t f) {
    constexpr int W = LinearChunk::W;
    F later[N];
    for (int n = 0; n < N; ++n) later[n] = broadcast(1.0f);
    for (int64_t at = LinearChunk::column(f) + (c.tokens - 1) * LANES; at >= LinearChunk::column(f); at -= LANES)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            store(c.near + at + n * W, load(c.k + at + n * W) * later[n]);
            later[n] *= load(c.gates + at + n * W);
        }
}

inline void gate_keys(LinearChunk &c) {
    constexpr int W = LinearChunk::W;
    int64_t f = 0;
    for (; f + 3 * W < c.dim; f += 4 * W) gate_keys<4>(c, f);
    for (; f < c.dim; f += W) gate_keys<1>(c, f);
}

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

// Queries of a step, times the gates since the step began to `near`, and in place times those since the chunk began.
template <int N>
REGARD_INLINE void gate_queries(LinearChunk &c, int64_t i, int64_t count, int64_t f) {
    constexpr int W = LinearChunk::W;
    F before[N], all[N];
    for (int n = 0; n < N; ++n) before[n] = load(c.past + f + n * W), all[n] = broadcast(1.0f);
    for (int64_t at = LinearChunk::column(f) + i * LANES, end = at + count * LANES; at < end; at += LANES)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            all[n] *= load(c.gates + at + n * W);
            const F one = load(c.q + at + n * W) * all[n];
            store(c.near + at + n * W, one);
            store(c.q + at + n * W, one * before[n]);
        }
    for (int n = 0; n < N; ++n) {
        store(c.past + c.blocks * LANES + f + n * W, all[n]);
        store(c.past + f + n * W, before[n] * all[n]);
    }
}

inline void gate_queries(LinearChunk &c, int64_t i, int64_t count) {
    constexpr int W = LinearChunk::W;
    int64_t f = 0;
    for (; f + 3 * W < c.dim; f += 4 * W) gate_queries<4>(c, i, count, f);
    for (; f < c.dim; f += W) gate_queries<1>(c, i, count, f);
}

// The weights of a chunk, [64][64]. Queries leave with all gates since the chunk began, and keys in lanes with all
// gates after them but those of the last step.
inline void gate_pairs(LinearChunk &c) {
    constexpr int W = LinearChunk::W;
    const float *const since = c.past + c.blocks * LANES;
    for (int64_t f = 0; f < c.dim; f += W) store(c.past + f, broadcast(1.0f));
    for (int64_t i = 0; i < c.tokens; i += W) {
        const int64_t count = c.tokens - i < W ? c.tokens - i : W;
        float *const w = c.weights + i * LANES, *const keys = c.k_lanes;
        gate_step(c.q + i * LANES, c.gates + i * LANES, keys + i, c.dim, w + i);
        gate_queries(c, i, count);
        if (i) along_features(c.near + i * LANES, count, keys, c.dim, w, int(i / W));
        for (int64_t r = 0; r < count; ++r)  // keys of later steps that are mixed with these
            for (int64_t l = i + W; l < LANES; l += W) store(w + r * LANES + l, F{});
        for (int64_t f = 0; i + W < c.tokens && f < c.dim; ++f)
            for (int64_t l = 0; l < i; l += W) store(keys + f * LANES + l, load(keys + f * LANES + l) * since[f]);
    }
}

}  // namespace REGARD_ISA
}  // namespace regard
