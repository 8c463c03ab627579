// The mean of the keys that every row of a tile sees, by which dq is corrected where a row's delta was wrong.
//
// dq is the sum of ds . k, and a delta that is off by `wrong` changes it by wrong * sum(p . k): where keys have a mean,
// by that times the mean, whatever their number, while the terms of dq cancel each other more and more. The sum is
// not known when the tile is done, but the mean is near it: what is left has the size of the keys' spread, divided by
// the root of their number. With keys and values of a mean of 4 spreads dq erred by 24 % at 1,024 tokens in bf16 and by
// 47 % at 4,096, now by 2.7 and 2.8 %.
//
// The mean of some keys is also off by their spread, divided by the root of their number. So it is multiplied by
// 1 - spread^2 / (number * mean^2), or 0 (James and Stein 1961), or keys without a mean would add errors.
//
// Only keys that all rows see count, so that what is hidden from a row never arrives there. Of these it is every
// fourth: 1 to 2 % of a training step of attention on Zen 4; all keys take 2 to 4 % and the errors are little smaller.
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
    T *sums;    // [qk_dim, whole vectors]
    V squares;  // of all elements of the keys, summed
    int64_t count;

    int64_t size() const { return up(c.qk_dim, W); }

    void clear() {
        memset(sums, 0, size_t(size()) * sizeof(T));
        squares = V{}, count = 0;
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
        const T share = kept_share() / T(count);
        if (!(share > 0)) return;
        for (int64_t d = 0; d < c.qk_dim; ++d) {
            const V mean = broadcast(share * sums[d]);
            for (int lane = 0; lane < LANES; lane += W) {
                T *at = dq + d * LANES + lane;
                store(at, fma(mean, load(by + lane), load(at)));
            }
        }
    }

  private:
    // How much of the mean is more than chance; 0 or NaN: nothing, or keys that are not finite.
    T kept_share() const {
        if (count < 2) return 0;
        T of_keys = 0, of_mean = 0;
        for (int i = 0; i < W; ++i) of_keys += squares[i];
        for (int64_t d = 0; d < c.qk_dim; ++d) of_mean += sums[d] / T(count) * (sums[d] / T(count));
        const T spread = (of_keys - T(count) * of_mean) / T(count - 1);
        return 1 - spread / (T(count) * of_mean);
    }

    void add_key(const typename K::Stored *key) {
        int64_t d = 0;
        for (; d + W <= c.qk_dim; d += W) {
            const V some = load_wide(key + d);
            store(sums + d, load(sums + d) + some);
            squares = fma(some, some, squares);
        }
        for (; d < c.qk_dim; ++d) {
            const T one = widen(key[d]);
            sums[d] += one;
            squares[0] += one * one;
        }
        ++count;
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
