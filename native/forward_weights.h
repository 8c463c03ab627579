// Weights 2^(score - maximum) in place of the scores of a block, their sums, and dropout.
#pragma once

#include "forward_sums.h"
#include "scores.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct Weights {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    static constexpr int W = K::W;

    const regard_call &c;
    const T factor;
    T *const scores;  // [128][64]; the weights in pairs in the same place

    // Weights in place of scores, and their sum: 16 keys as a tree, these one after the other.
    void weigh(const Piece &p, const T *shift, T *total) {
        int j = p.low;
        for (; j + 16 <= p.high; j += 16) {
            if ((j - p.low) % 48 == 32) stay_awake<K>();  // in 128 keys twice: more and fewer take longer
            for (int v = p.first; v < p.last; ++v)
                store(total + v * W, load(total + v * W) + sixteen<0, 16>(j, v, load(shift + v * W)));
        }
        for (int v = p.first; v < p.last && j < p.high; ++v)
            store(total + v * W, load(total + v * W) + sixteen_at_most(j, p.high, v, load(shift + v * W)));
        if constexpr (K::tiled)  // 32 weights are multiplied at once
            for (int i = (p.high + 1) / 2; i < up(p.high, 32) / 2; ++i)
                for (int v = p.first; v < p.last; ++v) store(reinterpret_cast<Unit *>(scores) + i * LANES + v * W, U{});
    }

    REGARD_INLINE V weight(int j, int v, V shift) const {
        return exp2<P::precision>((load(scores + j * LANES + v * W) - shift) * factor);
    }

    REGARD_INLINE void put_pair(int j, int v, V even, V odd) {
        if constexpr (K::pairs) {
            store(reinterpret_cast<Unit *>(scores) + j / 2 * LANES + v * W, pack_pairs(even, odd));
        } else {
            store(scores + j * LANES + v * W, even);
            store(scores + (j + 1) * LANES + v * W, odd);
        }
    }

    template <int low, int high>
    REGARD_INLINE V sixteen(int j, int v, V shift) {
        if constexpr (high - low == 2) {
            const V even = weight(j + low, v, shift), odd = weight(j + low + 1, v, shift);
            put_pair(j + low, v, even, odd);
            return even + odd;
        } else {
            constexpr int middle = (low + high) / 2;
            const V first = sixteen<low, middle>(j, v, shift);
            return first + sixteen<middle, high>(j, v, shift);
        }
    }

    // The end of the keys: what is missing weighs 0.
    V sixteen_at_most(int j, int high, int v, V shift) {
        V e[16];
        for (int i = 0; i < 16; ++i) e[i] = j + i < high ? weight(j + i, v, shift) : V{};
        for (int i = 0; i < 16; i += 2)
            if (j + i < high) put_pair(j + i, v, e[i], e[i + 1]);
        for (int n = 16; n > 1; n /= 2)
            for (int i = 0; i < n / 2; ++i) e[i] = e[2 * i] + e[2 * i + 1];
        return e[0];
    }

    // Weights of dropped pairs made 0, others larger.
    void drop(const Block &block, const Lanes &lanes, const Piece &p) {
        alignas(64) uint32_t row[LANES] = {};
        for (int lane = 0; lane < lanes.count; ++lane)
            row[lane] = dropout_row(c.seed, uint32_t(lanes.batch * c.heads + lanes.head_of(lane)),
                                    uint32_t(lanes.query_of(lane)));
        constexpr int step = K::pairs ? 2 : 1;
        for (int j = p.low / step * step; j < p.high; j += step) {
            const uint32_t column[2] = {dropout_column(uint32_t(block.first + j)),
                                        dropout_column(uint32_t(block.first + j + 1))};
            for (int v = p.first; v < p.last; ++v) drop_at(p, row + v * W, column, j, v);
        }
    }

    REGARD_INLINE void drop_at(const Piece &p, const uint32_t *row, const uint32_t *column, int j, int v) {
        if constexpr (K::pairs) {
            const U both = load(reinterpret_cast<const uint32_t *>(scores) + j / 2 * LANES + v * W);
            V even = V(both << 16), odd = V(both & 0xffff0000u);
            if (j >= p.low) even = dropped(even, row, column[0]);
            if (j + 1 < p.high) odd = dropped(odd, row, column[1]);
            put_pair(j, v, even, odd);
        } else {
            T *at = scores + j * LANES + v * W;
            store(at, dropped(load(at), row, column[0]));
        }
    }

    REGARD_INLINE V dropped(V weight, const uint32_t *row, uint32_t column) const {
        const uint32_t below = dropout_threshold(c.dropout);
        const V rest = broadcast(T(1 / (1 - c.dropout)));
        if constexpr (sizeof(T) == 4) {
            const I gone = dropout_bits(load(row), broadcast(column)) < below;
            return gone ? V{} : weight * rest;
        } else {
            for (int i = 0; i < W; ++i) weight[i] = dropout_bits(row[i], column) < below ? T(0) : weight[i] * rest[i];
            return weight;
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
