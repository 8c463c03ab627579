// The mean of the keys that every row of a tile sees, by which dq is corrected where a row's delta was wrong.
//
// dq is the sum of ds . k, and a delta that is off by `wrong` changes it by wrong * sum(p . k): where keys have a mean,
// by that times the mean, whatever their number, while the terms of dq cancel each other more and more. The sum is
// not known when the tile is done, but the mean is near it: what is left has the size of the keys' spread, divided by
// the root of their number. With keys and values of a mean of 4 spreads dq erred by 24 % at 1,024 tokens in bf16 and by
// 47 % at 4,096, now by 1.3 and 1.8 %.
//
// Only keys that all rows see count, so that what is hidden from a row never arrives there. Of these it is every
// fourth: 0.3 to 1.2 % of a training step of attention on Zen 4; with all keys 2 to 4 %, for errors of 1.1 and 1.7 %.
// Where dropout and a bias meet, few keys are known to be seen by all, and where no key is, nothing is corrected.
#pragma once

#include "backward_weights.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct KeyMean {
    using T = typename K::Wide;
    using V = typename K::V;
    static constexpr int W = K::W, EACH = 4;

    const regard_call &c;
    T *sums;  // [qk_dim, whole vectors]
    int64_t count;

    int64_t size() const { return up(c.qk_dim, W); }

    void clear() {
        memset(sums, 0, size_t(size()) * sizeof(T));
        count = 0;
    }

    // The keys of a block, once `weights` has its p.
    void add(const BlockPart<K> &part, const Tokens<K> &k, const BackwardWeights<K> &weights) {
        const uint64_t rows = part.lanes.count == LANES ? ~uint64_t(0) : (uint64_t(1) << part.lanes.count) - 1;
        for (int i = 0; i < part.n; ++i) {
            const Piece &p = part.pieces[i];
            if (p.first > 0 || p.last < part.lanes.vectors(W)) continue;
            for (int j = int(up(p.low, EACH)); j < p.high; j += EACH)
                if ((part.kept(j) & rows) == rows && weights.shows(j, rows)) add_key(k.at(part.block.first + j));
        }
    }

    // dq, [qk_dim][64], gains by[lane] times the mean.
    void add_times(const T *by, T *dq) const {
        if (!count) return;
        for (int64_t d = 0; d < c.qk_dim; ++d) {
            const T mean = sums[d] / T(count);
            if (!(mean - mean == 0)) continue;
            for (int lane = 0; lane < LANES; lane += W) {
                T *at = dq + d * LANES + lane;
                store(at, fma(broadcast(mean), load(by + lane), load(at)));
            }
        }
    }

  private:
    void add_key(const typename K::Stored *key) {
        int64_t d = 0;
        for (; d + W <= c.qk_dim; d += W) store(sums + d, load(sums + d) + load_wide(key + d));
        for (; d < c.qk_dim; ++d) sums[d] += widen(key[d]);
        ++count;
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
