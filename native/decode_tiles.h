// Few rows by AMX's tiles (amx.h): the same sums as in a prompt, though most of a tile may be empty.
//
//     scores    C [16 keys][16 rows]  = A [16 keys][32 dims]      x B [16 pairs of dims][16 rows]
//     outputs   C [16 rows][16 dims] += A [16 rows][32 weights]   x B [16 pairs of tokens][16 dims]
//
// Keys are read in place. Values are interleaved by two tokens, one shuffle or two for a line, where tiles that have
// values as rows (forward_values.h) need them transposed.
#pragma once

#include "rows.h"

#if defined(REGARD_TILES)

namespace regard {
namespace REGARD_ISA {

// 16 rows of memory, `stride` bytes apart.
struct SixteenRows {
    const char *first;
    int64_t stride;
};

// Scores of G times 16 keys with 16 rows. queries: [steps * 16 pairs][16 rows]; sums: [16 G keys][16 rows]. ask(g) is
// called before each step of 32 dims.
template <int G, typename Ask>
REGARD_INLINE void score_tiles(const SixteenRows *keys, const uint32_t *queries, int64_t steps, float *sums, Ask ask) {
    __asm__ volatile("" ::: "memory");  // GCC does not know that a tile is loaded from memory
    _tile_zero(0);
    if constexpr (G > 1) _tile_zero(1);
    for (int64_t i = 0; i < steps; ++i) {
        _tile_loadd(6, queries + i * SIDE * SIDE, 64);
        ask(0);
        _tile_loadd(4, keys[0].first + i * 64, keys[0].stride);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (G > 1) {
            ask(1);
            _tile_loadd(5, keys[1].first + i * 64, keys[1].stride);
            _tile_dpbf16ps(1, 5, 6);
        }
    }
    _tile_stored(0, sums, 64);
    if constexpr (G > 1) _tile_stored(1, sums + SIDE * SIDE, 64);
}

// Column r of [16 keys][16 rows] to `out` + r * `apart`, for the first `rows`.
REGARD_INLINE void put_columns(const float *sums, int rows, float *out, int64_t apart) {
    F x[SIDE];
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; ++i) x[i] = load(sums + i * SIDE);
    transpose<float>(x);
    for (int r = 0; r < rows; ++r) store(out + r * apart, x[r]);
}

// 32 tokens as [16 dims at a time][16 pairs of tokens][16 dims]; tokens from `count` on and dims that there are not
// are 0. `ask` is called for each 64 bytes of two tokens, `after(t)` when pair t is done.
template <typename RowAt, typename Ask, typename After>
REGARD_INLINE void pair_tokens(RowAt row, int count, int64_t dim, uint32_t *out, Ask ask, After after) {
    for (int t = 0; t < SIDE; after(t), ++t, out += SIDE) {
        const bool has[2] = {2 * t < count, 2 * t + 1 < count};
        const char *const even = row(has[0] ? 2 * t : 0), *const odd = row(has[1] ? 2 * t + 1 : 0);
        for (int64_t d = 0; d < dim; d += 32) {
            const __mmask32 real = dim - d >= 32 ? ~__mmask32(0) : (__mmask32(1) << (dim - d)) - 1;
            ask();
            U first, second;
            pair_words(_mm512_maskz_loadu_epi16(has[0] ? real : 0, even + d * 2),
                       _mm512_maskz_loadu_epi16(has[1] ? real : 0, odd + d * 2), first, second);
            store(out + d * SIDE, first);
            if (d + SIDE < dim) store(out + (d + SIDE) * SIDE, second);
        }
    }
}
inline int64_t token_pairs_bytes(int64_t dim) { return sides(dim) * SIDE * SIDE * 4; }  // of 32 tokens

// The weights of 16 rows for 32 tokens, rows `apart` bytes apart, for add_sides.
REGARD_INLINE void take_weights(const char *weights, int64_t apart) {
    __asm__ volatile("" ::: "memory");
    _tile_loadd(4, weights, apart);
}

// out [16 rows][width] += weights x 32 tokens in pairs, for the sixteens of dims from i on and before `end`.
REGARD_INLINE void add_sides(const uint32_t *pairs, int64_t i, int64_t end, float *out, int64_t width) {
    const int64_t row = width * 4;
    __asm__ volatile("" ::: "memory");
    for (; i < end; ++i) {
        float *const to = out + i * SIDE;
        _tile_loadd(0, to, row);
        _tile_loadd(6, pairs + i * SIDE * SIDE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stored(0, to, row);
    }
}

REGARD_INLINE void add_tiles(const char *weights, int64_t apart, const uint32_t *pairs, int64_t dim, float *out,
                             int64_t width) {
    take_weights(weights, apart);
    add_sides(pairs, 0, sides(dim), out, width);
}

}  // namespace REGARD_ISA
}  // namespace regard

#endif
