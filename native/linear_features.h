// What linear attention reads and writes: features of queries and keys, values, and rows of the output.
//
// Every element that is read is looked at: `LinearChunk::bad`. Favor's features are products: linear_favor.h.
#pragma once

#include "exp.h"
#include "linear_chunk.h"
#include "linear_favor.h"

namespace regard {
namespace REGARD_ISA {

template <typename Stored>
const Stored *linear_row(const regard_tensor &t, int64_t batch, int64_t head, int64_t token) {
    return static_cast<const Stored *>(t.data) + batch * t.batch + head * t.head + token * t.token;
}

template <int feature>
REGARD_INLINE F mapped(F x, F factor) {
    if (feature == REGARD_ELU1) return larger(x, F{}) + exp_below(smaller(x, F{}));
    if (feature == REGARD_RELU) return larger(x, F{}) + factor;
    return x * factor;
}

// The rows of a chunk, `size` elements from the `from`th on, to rows `stride` apart, followed by zeros up to a whole
// vector.
template <int feature, typename Stored>
__attribute__((noinline)) void map(LinearChunk &c, const regard_tensor &t, int64_t head, int64_t from, int64_t size,
                                   float factor, float *to, int64_t stride) {
    constexpr int W = LinearChunk::W;
    const F by = broadcast(factor);
    F bad[4] = {};  // several, as each sum waits for the one before it; not in memory, where it would wait longer
    const auto look = [&](int n, F x) __attribute__((always_inline)) {
        bad[n] = fma(x, F{}, bad[n]);
        return x;
    };
    for (int64_t j = 0; j < c.tokens; ++j, to += stride) {
        const Stored *x = linear_row<Stored>(t, c.batch(), head, c.first_token() + j) + from;
        int64_t i = 0;
        for (; i + 4 * W <= size; i += 4 * W)
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n) store(to + i + n * W, mapped<feature>(look(n, load_wide(x + i + n * W)), by));
        for (; i + W <= size; i += W) store(to + i, mapped<feature>(look(0, load_wide(x + i)), by));
        if (i == size) continue;
        Stored rest[W] = {};
        float found[W];
        memcpy(rest, x + i, size_t(size - i) * sizeof(Stored));
        store(found, mapped<feature>(look(0, load_wide(rest)), by));
        for (int l = 0; l < W; ++l) to[i + l] = i + l < size ? found[l] : 0.0f;
    }
    c.bad += bad[0] + bad[1] + bad[2] + bad[3];
}

// Features of queries or keys, in blocks; of Favor also the exponent of each row.
template <typename Stored>
void read_features(LinearChunk &c, const regard_tensor &t, int64_t head, float factor, float *to, float *top) {
    const regard_linear &call = c.call;
    if (c.favor) {
        const int64_t stride = LinearChunk::up(call.qk_dim);
        map<REGARD_IDENTITY, Stored>(c, t, head, 0, call.qk_dim, float(__builtin_sqrt(call.scale)), c.scaled, stride);
        return map_favor(c.scaled, stride, call.qk_dim, c.tokens, static_cast<const float *>(call.vectors), c.dim, to,
                         top);
    }
    for (int64_t b = 0; b < c.blocks; ++b, to += LinearChunk::BLOCK) {
        const int64_t from = b * LANES, size = c.some(b);
        if (call.feature == REGARD_ELU1) map<REGARD_ELU1, Stored>(c, t, head, from, size, 0, to, LANES);
        else if (call.feature == REGARD_RELU)
            map<REGARD_RELU, Stored>(c, t, head, from, size, float(call.epsilon), to, LANES);
        else map<REGARD_IDENTITY, Stored>(c, t, head, from, size, factor, to, LANES);
    }
}

template <typename Stored>
void read_values(LinearChunk &c) {
    for (int64_t p = 0; p < c.panels; ++p)
        map<REGARD_IDENTITY, Stored>(c, c.call.v, c.key_head(), p * LANES, c.width(p), 1, c.v + p * LinearChunk::BLOCK,
                                     LANES);
}

template <typename Stored>
void write_rows(const LinearChunk &c, int64_t head) {
    constexpr int W = LinearChunk::W;
    for (int64_t i = 0; i < c.tokens; ++i) {
        Stored *to = const_cast<Stored *>(linear_row<Stored>(c.call.out, c.batch(), head, c.first_token() + i));
        for (int64_t p = 0; p < c.panels; ++p, to += LANES) {
            const float *o = c.out + p * LinearChunk::BLOCK + i * LANES;
            const int64_t size = c.width(p);
            int64_t l = 0;
            for (; l + W <= size; l += W) store_narrow(to + l, load(o + l));
            for (; l < size; ++l) to[l] = narrow<Stored>(o[l]);
        }
    }
}

}  // namespace REGARD_ISA
}  // namespace regard
