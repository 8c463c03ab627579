// The gradients of biases: ds of a block, added along its diagonals (ddistance) or where each pair has a number
// (dbias).
#pragma once

#include "backward_weights.h"
#include "division.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct BiasGradients {
    using T = typename K::Wide;
    using V = typename K::V;
    static constexpr int W = K::W;

    const regard_gradient &g;
    const regard_call &c;
    const Division &division;
    const T *added;  // [128][64]: ds of a block, before the softcap's slope

    // ddistance of the group's heads, [heads][division.distances], gains the changes along its diagonals.
    void add_diagonals(const BlockPart<K> &part, T *ddistance) const {
        const Lanes &lanes = part.lanes;
        ddistance += lanes.head % division.group * division.distances + c.keys - 1 + lanes.first - part.block.first;
        for (int i = 0; i < part.n; ++i) {
            const Piece &p = part.pieces[i];
            for (int j = p.low; j < p.high; ++j) {
                T *to = ddistance - j;
                const T *from = added + j * LANES;
                if (lanes.one_head()) {
                    for (int v = p.first; v < p.last; ++v) store(to + v * W, load(to + v * W) + load(from + v * W));
                } else {
                    for (int lane = p.first * W; lane < lanes.count && lane < p.last * W; ++lane)
                        to[lane / lanes.per_head * division.distances + lane % lanes.per_head] += from[lane];
                }
            }
        }
    }

    // dbias gains the changes; elements that several pairs share are summed in the order of lanes, then keys.
    void add_pairs(const BlockPart<K> &part) const {
        const bool along_keys = g.bias_sizes[3] > 1;
        for (int i = 0; i < part.n; ++i) {
            const Piece &p = part.pieces[i];
            for (int v = p.first; v < p.last; ++v) {
                T *to[W];
                const int some = part.lanes.count - v * W < W ? part.lanes.count - v * W : W;
                for (int lane = 0; lane < some; ++lane) to[lane] = row(part.lanes, v * W + lane, part.block.first);
                int j = p.low;
                for (; j + W <= p.high && along_keys; j += W) add_square(j, v, some, to);
                for (int lane = 0; lane < some; ++lane)
                    for (int k = j; k < p.high; ++k) to[lane][along_keys ? k : 0] += added[k * LANES + v * W + lane];
            }
        }
    }

    // Where the elements of a lane begin, for keys from `first` on.
    T *row(const Lanes &lanes, int lane, int64_t first) const {
        const int64_t *n = g.bias_sizes;
        const int64_t b = n[0] > 1 ? lanes.batch : 0, h = n[1] > 1 ? lanes.head_of(lane) : 0;
        const int64_t before = (b * n[1] + h) * n[2] + (n[2] > 1 ? lanes.query_of(lane) : 0);
        return static_cast<T *>(g.dbias) + before * n[3] + (n[3] > 1 ? first : 0);
    }

    // W keys from j on by a vector of lanes, transposed: memory has keys side by side.
    void add_square(int j, int v, int some, T *const *to) const {
        V block[W];
        for (int i = 0; i < W; ++i) block[i] = load(added + (j + i) * LANES + v * W);
        transpose<T>(block);
        for (int lane = 0; lane < some; ++lane) store(to[lane] + j, load(to[lane] + j) + block[lane]);
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
