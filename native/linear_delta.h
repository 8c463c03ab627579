// Delta: what each token of a chunk writes in place of what the state has for its key (Yang et al. 2024,
// arXiv:2406.06484, section 3). Values are v_i, and what is written is x_i:
//
//     (I + L) x = beta_i (v_i - k_i S)        L_ij = beta_i (k_i . k_j) (decays over j < t <= i)        j < i
//
// x is linear in the state before the chunk: `solve_chunk` finds what would be written if that were 0, and how x
// depends on it (erase); `correct_written` then adds that, `replace_state` writes.
//
// Rows of x are found 16 at a time: less the product of L with all rows found before, by `multiply`; then among the 16,
// a vector of columns at a time, in registers. A row of x depends on no later row, whatever that holds.
#pragma once

#include "exp.h"
#include "linear_products.h"

namespace regard {
namespace REGARD_ISA {

constexpr int SOLVED = 16;  // rows at a time

// Rows i and on, `count` of them, `size` vectors. x: [64][64], the right sides at first. w: rows i and on of -L.
__attribute__((noinline)) inline void solve_rows(const float *w, float *x, int64_t i, int64_t count, int size) {
    constexpr int W = Vec<float>::lanes;
    if (i)
        multiply<Fused<float>, Along::across, Start::out>(reinterpret_cast<const char *>(w), LANES * 4, count, x, i,
                                                          x + i * LANES, 0, size);
    w += i, x += i * LANES;
    for (int n = 0; n < size; ++n, x += W) {
        if (count < SOLVED) {
            for (int64_t r = 1; r < count; ++r)
                for (int64_t j = 0; j < r; ++j)
                    store(x + r * LANES, fma(broadcast(w[r * LANES + j]), load(x + j * LANES), load(x + r * LANES)));
            continue;
        }
        F rows[SOLVED];
#pragma GCC unroll 16
        for (int r = 0; r < SOLVED; ++r) rows[r] = load(x + r * LANES);
#pragma GCC unroll 16
        for (int j = 0; j < SOLVED; ++j)
#pragma GCC unroll 16
            for (int r = j + 1; r < SOLVED; ++r) rows[r] = fma(broadcast(w[r * LANES + j]), rows[j], rows[r]);
#pragma GCC unroll 16
        for (int r = 1; r < SOLVED; ++r) store(x + r * LANES, rows[r]);
    }
}

// The fractions, and the decays of pairs, of the state at a row, and of a key at the end.
inline void set_fades(LinearChunk &c) {
    constexpr int W = LinearChunk::W;
    const auto at = [&](const regard_tensor &t, int64_t j) {
        return static_cast<const float *>(
            t.data)[c.batch() * t.batch + c.key_head() * t.head + (c.first_token() + j) * t.token];
    };
    for (int64_t j = 0; j < c.tokens; ++j) {
        c.betas[j] = at(c.call.beta, j);
        c.look_at(broadcast(c.betas[j]));
    }
    if (!c.call.log_fade.data) return;
    float fades[LANES] = {};
    for (int64_t j = 0; j < c.tokens; ++j) fades[j] = at(c.call.log_fade, j);
    for (int64_t l = 0; l < LANES; l += W) {
        const F log = larger(broadcast(-200.0f), load(fades + l));
        c.look_at(log);
        store(fades + l, exp_below(log));
    }
    float since = 1;
    for (int64_t i = 0; i < c.tokens; ++i) {
        float *const row = c.pairs + i * LANES;
        for (int64_t l = 0; l < LANES; l += W) store(row + l, i ? load(row - LANES + l) * fades[i] : F{});
        row[i] = 1;
        c.read[i] = since *= fades[i];
    }
    for (int64_t j = 0; j < c.tokens; ++j) c.write[j] = c.pairs[(c.tokens - 1) * LANES + j];
}

// Rows i and on of -L, in `weights`.
inline void set_system(LinearChunk &c, int64_t i, int64_t count) {
    constexpr int W = LinearChunk::W;
    const int last = int((i + count + W - 1) / W);
    along_features(c.k + i * LANES, count, c.k_lanes, c.dim, c.weights + i * LANES, last);
    for (int64_t r = i; r < i + count; ++r)
        for (int64_t l = 0; l < last * W; l += W) {
            F sum = load(c.weights + r * LANES + l) * -c.betas[r];
            if (c.call.log_fade.data) sum *= load(c.pairs + r * LANES + l);
            store(c.weights + r * LANES + l, select(LinearChunk::first_lanes(r - l), sum, F{}));
        }
}

// What a chunk would write if the state were 0, and how it depends on the state: the first in v, and -erase.
inline void solve_chunk(LinearChunk &c) {
    constexpr int W = LinearChunk::W;
    for (int64_t j = 0; j < c.tokens; ++j) {
        const float by = c.call.log_fade.data ? -c.betas[j] * c.read[j] : -c.betas[j];
        for (int64_t p = 0; p < c.panels; ++p) {
            float *const row = c.v + p * LinearChunk::BLOCK + j * LANES;
            for (int64_t l = 0; l < c.vectors(p) * W; l += W) store(row + l, load(row + l) * c.betas[j]);
        }
        for (int64_t f = 0; f < c.dim; f += W) {
            const int64_t at = LinearChunk::column(f) + j * LANES;
            store(c.erase + at, load(c.k + at) * by);
        }
    }
    turn_keys(c);
    for (int64_t i = 0; i < c.tokens; i += LinearChunk::STEP) {
        const int64_t count = c.tokens - i < LinearChunk::STEP ? c.tokens - i : LinearChunk::STEP;
        const float *const w = c.weights + i * LANES;
        set_system(c, i, count);
        for (int64_t p = 0; p < c.panels; ++p) solve_rows(w, c.v + p * LinearChunk::BLOCK, i, count, c.vectors(p));
        for (int64_t b = 0; b < c.blocks; ++b)
            solve_rows(w, c.erase + b * LinearChunk::BLOCK, i, count, int((c.some(b) + W - 1) / W));
    }
}

// Less what the state before the chunk has for its keys: some vectors of a panel.
inline void correct_written(LinearChunk &c, int64_t p, int from, int to) {
    for (int64_t b = 0; b < c.blocks; ++b)
        multiply<Fused<float>, Along::across, Start::out>(
            reinterpret_cast<const char *>(c.erase + b * LinearChunk::BLOCK), LANES * 4, c.tokens,
            c.state + (p * c.dim + b * LANES) * LANES, c.some(b), c.v + p * LinearChunk::BLOCK, from, to);
}

// The state after the chunk: some vectors of a panel.
inline void replace_state(LinearChunk &c, int64_t p, int from, int to) {
    constexpr int W = LinearChunk::W;
    const float *lanes = c.v + p * LinearChunk::BLOCK;
    float *const s = c.state + p * c.dim * LANES;
    if (c.call.log_fade.data) {
        const F by = broadcast(c.read[c.tokens - 1]);
        for (int64_t i = 0; i < c.dim * LANES; i += LANES)
            for (int l = from * W; l < to * W; l += W) store(s + i + l, load(s + i + l) * by);
        for (int64_t j = 0; j < c.tokens * LANES; j += LANES)
            for (int l = from * W; l < to * W; l += W) store(c.faded + j + l, load(lanes + j + l) * c.write[j / LANES]);
        lanes = c.faded;
    }
    for (int64_t b = 0; b < c.blocks; ++b)
        multiply<Fused<float>, Along::down, Start::added>(reinterpret_cast<const char *>(c.k + b * LinearChunk::BLOCK),
                                                          LANES * 4, c.some(b), lanes, c.tokens,
                                                          s + b * LinearChunk::BLOCK, from, to);
}

// Whether all that rows i and on write is finite: keys of large norm may let it overflow.
inline bool is_written(const LinearChunk &c, int64_t i, int64_t count) {
    constexpr int W = LinearChunk::W;
    F lost{};
    for (int64_t p = 0; p < c.panels; ++p)
        for (int64_t j = p * LinearChunk::BLOCK + i * LANES; j < p * LinearChunk::BLOCK + (i + count) * LANES;
             j += LANES)
            for (int l = 0; l < c.vectors(p) * W; l += W) lost = fma(load(c.v + j + l), F{}, lost);
    for (int l = 0; l < W; ++l)
        if (lost[l] != lost[l]) return false;
    return true;
}

}  // namespace REGARD_ISA
}  // namespace regard
