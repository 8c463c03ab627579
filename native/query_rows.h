// The rows of q or dout of a tile of queries, in both forms that products of the backward pass read.
#pragma once

#include "rows.h"

namespace regard {
namespace REGARD_ISA {

template <typename S>
REGARD_INLINE const S *row_at(const regard_tensor &t, const Lanes &lanes, int lane) {
    const S *data = static_cast<const S *>(t.data) + lanes.batch * t.batch;
    return data + lanes.head_of(lane) * t.head + lanes.query_of(lane) * t.token;
}

// The row among all of the call, as lse has them.
REGARD_INLINE int64_t row_number(const regard_call &c, const Lanes &lanes, int lane) {
    return (lanes.batch * c.heads + lanes.head_of(lane)) * c.queries + lanes.query_of(lane);
}

template <typename K>
struct QueryRows {
    using T = typename K::Wide;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W, PAIR = K::Product::pair;

    Unit *lanes;    // [units of dim][64]
    Unit *rows;     // [groups of 64 dims][64 rows, in pairs][64], with 0 for what is not finite
    uint64_t wild;  // rows with a number that is not finite
    int64_t dim;

    void fetch(const regard_tensor &t, const Lanes &of) {
        const auto row = [&](int lane) { return row_at<S>(t, of, lane); };
        const auto row_or_none = [&](int lane) { return lane < of.count ? row(lane) : nullptr; };
        // rows first: they are read in place
        for (int lane = 0; lane < LANES; lane += PAIR) copy_rows(row_or_none(lane), row_or_none(lane + 1), lane);
        if constexpr (K::pairs) {
            gather_lanes<Unit, Unit>(row, of.count, dim / 2, lanes);
            for (int lane = 0; lane < LANES && dim % 2; ++lane)
                lanes[dim / 2 * LANES + lane] = lane < of.count ? row(lane)[dim - 1].bits : 0;
            const int64_t some = (dim + 1) / 2;
            memset(lanes + some * LANES, 0, size_t(Tokens<K>::units(dim) - some) * LANES * sizeof(Unit));
        } else {
            gather_lanes<T, S>(row, of.count, dim, lanes);
        }
        wild = wild_lanes(of.count);
        if (wild) tame(rows, up(dim, LANES) * LANES / PAIR);
    }

    // A row, or a pair of two, up to a whole vector. A null row is 0.
    void copy_rows(const S *even, const S *odd, int lane) {
        for (int64_t low = 0; low < dim; low += LANES) {
            Unit *to = rows + (low + lane) * LANES / PAIR;
            const int64_t dims = dim - low < LANES ? dim - low : int64_t(LANES);
            if (!even || dims < LANES) memset(to, 0, LANES * sizeof(Unit));
            if (!even) continue;
            if constexpr (K::pairs) {
                pair_rows(even + low, odd ? odd + low : nullptr, dims, to);
            } else {
                int64_t i = 0;
                for (; i + W <= dims; i += W) store(to + i, load_wide(even + low + i));
                for (; i < dims; ++i) to[i] = widen(even[low + i]);
            }
        }
    }

    // The lanes with a number that is not finite.
    uint64_t wild_lanes(int count) const {
        using M = IntVec<Unit>;
        M bad[LANES / W] = {};
        for (int64_t i = 0; i < Tokens<K>::units(dim); ++i)
            for (int v = 0; v < LANES / W && v * W < count; ++v) {
                const auto x = load(lanes + i * LANES + v * W);
                if constexpr (K::pairs) bad[v] |= ((x & 0x7f80u) == 0x7f80u) | ((x & 0x7f800000u) == 0x7f800000u);
                else bad[v] |= x - x != 0;
            }
        uint64_t found = 0;
        for (int v = 0; v < LANES / W; ++v)
            for (int i = 0; i < W && any<Unit>(bad[v]); ++i) found |= uint64_t(bad[v][i] != 0) << (v * W + i);
        return found;
    }

    // Numbers that are not finite made 0.
    static void tame(Unit *units, int64_t n) {
        if constexpr (K::pairs) return tame_pairs(units, n);
        for (int64_t i = 0; i < n; ++i)
            if (!(units[i] - units[i] == 0)) units[i] = 0;
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
