// Weights times the values of a block some of which are not finite and hidden from some rows, which they must not
// reach. Sums are made in the order of decode_values.h, one dim at a time: it is rare.
#pragma once

#include "decode_softmax.h"
#include "decode_values.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct DecodeWild {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;

    const Block &block;
    const Bits128 &bits;  // of its tokens, the rows that see them
    const Tokens<K> &v;
    const DecodeSoftmax<K> &softmax;
    const int64_t dim, width;  // of a value; of an output row, whole vectors
    const int rows;
    T *const out;         // [rows][width]
    char *const scratch;  // token_pairs_bytes(dim), for tiles

    // Adds tokens low to high of the block.
    void add(int low, int high) const {
#if defined(REGARD_TILES)
        if constexpr (K::by_32) return add_tamed(low, high);
#endif
        for (int r = 0; r < rows; ++r)
            for (int64_t d = 0; d < dim; ++d) {
                V sum = broadcast(out[r * width + d]);
                for (int j = low; j < high; j += P::pair) {
                    const typename P::Vector w = P::repeat(
                        reinterpret_cast<const char *>(softmax.weights + r * (BLOCK / P::pair) + j / P::pair));
                    const T even = seen(r, j, d);
                    if constexpr (K::pairs) {
                        const T odd = j + 1 < high ? seen(r, j + 1, d) : T(0);
                        sum = P::madd(pack_pairs(broadcast(even), broadcast(odd)), w, sum);
                    } else {
                        sum = P::madd(broadcast(even), w, sum);
                    }
                }
                out[r * width + d] = sum[0];
            }
    }

  private:
#if defined(REGARD_TILES)
    // As Values::mix_tamed: sums of values that are finite, and then what others add to the rows that see them.
    void add_tamed(int low, int high) const {
        for (int j = low; j < high; j += 32) {
            const int end = least(high, j + 32);
            if constexpr (K::tiled) {
                uint32_t *const pairs = reinterpret_cast<uint32_t *>(scratch);
                const auto row = [&](int i) { return reinterpret_cast<const char *>(v.at(block.first + j + i)); };
                pair_tokens(row, end - j, dim, pairs, [] {}, [](int) {});
                tame_pairs(pairs, token_pairs_bytes(dim) / 4);
                add_tiles(reinterpret_cast<const char *>(softmax.weights) + j * 2, BLOCK * 2, pairs, dim, out, width);
            } else {
                const typename P::Mode mode{};
                add_chains(j, end);
            }
            for (int i = j; i < end; ++i) add_wild(i);
        }
    }

    // What token i of the block adds where it is not finite.
    void add_wild(int i) const {
        for (int64_t d = 0; d < dim; ++d) {
            const T value = widen(v.at(block.first + i)[d]);
            if (value - value == 0) continue;
            for (int r = 0; r < rows; ++r)
                if (!block.half[i / TILE].bits || bits.of[i] >> r & 1)
                    out[r * width + d] += softmax.weight(r, i) * value;
        }
    }

    __attribute__((noinline)) void add_chains(int low, int high) const {
        for (int r = 0; r < rows; ++r)
            for (int64_t d = 0; d < dim; ++d) {
                T chain[2] = {};
                for (int i = low; i < high; ++i) {
                    const T value = widen(v.at(block.first + i)[d]);
                    chain[i % 2] =
                        fma(T(softmax.weights[r * BLOCK + i]), value - value == 0 ? value : T(0), chain[i % 2]);
                }
                out[r * width + d] += chain[0] + chain[1];
            }
    }
#endif

    T seen(int r, int j, int64_t d) const {
        const T value = widen(v.at(block.first + j)[d]);
        const bool hidden = block.half[j / TILE].bits && !(bits.of[j] >> r & 1);
        return hidden && !(value - value == 0) ? T(0) : value;
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
