// The queries of a few rows, as their products with keys read them.
#pragma once

#include "decode_sums.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct DecodeQueries {
    using Unit = typename K::Unit;
    using S = typename K::Stored;

    const regard_call &c;
    const int64_t units;  // of a query
    Unit *const at;

    // As [rows][units], for tiles [units][16].
    void take(const Lanes &lanes) const {
#if defined(REGARD_TILES)
        if constexpr (K::tiled) return turn(lanes);
#endif
        for (int r = 0; r < lanes.count; ++r) {
            const S *from = query(lanes, r);
            Unit *to = at + r * units;
            if constexpr (K::pairs) {
                to[units - (units > 0)] = 0;
                memcpy(to, from, size_t(c.qk_dim) * 2);
            } else {
                for (int64_t i = 0; i < c.qk_dim; ++i) to[i] = widen(from[i]);
            }
        }
    }

    // As [units][rows]: one register addresses what a vector of keys meets.
    void interleave(const Lanes &lanes) const {
        for (int r = 0; r < lanes.count; ++r) {
            const S *from = query(lanes, r);
            for (int64_t i = 0; i < c.qk_dim; ++i) at[i * lanes.count + r] = widen(from[i]);
        }
    }

  private:
    const S *query(const Lanes &lanes, int r) const {
        return static_cast<const S *>(c.q.data) + lanes.batch * c.q.batch + lanes.head_of(r) * c.q.head +
               lanes.query_of(r) * c.q.token;
    }

#if defined(REGARD_TILES)
    // With 0 for rows and dims that are missing.
    void turn(const Lanes &lanes) const {
        for (int64_t u = 0; u < units; u += 16) {
            const int64_t left = c.qk_dim - 2 * u;
            const __mmask32 real = left < 32 ? (1u << left) - 1 : ~0u;
            U pairs[FEW] = {};
            for (int r = 0; r < lanes.count; ++r) pairs[r] = (U)_mm512_maskz_loadu_epi16(real, query(lanes, r) + 2 * u);
            transpose<uint32_t>(pairs);
            for (int i = 0; i < FEW; ++i) store(at + (u + i) * FEW, pairs[i]);
        }
    }
#endif
};

}  // namespace REGARD_ISA
}  // namespace regard
