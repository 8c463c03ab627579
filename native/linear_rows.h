// Rows of linear attention: of a chunk's queries with the state before it, and with the keys of their chunk.
//
//     W = (Q K^T) o decay, lower triangle     O = W V + read o (Q S)
//
// Of W, rows are computed in steps of 16, up to the last key that one of them sees: 10 / 16 of its products.
#pragma once

#include "linear_ahead.h"
#include "linear_delta.h"
#include "linear_state.h"

namespace regard {
namespace REGARD_ISA {

// Of the pairs of a row with the keys of a vector.
REGARD_INLINE F pair_factor(const LinearChunk &c, int64_t row, int64_t key) {
    if (c.delta) return load(c.pairs + row * LANES + key);
    const F age = load(c.ages + LANES - 1 - row + key);
    if (!c.favor) return age;
    return exp_below(load(c.tops + key) + age - c.highs[row]);
}

// The rows of the state.
inline void read_earlier(LinearChunk &c, const float *state) {
    for (int64_t p = 0; p < c.panels; ++p) {
        float *o = c.out + p * LinearChunk::BLOCK;
        along_features(c.q, c.tokens, state + p * c.dim * LANES, c.dim, o, c.vectors(p), &c.ahead);
        for (int64_t i = 0; is_aged(c) && i < c.tokens; ++i)
            for (int64_t l = 0; l < LANES; l += LinearChunk::W)
                store(o + i * LANES + l, load(o + i * LANES + l) * c.read[i]);
    }
}

// Keys that rows i and on see, and those after them in the same step.
inline int64_t seen_keys(const LinearChunk &c, int64_t i) {
    return i + LinearChunk::STEP < c.tokens ? i + LinearChunk::STEP : c.tokens;
}

// Rows i and on, `count` of them, with the keys of their chunk.
inline void weigh_rows(LinearChunk &c, int64_t i, int64_t count) {
    constexpr int W = LinearChunk::W;
    const int last = int((seen_keys(c, i) + W - 1) / W);
    const bool aged = is_aged(c);
    float *w = c.weights + i * LANES;
    along_features(c.q + i * LANES, count, c.k_lanes, c.dim, w, last);
    for (int64_t r = 0; r < count; ++r, w += LANES) {
        for (int64_t l = 0; aged && l < i; l += W) store(w + l, load(w + l) * pair_factor(c, i + r, l));
        for (int64_t l = i; l < last * W; l += W) {  // keys after the row
            F sum = load(w + l);
            if (aged) sum *= pair_factor(c, i + r, l);
            store(w + l, select(LinearChunk::first_lanes(i + r - l + 1), sum, F{}));
        }
    }
}

// Their values.
inline void mix_rows(LinearChunk &c, int64_t i, int64_t count, int64_t seen) {
    for (int64_t p = 0; p < c.panels; ++p)
        multiply<Fused<float>, Along::across, Start::out>(
            reinterpret_cast<const char *>(c.weights + i * LANES), LANES * 4, count, c.v + p * LinearChunk::BLOCK, seen,
            c.out + p * LinearChunk::BLOCK + i * LANES, 0, c.vectors(p), nullptr, {}, &c.ahead);
}

inline void multiply_row(LinearChunk &c, int64_t r, float factor) {
    for (int64_t p = 0; p < c.panels; ++p)
        for (int64_t l = 0; l < c.vectors(p) * LinearChunk::W; l += LinearChunk::W) {
            float *o = c.out + p * LinearChunk::BLOCK + r * LANES + l;
            store(o, load(o) * factor);
        }
}

// By the sum of a row's weights: of its chunk, and by z of earlier tokens. Such sums as have no finite reciprocal, and
// their rows, are multiplied by 2^64 before.
inline void divide_rows(LinearChunk &c, const float *z) {
    constexpr int W = LinearChunk::W;
    for (int64_t i = 0; i < c.tokens; i += W) {
        F sums[W];
        for (int r = 0; r < W; ++r) {
            sums[r] = F{};
            if (i + r >= c.tokens) continue;
            for (int64_t f = 0; f < c.dim; f += W)
                sums[r] = fma(load(c.q + LinearChunk::column(f) + (i + r) * LANES), load(z + f), sums[r]);
            if (is_aged(c)) sums[r] *= c.read[i + r];
            for (int64_t l = 0; c.call.k.data && l <= i + r; l += W) sums[r] += load(c.weights + (i + r) * LANES + l);
        }
        transpose<float>(sums);
        for (int r = 1; r < W; ++r) sums[0] += sums[r];
        const F sum = sums[0] == 0.0f ? broadcast(1.0f) : sums[0];
        const F raise = larger(sum, -sum) < 0x1p-64f ? broadcast(0x1p64f) : broadcast(1.0f);
        float raises[W], factors[W];
        store(raises, raise), store(factors, 1.0f / (sum * raise));
        for (int64_t r = i; r < c.tokens && r < i + W; ++r) {
            if (raises[r - i] != 1) multiply_row(c, r, raises[r - i]);
            multiply_row(c, r, factors[r - i]);
        }
    }
}

// The rows of the chunk, before which the state is `state`. With the last of its heads of queries, `ask_next` says what
// memory is asked for.
template <typename Stored, typename AskNext>
void compute_rows(LinearChunk &c, const float *state, AskNext ask_next) {
    const bool keys = c.call.k.data;
    if (c.favor && keys) set_highs(c);
    for (int64_t g = 0; g < c.group; ++g) {
        const int64_t head = c.key_head() * c.group + g;
        if (g + 1 < c.group) LinearAhead<Stored>(c, c.head, c.n).within_rows().queries(g + 1).share();
        else ask_next();
        float *unused = c.weights;  // a query's exponent is a factor of its whole row
        read_features<Stored>(c, c.call.q, head, float(c.call.scale), c.q, unused);
        if (keys && (!g || c.gated)) turn_keys(c);
        if (c.gated) gate_pairs(c);
        read_earlier(c, state);
        for (int64_t i = 0; keys && i < c.tokens; i += LinearChunk::STEP) {
            const int64_t count = c.tokens - i < LinearChunk::STEP ? c.tokens - i : LinearChunk::STEP;
            if (!c.gated) weigh_rows(c, i, count);
            if (!c.delta || is_written(c, i, count)) mix_rows(c, i, count, seen_keys(c, i));
            else
                for (int64_t r = i; r < i + count; ++r) mix_rows(c, r, 1, r + 1);  // causal: no later keys
        }
        if (c.call.normalise) divide_rows(c, c.z_of(state));
        write_rows<Stored>(c, head);
    }
}

}  // namespace REGARD_ISA
}  // namespace regard
