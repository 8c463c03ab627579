// Which lines of memory the loops over whole blocks (decode_stream.h) ask for, that is prefetch.
//
// It follows the machine (`Streams` of caches.h). On Zen 4 the line 8 KiB behind each one of keys of float32 is asked
// for into the first cache. On Zen 5 values are asked for like keys, 8 KiB ahead, from the end of a span's values on
// those keys that come next, and while weights are made, which would stop it, lines behind these into the second cache.
// On Zen 4 in pairs of bf16 and in pages that are apart, which the hardware prefetcher cannot follow, keys and values
// are asked for into the second cache, 16 KiB ahead, and the next 16 keys into the first. On Intel's cores with 2 MiB
// keys and values are asked for a block of 128 tokens ahead, a line of each quarter of it in turns, and the next 16
// keys into the first cache: so while one page is looked up, lines of three others are on their way. With vectors of
// 256 bits (AVX2) this is so everywhere, and in pages that are apart as on Zen 4: values are added 16 to 64 dims at a
// time, and the hardware prefetcher cannot follow such lines (keys alone were 1.8 times as slow there on Zen 4).
#pragma once

#include "caches.h"
#include "sixteens.h"

namespace regard {
namespace REGARD_ISA {

constexpr int PLACES = 4;  // from which lines are asked for in turns

// What is streamed, and how, with vectors of this size.
inline Streams streams() {
    Streams found = caches().streams;
    if (VECTOR_BYTES == 32) found.floats = Asks::places, found.apart = Asks::far, found.few = true;
    return found;
}

// How many rows, where that is known, and how lines are asked for. `others`: and more rows, on AVX2.
template <int R, Asks how, bool more = false>
struct Way {
    static constexpr int rows = R;
    static constexpr bool others = more;
    static constexpr Asks asks = how;
    static constexpr bool values = asks != Asks::keys, places = asks == Asks::places;
    static constexpr bool far = asks == Asks::far || places;  // into the second cache

    static REGARD_INLINE void ask(const char *at) {
        if constexpr (far) __builtin_prefetch(at, 0, 2);
        else __builtin_prefetch(at);
    }
};

// Those other rows, whose lines the first four have asked for.
template <int R>
struct Silent {
    static constexpr int rows = R;
    static constexpr bool others = false, values = false, places = false, far = false;

    static REGARD_INLINE void ask(const char *) {}
};

// work(Silent) for the rows behind the first four, and the first of these.
template <typename Work>
REGARD_INLINE void behind_four(int rows, Work work) {
    for (int r = 4; r < rows; r += 4) switch (rows - r) {
            case 1:
                work(Silent<1>{}, r);
                break;
            case 2:
                work(Silent<2>{}, r);
                break;
            case 3:
                work(Silent<3>{}, r);
                break;
            default:
                work(Silent<4>{}, r);
        }
}

// The lines that are asked for next: one after the other, or from four places in turns.
template <typename By>
struct Later {
    const char *at;
    int64_t apart;  // bytes from place to place

    REGARD_INLINE void ask(int n) const {
        if constexpr (By::places) By::ask(at + n % PLACES * apart + n / PLACES * Lines::LINE);
        else By::ask(at + n * Lines::LINE);
    }
    REGARD_INLINE void pass(int64_t lines) { at += (By::places ? lines / PLACES : lines) * Lines::LINE; }
};

// Which lines are prefetched, and how far ahead, for the keys and values of blocks.
template <typename K>
struct StreamAsks {
    using S = typename K::Stored;
    static constexpr int EACH = Sixteens::EACH, OF_BLOCK = int(BLOCK) / EACH;  // sixteens of a block
    static constexpr int64_t AHEAD = 8192, FAR = 16384, OF_ROW = 1024;         // bytes

    const int64_t key_dim, v_dim;
    const bool in_one;  // whether keys and values of the blocks are contiguous
    const Asks how = in_one ? of_type() : streams().apart;
    // How far ahead lines are asked for: in times 16 tokens, and bytes besides.
    struct Distance {
        int sixteens;
        int64_t bytes;
    };
    const Distance of_keys = distance(key_dim), of_values = distance(v_dim);

