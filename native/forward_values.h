// Weights by the values of a block, into an output [v_dim][64].
#pragma once

#include "paired_values.h"
#include "scores.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
class Values {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    static constexpr int W = K::W, UNIT = Tokens<K>::together;

  public:
    static int64_t bytes(const regard_call &c) {
        return Tokens<K>::down_bytes(c.v_dim, BLOCK) + Source<K>::bytes(c.v_dim, values_of(c) ? BLOCK : 0);
    }

    // pairs: those of the head that threads share, if they do.
    Values(const regard_call &c, const PairedValues<K> &pairs, char *scratch)
        : dim(c.v_dim), paired(pairs), memory(scratch), row_memory(scratch + Tokens<K>::down_bytes(dim, BLOCK)) {}

    // How often `read` asks for lines.
    int64_t asks([[maybe_unused]] int tokens) const {
#if defined(REGARD_TILES)
        if (K::tiled && !paired) return turns(tokens, dim);
#endif
        return 0;
    }

    // The memory to prefetch: tokens first to first + count; first is even.
    Ahead::Part ahead(const Source<K> &v, int64_t first, int64_t count) const {
        if (paired && paired.has(first)) {
            const Rows rows = paired.at(first);
            return {rows.data, rows.stride, rows.stride, (count + UNIT - 1) / UNIT};
        }
        return v.ahead(first, count);
    }

    // Tokens low to high of the block that starts at `first`. partial: whether a mask hides some of a half.
    void read(const Source<K> &v, int64_t first, int low, int high, const bool *partial, Ahead *ahead = nullptr) {
        low_ = low;
        shared_ = paired && paired.get(v, first, row_memory);
        if (!shared_) tokens_ = v.some(first + low, high - low, row_memory);
        rows_ = shared_ ? paired.at(first + low) : tokens_.down(first + low, high - low, memory, ahead);
        for (int i = 0; i < 2; ++i) {
            const int from = i ? most(low, TILE) : low, to = i ? high : least(high, TILE);
            wild_[i] = partial[i] && from < to && wild(first + from, to - from);
            if (shared_ && wild_[i]) tokens_ = v.some(first + low, high - low, row_memory);
        }
    }

    void mix(const Block &block, const Bits128 &bits, const Piece &p, const T *weights, T *out, bool fresh) const {
        if (wild_[p.low / TILE] || wild_[(p.high - 1) / TILE]) {
#if defined(REGARD_TILES)
            if constexpr (K::tiled) return mix_tamed(block, bits, p, weights, out, fresh);
#endif
            return mix_wild(block, bits, p, weights, out, fresh);
        }
        const char *from = rows_.data + (p.low - low_) / UNIT * rows_.stride;
        const Unit *by = reinterpret_cast<const Unit *>(weights) + p.low / P::pair * LANES;
        const int64_t steps = (p.high - p.low + UNIT - 1) / UNIT;
#if defined(REGARD_TILES)
        if constexpr (K::tiled)
            return fresh ? tiles_down<false>(from, dim, steps, by, out, p.first, p.last)
                         : tiles_down<true>(from, dim, steps, by, out, p.first, p.last);
#endif
        if (fresh) multiply<P, Along::down, Start::zero>(from, rows_.stride, dim, by, steps, out, p.first, p.last);
        else multiply<P, Along::down>(from, rows_.stride, dim, by, steps, out, p.first, p.last);
    }

#if defined(REGARD_TILES)
    // The same sums, where values that are not finite must not reach lanes that do not see them: products of finite
    // ones, and then what others add to the lanes that see them. A half without such values stays as it is, since
    // another tile may multiply it so.
    void mix_tamed(const Block &block, const Bits128 &bits, const Piece &p, const T *weights, T *out,
                   bool fresh) const {
        const Unit *by = reinterpret_cast<const Unit *>(weights) + p.low / 2 * LANES;
        for (int j = p.low; j < p.high; j += UNIT, by += UNIT / 2 * LANES, fresh = false) {
            const bool tamed = wild_[j / TILE];
            const char *const rows = rows_.data + (j - low_) / UNIT * rows_.stride;
            const char *const from = tamed ? tame(rows) : rows;
            if (fresh) tiles_down<false>(from, dim, 1, by, out, p.first, p.last);
            else tiles_down<true>(from, dim, 1, by, out, p.first, p.last);
            for (int i = j; tamed && i < p.high && i < j + UNIT; ++i) add_wild(block, bits, p, i, weights, out);
        }
    }

