// Delta's triangular system within a chunk of up to 64 tokens (Yang et al. 2024, arXiv:2406.06484, section 3):
//
//     (I + L) x = right        L_ij = beta_i (k_i . k_j) (decays over j < t <= i)        j < i
//
// Rows of x are found 16 at a time: less the product of L with all rows found before, by `multiply`; then among the 16,
// a vector of columns at a time, in registers. A row of x depends on no later row, whatever that holds.
#pragma once

#include "simd.h"
#include "tile.h"

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

}  // namespace REGARD_ISA
}  // namespace regard
