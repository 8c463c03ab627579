// Scores of the keys of blocks, 16 keys at a time, which are transposed in registers, for up to four rows; of bf16 on
// AMX by chains (chains.h). On AVX2 they are two vectors, whose sums hide the latency of a product, and more rows
// follow.
#pragma once

#include "decode_keys.h"
#include "stream_asks.h"

namespace regard {
namespace REGARD_ISA {

// Rows of memory, in five registers: 16 addresses would wait in memory for their turn.
struct Steps {
    static constexpr int FOURTHS = Sixteens::EACH / 4;
    const char *fourth[FOURTHS];
    int64_t step;

    REGARD_INLINE Steps(const char *first, int64_t apart) : step(apart) {
        for (int i = 0; i < FOURTHS; ++i) fourth[i] = first + 4 * i * apart;
    }
    REGARD_INLINE const char *operator[](int i) const { return fourth[i / 4] + i % 4 * step; }
};

// Those from `first` on.
struct StepsFrom {
    const Steps &all;
    int first;

    REGARD_INLINE const char *operator[](int i) const { return all[first + i]; }
};

template <typename K>
struct StreamKeys {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    using Turned = KeyRows<K, S>;
    static constexpr int W = K::W, EACH = Sixteens::EACH, OF_BLOCK = StreamAsks<K>::OF_BLOCK;
    static constexpr int G = EACH / W > 0 ? EACH / W : 1;  // vectors of keys

    const StreamAsks<K> &asks;
    const int64_t key_dim, units;

    // scores: [blocks][rows][128]; queries: [rows][units], for chains [units][rows].
    template <typename By>
    __attribute__((noinline)) void make(Sixteens &keys, const Unit *queries, [[maybe_unused]] int rows,
                                        T *scores) const {
        constexpr int R = By::rows;
        const int64_t step = key_dim * int64_t(sizeof(S));
        const int count = keys.tokens();
        const int turn =
            keys.in_one ? count - asks.of_keys.sixteens * EACH : 0;  // from here on addresses are looked up
        const bool looks = W == 8 || !keys.in_one;
        [[maybe_unused]] const int next = asks.near(asks.of_keys);
        const char *row = keys.at[0];
        Later<By> later = asks.template later_of<By>(keys.at, 0, asks.of_keys, keys.bytes);
        for (int j = 0; j < count; j += EACH, row += EACH * step, later.at += EACH * step) {
            if (W == 8 && j + EACH == count) keys.fill_last();
            if (looks) row = keys.at[j / EACH];
            if (By::places || j >= turn) {
                const int block = j / int(BLOCK) * OF_BLOCK, next_block = least(block + OF_BLOCK, keys.count);
                later = asks.template later_of<By>(keys.at + block, next_block - block, j % BLOCK / EACH, asks.of_keys,
                                                   keys.bytes);
            }
            V sum[R][G] = {};
            const char *const near = keys.at[j / EACH + next];
            if constexpr (K::chained) meet_chains<By>(Steps(row, step), later, near, queries, sum);
            else meet<By>(Steps(row, step), later, near, queries, sum);
            T *const to = scores + j / BLOCK * (By::others ? rows : R) * BLOCK + j % BLOCK;
            put(sum, to);
            if constexpr (By::others) meet_others(row, queries, rows, to);
        }
    }

  private:
    template <int R>
    static REGARD_INLINE void put(const V (&sum)[R][G], T *to) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
            for (int g = 0; g < G; ++g) store(to + r * BLOCK + g * W, sum[r][g]);
    }

    // The rows behind the first four, whose keys are in the first cache now.
    void meet_others(const char *keys, const Unit *queries, int rows, T *to) const {
        const int64_t step = key_dim * int64_t(sizeof(S));
        behind_four(rows, [&](auto some, int r) {
            meet_some<decltype(some)>(keys, step, queries + r * units, to + r * BLOCK);
        });
    }
    template <typename By>
    __attribute__((noinline)) void meet_some(const char *keys, int64_t step, const Unit *queries, T *to) const {
        V sum[By::rows][G] = {};
        meet<By>(Steps(keys, step), Later<By>{keys, 0}, keys, queries, sum);
        put(sum, to);
    }

    // Sums of R rows with 16 keys. Where lines are asked for into the second cache, those of the `next` keys are into
    // the first.
    template <typename By, int R>
    REGARD_INLINE void meet(const Steps &rows, Later<By> later, const char *next, const Unit *queries,
                            V (&sum)[R][G]) const {
        const Unit *q = queries;
        int64_t u = 0;
        for (; (u + Turned::UNITS) * P::pair <= key_dim; u += Turned::UNITS) {
            typename P::Vector word[G][Turned::WORDS];
#pragma GCC unroll 2
            for (int g = 0; g < G; ++g) Turned::turn(StepsFrom{rows, g * W}, u, word[g]);
#pragma GCC unroll 8
            for (int n = 0; n < Turned::WORDS; ++n, next += Lines::LINE) {
                later.ask(n);
                if (By::far) __builtin_prefetch(next);
#pragma GCC unroll 2
                for (int i = 0; i < Turned::UNITS_OF_WORD; ++i, ++q)
                    meet_one([&](int g) { return Turned::unit(word[g][n], i); }, q, units, sum);
            }
            later.pass(Turned::WORDS);
        }
        for (; u < units; ++u, ++q)
            meet_one([&](int g) { return Turned::single(StepsFrom{rows, g * W}, key_dim, u); }, q, units, sum);
    }

    // The same by chains: a word is an even unit and an odd one. queries: [units][R].
    template <typename By, int R>
    REGARD_INLINE void meet_chains(const Steps &rows, Later<By> later, const char *next, const Unit *queries,
                                   V (&sum)[R][G]) const {
        const Unit *q = queries;
        V chain[2][R][G] = {};
        int64_t u = 0;
        for (; u + Turned::UNITS <= key_dim; u += Turned::UNITS) {
            typename P::Vector word[Turned::WORDS];
            Turned::turn(rows, u, word);
#pragma GCC unroll 8
            for (int n = 0; n < Turned::WORDS; ++n, q += 2 * R, next += Lines::LINE) {
                later.ask(n);
                if (By::far) __builtin_prefetch(next);
                meet_one([&](int) { return Turned::unit(word[n], 0); }, q, 1, chain[0]);
                meet_one([&](int) { return Turned::unit(word[n], 1); }, q + R, 1, chain[1]);
            }
            later.pass(Turned::WORDS);
            if ((u + Turned::UNITS) % CHAINED == 0) end_chains(chain, sum);
        }
        for (; u < units; ++u, q += R)
            if (u % 2) meet_one([&](int) { return Turned::single(rows, key_dim, u); }, q, 1, chain[1]);
            else meet_one([&](int) { return Turned::single(rows, key_dim, u); }, q, 1, chain[0]);
        end_chains(chain, sum);
    }

    // A unit of 16 keys, of(g) of vector g, meets that of R queries, which are `apart` units apart.
    template <typename Of, int R>
    REGARD_INLINE void meet_one(Of of, const Unit *q, int64_t apart, V (&sum)[R][G]) const {
        typename P::Vector x[G];
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) x[g] = of(g);
        meet_rows<P>(x, reinterpret_cast<const char *>(q), apart * int64_t(sizeof(Unit)), sum);
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
