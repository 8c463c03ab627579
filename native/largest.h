// The few pairs of a tile on which its gradients depend most, kept apart until the tile is done.
//
// Two roundings spoil the gradients of half precision where a softmax is peaked. `out` is rounded, so delta, which is
// sum(dout * out), is off by up to 2^-9 of itself; and where p is near 1, dp - delta is much smaller than delta. And
// AVX-512-BF16 rounds p and ds before it multiplies them, which a sum over many pairs evens out, but not one over two.
// (Its forward pass rounds p as well: so delta from an output that is not rounded would be off as far.)
//
// Both are known when the tile is done: a row's ds add up to 0 if its delta is right, so their sum says how wrong it
// was, and rounding can be repeated. So the pairs with a p above 1/32 are stored with their values in full, and
// afterwards what they lack is added (backward.h). They are at most 31 of a row, and mostly two or three; of 2,048
// weights that are alike, none.
//
// In bfloat16, where products are fast, it costs 3 % of a backward pass over 2,048 tokens, 11 % where every row has
// several such pairs, and a quarter where 128 tokens have some four each. Two passes over each tile, the first for
// delta, would cost 40 %; products of p and ds in two halves each 60 %.
#pragma once

#include "tile.h"

namespace regard {
namespace REGARD_ISA {

// p and ds of a vector of pairs.
template <typename V>
struct Weighed {
    V p, kept;     // kept: what dropout leaves of it
    V ds, change;  // change: what the softcap lets through, ds * slope
    V slope;
};

// Numbers as wide as T, of rows in lanes. All that is written down is in the order of the keys in each lane.
template <typename T>
struct Largest {
    using V = typename Vec<T>::type;
    static constexpr int W = Vec<T>::lanes, AT_ONCE = 16;      // keys before which it is seen whether there is room
    static constexpr int64_t ROOM = LANES * 31 + AT_ONCE * W;  // what 64 rows can need, and one step more
    static constexpr T LARGE = T(1) / 32;

    T *weights, *changes;      // [64]: sums over a row of p and of ds
    T *passed;                 // [64]: sums of p * slope; not kept where neither biases nor a softcap shape scores
    T *p, *kept, *ds, *slope;  // [ROOM, W]: of the pairs that are written down
    uint32_t *lane, *key;      // of these
    int64_t count;
    T limit;  // above which a p is written down

    template <typename Take>
    void place(Take take) {
        take(weights, LANES), take(changes, LANES), take(passed, LANES);
        take(p, ROOM + W), take(kept, ROOM + W), take(ds, ROOM + W), take(slope, ROOM + W);
        take(lane, ROOM + W), take(key, ROOM + W);
    }

    void clear(T above_what) {
        count = 0, limit = above_what;
        memset(weights, 0, LANES * sizeof(T)), memset(changes, 0, LANES * sizeof(T));
        memset(passed, 0, LANES * sizeof(T));
    }

    // The sums of a vector of rows, in registers while keys pass.
    struct Sums {
        V weights, changes, passed, limit;

        template <bool general>
        REGARD_INLINE void add(const Weighed<V> &one) {
            weights += one.p;
            changes += one.ds;
            if constexpr (general) passed = fma(one.p, one.slope, passed);
        }
    };
    // The sums before the next AT_ONCE keys. Where there is no room, p add up to more than 1: no forward pass gave such
    // an lse.
    REGARD_INLINE Sums sums(int v) const {
        const T least = count > ROOM - AT_ONCE * W ? T(INFINITE) : limit;
        return {load(weights + v * W), load(changes + v * W), load(passed + v * W), broadcast(least)};
    }
    REGARD_INLINE void keep(int v, const Sums &s) {
        store(weights + v * W, s.weights), store(changes + v * W, s.changes), store(passed + v * W, s.passed);
    }

    // Writes down the pairs of a key with a large p. It calls nothing, so that registers keep what they hold.
    REGARD_INLINE void see(const Weighed<V> &one, int64_t token, int v, const Sums &s) {
        const uint64_t large = above<T>(one.p, s.limit);
        if (!large) return;
        store_lanes(p + count, one.p, large);
        store_lanes(kept + count, one.kept, large);
        store_lanes(ds + count, one.ds, large);
        store_lanes(slope + count, one.slope, large);
        U lanes{};
        for (int i = 0; i < W; ++i) lanes[i] = uint32_t(v * W + i);
        store_lanes(reinterpret_cast<T *>(lane + count), V(lanes), large);
        store(key + count, broadcast(uint32_t(token)));
        count += __builtin_popcountll(large);
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
