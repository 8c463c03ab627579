// The sums that AMX's tiles make (amx.h), by vectors: so few rows, which would leave most of a tile empty, get the bits
// that they have in a prompt.
//
//     sum += even + odd        even = 0 + x0 y0 + x2 y2 + ... + x30 y30        odd = 0 + x1 y1 + ... + x31 y31
//
// Products of bf16 are exact in float32, so a chain is one of multiply-adds of widened numbers. Widening takes two
// instructions for a vector of pairs, which all rows share; and a Xeon with AMX begins two multiply-adds of float32 a
// cycle, but one `vdpbf16ps` in two cycles.
#pragma once

#include "simd.h"

namespace regard {
namespace REGARD_ISA {

constexpr int CHAINED = 32;  // products that the two chains of a sum have

#if defined(REGARD_TILES)
// While it lives, numbers below the normal ones count as 0, and become 0, and results are rounded to the nearest, as in
// tiles. What is computed meanwhile must be called: the compiler may move arithmetic beyond either end.
class Flushing {
  public:
    Flushing() : before_(_mm_getcsr()) { _mm_setcsr((before_ & ~ROUNDING) | DENORMALS_ARE_ZERO | FLUSH_TO_ZERO); }
    ~Flushing() { _mm_setcsr(before_); }
    Flushing(const Flushing &) = delete;

  private:
    static constexpr unsigned DENORMALS_ARE_ZERO = 0x40, FLUSH_TO_ZERO = 0x8000, ROUNDING = 0x6000;
    const unsigned before_;
};
#endif

// Adds the odd chains to the even ones.
template <int R, int N>
REGARD_INLINE void join_chains(F (&chain)[2][R][N]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) chain[0][r][n] += chain[1][r][n];
}

// Adds both to sums, and begins new ones.
template <int R, int N>
REGARD_INLINE void end_chains(F (&chain)[2][R][N], F (&sum)[R][N]) {
    join_chains(chain);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sum[r][n] += chain[0][r][n], chain[0][r][n] = chain[1][r][n] = F{};
}

}  // namespace REGARD_ISA
}  // namespace regard
