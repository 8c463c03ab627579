// From scores of a few rows to weights, a block of keys at a time: scores whole, the greatest, exponentials and their
// sum, in which those of 16 keys are a tree of neighbours. Lanes are keys. Weights replace the scores; of pairs of bf16
// they are written beside them.
#pragma once

#include "decode_sums.h"
#include "scores.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct DecodeSoftmax {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using Sums = DecodeSums<K>;
    static constexpr int W = K::W;
    static constexpr T NEVER = Sums::NEVER;

    const regard_call &c;
    const Scoring<T> scoring;
    const T factor;       // of a score, to the exponent of 2
    const int64_t width;  // of an output row, whole vectors
    T *scores;            // [16][128]
    Unit *weights;        // [16][128 / pair]

    explicit DecodeSoftmax(const regard_call &call)
        : c(call), scoring(call), factor(T(scoring.unit * LOG2E)), width(Sums::wide(call)) {}

    // Takes the scores of another block.
    void move_to(T *block) {
        scores = block;
        if constexpr (!K::pairs) weights = block;
    }

    // Row r: scores whole, the maximum, weights and their sum.
    void weigh(const Block &block, const Lanes &lanes, const Bits128 &bits, const Piece *pieces, int n, int r,
               const Sums &into) {
        if (is_plain(block, pieces, n)) weigh_plain(r, into);
        else weigh_any(block, lanes, bits, pieces, n, r, into);
    }

    // The bits of tokens j to j + count in lane r.
    static REGARD_INLINE uint64_t kept_bits(const Block &block, const Bits128 &bits, int r, int j, int count) {
        const uint64_t all = (uint64_t(1) << count) - 1;
        if (!block.half[j / TILE].bits) return all;
        return row_bits(bits.of + j, r, count) & all;
    }

    T weight(int r, int i) const {
        if constexpr (K::tiled) return widen(reinterpret_cast<const bf16 *>(weights)[r * BLOCK + i]);
        else return weights[r * BLOCK + i];
    }

  private:
    // Whether each row sees all keys of a block, and a score is its product.
    bool is_plain(const Block &block, const Piece *pieces, int n) const {
        const bool all = n == 1 && pieces[0].low == 0 && pieces[0].high == BLOCK && block.first + BLOCK <= c.keys;
        return all && !block.half[0].bits && !block.half[1].bits && !scoring.whole && !(c.dropout > 0);
    }

    // Row r of such a block.
    void weigh_plain(int r, const Sums &into) {
        constexpr int of_block = int(BLOCK) / W;
        T *const s = scores + r * BLOCK;
        V first = broadcast(NEVER), second = first;
#pragma GCC unroll 16
        for (int j = 0; j < of_block; j += 2) {
            first = larger(load(s + j * W), first);
            second = larger(load(s + (j + 1) * W), second);
        }
        const V shift = shift_of(r, largest(larger(first, second)), into);
        V tree[of_block];
#pragma GCC unroll 32
        for (int j = 0; j < of_block; ++j) tree[j] = weights_of(load(s + j * W), r, j * W, shift);
        into.total[r] = add_sums<of_block>(tree, of_block, into.total[r]);
    }

    // Row r of any block: with biases, hidden keys, dropout.
    __attribute__((noinline)) void weigh_any(const Block &block, const Lanes &lanes, const Bits128 &bits,
                                             const Piece *pieces, int n, int r, const Sums &into) {
        T *s = scores + r * BLOCK;
        V most = broadcast(NEVER);
        for (int i = 0; i < n; ++i)
            for (int j = pieces[i].low; j < pieces[i].high; j += W) {
                const int count = pieces[i].high - j < W ? pieces[i].high - j : W;
                V x = load(s + j);
                if (scoring.whole)
                    x = scoring.template shaped<P::precision>(x, added(lanes, r, block.first + j, count));
                const uint64_t kept = kept_bits(block, bits, r, j, count);
                if (kept != (W == 64 ? ~uint64_t(0) : (uint64_t(1) << W) - 1)) x = select(kept, x, broadcast(NEVER));
                store(s + j, x);
                most = larger(x, most);
            }
        const V shift = shift_of(r, largest(most), into);
        T total = into.total[r];
        for (int i = 0; i < n; ++i) total = add_weights(lanes, block.first, r, pieces[i], shift, total);
        into.total[r] = total;
    }

    // What is subtracted from the scores of row r, whose largest in this block is `found`.
    REGARD_INLINE V shift_of(int r, T found, const Sums &into) {
        T now = into.top[r];
        if ((found - now) * factor > T(8)) rescale(r, found, now, into);
        return broadcast(now == NEVER ? T(0) : now);
    }

    // What is added to the scores of row r and keys from `token` on.
    V added(const Lanes &lanes, int r, int64_t token, int count) const {
        V sum{};
        const int64_t h = lanes.head_of(r), i = lanes.query_of(r);
        if (c.bias) {
            const int64_t at = lanes.batch * c.bias_batch + h * c.bias_head + i * c.bias_row + token * c.bias_key;
            if (count == W && c.bias_key == 1) sum = any_vector<T>(c.bias, c.bias_dtype, at);
            else
                for (int j = 0; j < count; ++j) sum[j] = any_number<T>(c.bias, c.bias_dtype, at + j * c.bias_key);
        }
        if (!c.distance) return sum;
        const T *from = static_cast<const T *>(c.distance) + h * c.distance_head + c.keys - 1 + i - token;
        V far{};
        for (int j = 0; j < count; ++j) far[j] = from[-j];
        return c.bias ? sum + far : far;
    }

    void rescale(int r, T found, T &now, const Sums &into) {
        const T before = now;
        now = into.top[r] = found;
        if (before == NEVER) return;  // nothing was added yet
        const T alpha = exp2<P::precision>(broadcast(T((before - found) * factor)))[0];
        into.total[r] *= alpha;
        for (int64_t d = 0; d < width; d += W) store(into.out + r * width + d, load(into.out + r * width + d) * alpha);
    }

    // Weights of a piece. To the total their sums are added, those of 16 keys as a tree of neighbours.
    REGARD_INLINE T add_weights(const Lanes &lanes, int64_t first, int r, const Piece &p, V shift, T total) {
        constexpr int of_block = int(BLOCK) / W;
        V tree[of_block];
        int count = 0;
        for (int j = p.low; j < p.high; j += 16)
#pragma GCC unroll 8
            for (int g = 0; g < 16; g += W) tree[count++] = weights_at(first, r, j + g, shift);
        if (c.dropout > 0)
            for (int j = p.low; j < p.high; j += 16) drop(lanes, first, r, j);
        if constexpr (K::tiled) clear_weights(r, p.high);
        return count > of_block / 2 ? add_sums<of_block>(tree, count, total)
                                    : add_sums<of_block / 2>(tree, count, total);
    }

    // Adds the sums of each 16 keys, of `count` vectors, at most n.
    template <int n>
    static REGARD_INLINE T add_sums(V *tree, int count, T total) {
        const int groups = count * W / 16;
        while (count < n) tree[count++] = V{};
        add_neighbours<n, 16>(tree);
        for (int i = 0; i < groups; ++i) total += tree[i / W][i % W];
        return total;
    }

    // 32 weights are multiplied at once: those from `high` on are 0.
    void clear_weights(int r, int high) {
        const int from = int(up(high, 16)), to = int(up(high, 32));
        memset(reinterpret_cast<bf16 *>(weights) + r * BLOCK + from, 0, size_t(to - from) * sizeof(bf16));
    }

    // Sums each `each` adjacent lanes of n vectors.
    template <int n, int each>
    static REGARD_INLINE void add_neighbours(V *x) {
        if constexpr (each > 1) {
#pragma GCC unroll 32
            for (int i = 0; i < n; i += 2) x[i / 2] = neighbours<T>(x[i], x[i + 1 < n ? i + 1 : i]);
            add_neighbours<(n + 1) / 2, each / 2>(x);
        }
    }

    // Of W keys.
    REGARD_INLINE V weights_at(int64_t first, int r, int j, V shift) {
        V x = load(scores + r * BLOCK + j);
        const int left = int(c.keys - first) - j;  // keys that there are
        if (left < W) x = select(left > 0 ? (uint64_t(1) << left) - 1 : 0, x, broadcast(NEVER));
        return weights_of(x, r, j, shift);
    }

    // Of W scores of row r, from j on.
    REGARD_INLINE V weights_of(V score, int r, int j, V shift) {
        const V x = exp2<P::precision>((score - shift) * factor);
        if constexpr (K::pairs) store_narrow(reinterpret_cast<bf16 *>(weights) + r * BLOCK + j, x);
        store(scores + r * BLOCK + j, multiplied(x));
        return x;
    }

    // Weights as they meet values.
    static REGARD_INLINE V multiplied(V weights) {
#if defined(REGARD_PAIRS)
        if constexpr (K::chained) return through_bf16(weights);
#endif
        return weights;
    }

    void drop(const Lanes &lanes, int64_t first, int r, int j) {
        const uint32_t below = dropout_threshold(c.dropout);
        const T rest = T(1 / (1 - c.dropout));
        const uint32_t row =
            dropout_row(c.seed, uint32_t(lanes.batch * c.heads + lanes.head_of(r)), uint32_t(lanes.query_of(r)));
        for (int i = j; i < j + 16; ++i) {
            const bool gone = dropout_bits(row, dropout_column(uint32_t(first + i))) < below;
            T *w = scores + r * BLOCK + i;
            *w = gone ? T(0) : multiplied(broadcast(*w * rest))[0];
            if constexpr (K::pairs) {
                bf16 *near = reinterpret_cast<bf16 *>(weights) + r * BLOCK + i;
                *near = gone ? bf16{0} : narrow<bf16>(widen(*near) * rest);
            }
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
