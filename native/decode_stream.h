// Blocks of a span that are seen whole, for up to four rows (on AMX and AVX2 up to 16), where keys and values are
// contiguous or, on AMD's cores, in pages of whole sixteens: all keys, then block after block of values, at the speed
// at which memory is read. For vectors of 16 words (AVX-512) or 8 (AVX2).
//
// What decides is which lines are on their way (stream_asks.h). 16 keys at a time are transposed in registers
// (stream_keys.h), and for each vector of words one line further on is prefetched: so some 20 lines are on their way
// while the products of one are made, close to the 24 outstanding misses that a core can have. With 32 keys at a time
// there are more prefetches than that, the core drops some of them, and the loop takes twice as long. Values are read
// in the order of memory (stream_values.h), all dims of a token at once, which the hardware prefetcher follows; for
// that the 32 sums of four rows of 128 dims take all registers. From memory both loops take as long as reads alone, and
// from the second cache they are 1.2 to 3 times as fast. AVX2 has 16 registers: there 16 keys are two vectors, and
// values are added 16 dims at a time for four rows, 64 for one. So it is no loss there to multiply more rows, four
// after four, with 16 keys and with 32 values that the first four have brought into the first cache.
//
// On AMX up to four rows of bf16 make their sums by chains (chains.h), and up to 16 by tiles (stream_tiles.h).
#pragma once

#include "decode_sums.h"
#include "decode_values.h"
#include "stream_keys.h"
#include "stream_tiles.h"
#include "stream_values.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct DecodeStream {
    using T = typename K::Wide;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W, EACH = Sixteens::EACH;
    static constexpr bool known = KeyRows<K, S>::halves && (K::pairs || K::chained || is_same<S, float> || W == 8);
    static constexpr int AT_MOST = K::tiled || (known && W == 8) ? FEW : 4;  // rows
    // What `ask` reads of a block's end on is known: rows of 64 dims at least, where it reads any (`Asks::all`).
    static_assert((AT_MOST - 1) * StreamAsks<K>::OF_ROW < BLOCK * 64 * int64_t(sizeof(S)) || !known);

    const int64_t key_dim, units, v_dim, width;
    const StreamAsks<K> asks;

    // Whether tokens may be in pages of whole sixteens.
    static bool reads_pages() { return known && streams().pages; }

    // In tiles and on AVX2 as many rows as there are, else up to four. Dims of values are as many as registers hold; on
    // AVX2, which takes some at a time, whole steps of two vectors. One or two rows in pairs of bf16 take 1.02 to 1.04
    // times as long as by DecodeScores and DecodeValues on Intel, on AMD's cores 0.73 to 1.0.
    static bool serves(int rows, int64_t key_dim, int64_t v_dim) {
        if (W == 8 ? v_dim % 16 != 0 : v_dim != 64 && v_dim != 128) return false;
        if (K::tiled) return key_dim % 32 == 0;
        const bool few = K::pairs ? streams().few_pairs : streams().few;
        return known && rows <= AT_MOST && (rows > 2 || few);
    }

    // Scores of the blocks' keys, [blocks][rows][128]. queries: [rows][units], for chains [units][rows], for tiles
    // [units][16]. Behind `keys` is what is read next.
    void make(Sixteens &keys, const Unit *queries, int rows, T *scores) const {
#if defined(REGARD_TILES)
        if constexpr (K::tiled)
            return asks.by_asks([&](auto way) { tiles().template make<decltype(way)>(keys, queries, rows, scores); });
#endif
        [[maybe_unused]] const typename P::Mode mode{};
        const StreamKeys<K> of_keys{asks, key_dim, units};
        asks.by_rows(rows, [&](auto way) { of_keys.template make<decltype(way)>(keys, queries, rows, scores); });
    }

    // out [rows][width] += weights [rows][128 / pair] x the block of values from token `first` of the span on. Behind
    // `values` is what is read next. pairs: room for twice 32 values in pairs, if they are multiplied in tiles.
    void add(const Sixteens &values, int64_t first, const Unit *weights, int rows, T *out,
             [[maybe_unused]] char *pairs) const {
#if defined(REGARD_TILES)
        if constexpr (K::tiled) {
            uint32_t *const to = reinterpret_cast<uint32_t *>(pairs);
            return asks.by_asks(
                [&](auto way) { tiles().template add<decltype(way)>(values.at + first / EACH, weights, out, to); });
        }
#endif
        const bool turns = asks.how == Asks::all && first + BLOCK == values.tokens();  // to what is read next
        // tokens that one address serves
        const int each = !values.in_one ? EACH : int(BLOCK) - (turns ? asks.of_values.sixteens * EACH : 0);
        const int count = least(BLOCK / EACH, values.count - first / EACH);
        [[maybe_unused]] const typename P::Mode mode{};
        const StreamValues<K> of_values{asks, v_dim, width};
        asks.by_rows(rows, [&](auto way) {
            of_values.template add<decltype(way)>(values.at + first / EACH, count, each, weights, rows, out);
        });
    }

#if defined(REGARD_TILES)
  private:
    StreamTiles<K> tiles() const { return {asks, key_dim, units, v_dim, width}; }
#endif
};

}  // namespace REGARD_ISA
}  // namespace regard