    // Rows of a unit with 0 for what is not finite: in place, or beside what threads share.
    const char *tame(const char *rows) const {
        char *const at = shared_ ? memory : memory + (rows - memory);
        if (shared_) memcpy(at, rows, size_t(rows_.stride));
        tame_pairs(reinterpret_cast<uint32_t *>(at), rows_.stride / 4);
        return at;
    }

    // What token i of the block adds where it is not finite.
    void add_wild(const Block &block, const Bits128 &bits, const Piece &p, int i, const T *weights, T *out) const {
        const bf16 *const weight = reinterpret_cast<const bf16 *>(weights) + i / 2 * LANES * 2 + i % 2;
        const bf16 *const value = tokens_.at(block.first + i);
        for (int64_t d = 0; d < dim; ++d) {
            const float x = widen(value[d]);
            if (x - x == 0) continue;
            for (int lane = p.first * W; lane < p.last * W; ++lane)
                if (!block.half[i / TILE].bits || bits.of[i] >> lane & 1)
                    out[d * LANES + lane] += widen(weight[2 * lane]) * x;
        }
    }
#endif

    // The same sums, where values that are not finite must not reach lanes that do not see them.
    void mix_wild(const Block &block, const Bits128 &bits, const Piece &p, const T *weights, T *out, bool fresh) const {
        for (int64_t d = 0; d < dim; ++d)
            for (int vector = p.first; vector < p.last; ++vector) {
                T *at = out + d * LANES + vector * W;
                V sum = fresh ? V{} : load(at);
                for (int j = p.low; j < p.high; j += P::pair) {
                    const V even = seen(block, bits, j, vector, d);
                    const typename P::Vector weight =
                        load(reinterpret_cast<const Unit *>(weights) + j / P::pair * LANES + vector * W);
                    if constexpr (K::pairs) {
                        const V odd = j + 1 < p.high ? seen(block, bits, j + 1, vector, d) : V{};
                        sum = P::madd(pack_pairs(even, odd), weight, sum);
                    } else {
                        sum = P::madd(even, weight, sum);
                    }
                }
                store(at, sum);
            }
    }

  private:
    V seen(const Block &block, const Bits128 &bits, int j, int vector, int64_t d) const {
        const T value = widen(tokens_.at(block.first + j)[d]);
        const V all = broadcast(value);
        if (value - value == 0 || !block.half[j / TILE].bits) return all;
        return select(bits.of[j] >> (vector * W), all, V{});
    }

    // Whether some value of these tokens is NaN or infinite: of pairs, if there are, as they are what is in a cache.
    bool wild(int64_t first, int count) const {
        if constexpr (K::pairs)
            if (shared_) {
                const Rows rows = paired.at(first);
                return wild_pairs(reinterpret_cast<const uint32_t *>(rows.data),
                                  (count + UNIT - 1) / UNIT * rows.stride / 4);
            }
        return tokens_.wild(first, count);
    }

    const int64_t dim;
    const PairedValues<K> paired;
    char *const memory, *const row_memory;
    // of the block that was read
    int low_;
    bool shared_;  // whether rows_ is in memory shared by all threads
    Tokens<K> tokens_;
    Rows rows_;
    bool wild_[2];  // whether a half has values that are not finite and a mask that may hide them
};

}  // namespace REGARD_ISA
}  // namespace regard