    // How many sixteens ahead lines are asked for into the first cache, where others are into the second; on AVX2 two
    // of numbers of two bytes, which are as long as one of float32.
    static int near(const Distance &known) {
        return least(VECTOR_BYTES == 32 && sizeof(S) == 2 ? 2 : 1, known.sixteens);
    }

    // How many sixteens of the next span's keys are looked up.
    int next_keys(int64_t of_value, int64_t of_key) const {
        if (how == Asks::places) return 1;
        return 1 + int(least(Sixteens::AFTER - 1, of_values.sixteens * of_value / of_key));
    }

    // Asks for a part of what is read later, while row r of the block that begins with token `first` is weighed: a few
    // lines, or they would find no place. `has_next`: keys of a next span are known, of which only these and what `add`
    // asks for come in time. Addresses are known of whole sixteens (`distance`), perhaps not of the last share.
    void ask(const Sixteens &values, int64_t first, int r, bool has_next) const {
        if (how == Asks::all) return ask_all(values, first / EACH, AHEAD + r * OF_ROW, OF_ROW);
        if (!has_next || r || how == Asks::places) return;
        const int64_t share = (how == Asks::far ? FAR : AHEAD) / (SPAN / BLOCK), behind = first / BLOCK * share;
        if (behind < of_values.sixteens * values.bytes) ask_all(values, values.count, behind, share);
    }

    // What sixteen n of a block asks for; at: the block's `count`, then those behind it. Where nothing is known of
    // these, lines of its own, which are near.
    template <typename By>
    static REGARD_INLINE Later<By> later_of(const char *const *at, int count, int n, const Distance &ahead,
                                            int64_t bytes) {
        if constexpr (!By::places) return {at[n + ahead.sixteens] + ahead.bytes, 0};
        const char *const next = at[count] == at[count - 1] ? at[0] : at[count];
        return {next + n * (bytes / PLACES), bytes * OF_BLOCK / PLACES};
    }
    template <typename By>
    static REGARD_INLINE Later<By> later_of(const char *const *at, int n, const Distance &ahead, int64_t bytes) {
        return later_of<By>(at, OF_BLOCK, n, ahead, bytes);
    }

    // work(Way) for how lines are asked for, and for how many rows.
    template <typename Work>
    REGARD_INLINE void by_asks(Work work) const {
        if (how == Asks::all) work(Way<0, Asks::all>{});
        else if (how == Asks::far) work(Way<0, Asks::far>{});
        else if (how == Asks::places) work(Way<0, Asks::places>{});
        else work(Way<0, Asks::keys>{});
    }
    template <typename Work>
    REGARD_INLINE void by_rows(int rows, Work work) const {
        by_asks([&](auto way) {
            constexpr Asks asks = decltype(way)::asks;
            if (rows == 1) work(Way<1, asks>{});
            else if (rows == 2) work(Way<2, asks>{});
            else if (rows == 3) work(Way<3, asks>{});
            else if (rows == 4 || VECTOR_BYTES != 32) work(Way<4, asks>{});
            else work(Way<4, asks, VECTOR_BYTES == 32>{});
        });
    }

  private:
    static Asks of_type() { return K::pairs ? streams().pairs : streams().floats; }

    // Whole sixteens where these are apart: behind one is what nobody reads.
    Distance distance(int64_t dim) const {
        if (how == Asks::places) return {OF_BLOCK, 0};
        const int64_t bytes = how == Asks::far ? FAR : AHEAD, each = EACH * dim * int64_t(sizeof(S));
        if (bytes >= Sixteens::AFTER * each) return {Sixteens::AFTER, 0};
        if (!in_one) return {int(most(bytes / each, int64_t(1))), 0};
        return {int(bytes / each), bytes % each};
    }

    // `bytes` from a distance behind the n-th sixteen on.
    static void ask_all(const Sixteens &of, int64_t n, int64_t behind, int64_t bytes) {
        n += behind / of.bytes;
        const char *const from = of.at[n] + behind % of.bytes;
        for (int64_t i = 0; i < bytes; i += Lines::LINE) __builtin_prefetch(from + i, 0, 2);
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
