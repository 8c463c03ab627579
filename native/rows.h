// Rows of memory (keys, values; queries in the backward pass) as the inner loops want them.
#pragma once

#include "amx.h"
#include "parts.h"
#include "tile.h"
#include "walk.h"

namespace regard {
namespace REGARD_ISA {

constexpr int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A type of tensor and the product that computes it.
template <typename S, typename P>
struct Kind {
    using Stored = S;
    using Product = P;
    using Wide = typename P::Wide;
    using Unit = typename P::Unit;
    using V = typename Vec<Wide>::type;
    static constexpr int W = Vec<Wide>::lanes;
    static constexpr bool pairs = P::pair == 2;
    static constexpr bool tiled = P::tiled, chained = P::chained;
    static constexpr bool by_32 = tiled || chained;  // sums go by 32 products
#if defined(REGARD_INTEGERS)
    static constexpr bool integers = is_same<S, bf16> && !by_32;  // few rows meet codes so (fixed.h)
#else
    static constexpr bool integers = false;
#endif
    static constexpr bool in_place = sizeof(S) == sizeof(Wide);  // no conversion, no pairing
    static constexpr int64_t form = is_same<S, double>  ? REGARD_F64
                                    : is_same<S, float> ? REGARD_F32
                                    : is_same<S, bf16>  ? REGARD_BF16
                                                        : REGARD_F16;
};

// work(Kind) for the type of a call; Bf16: its product of bf16.
template <typename Result, typename Bf16, typename Work>
REGARD_INLINE Result by_kind(int64_t dtype, Work work) {
    switch (dtype) {
        case REGARD_F64:
            return work(Kind<double, Fused<double>>{});
        case REGARD_F32:
            return work(Kind<float, Fused<float>>{});
        case REGARD_F16:
            return work(Kind<f16, Fused<float>>{});
        default:
            return work(Kind<bf16, Bf16>{});
    }
}

// Rows that are read element by element: the address of the first, and bytes from one to the next.
struct Rows {
    const char *data;
    int64_t stride;
};

#if defined(REGARD_PAIRS)
// 32 elements of two rows of bf16, interleaved as pairs.
REGARD_INLINE void pair_words(__m512i even, __m512i odd, U &first, U &second) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    first = (U)_mm512_permutex2var_epi16(even, low, odd);
    second = (U)_mm512_permutex2var_epi16(even, high, odd);
}
REGARD_INLINE void pair_dims(const bf16 *even, const bf16 *odd, U &first, U &second) {
    pair_words(_mm512_loadu_si512(even), _mm512_loadu_si512(odd), first, second);
}
#endif

// Two rows of bf16 side by side, as pairs; a null `odd` is 0.
REGARD_INLINE void pair_rows(const bf16 *even, const bf16 *odd, int64_t dim, uint32_t *out) {
    int64_t i = 0;
#if defined(REGARD_PAIRS)
    for (; i + 32 <= dim; i += 32) {
        U first, second;
        pair_words(_mm512_loadu_si512(even + i), odd ? _mm512_loadu_si512(odd + i) : __m512i{}, first, second);
        store(out + i, first);
        store(out + i + 16, second);
    }
#endif
    for (; i < dim; ++i) out[i] = uint32_t(even[i].bits) | (odd ? uint32_t(odd[i].bits) << 16 : 0u);
}

// Whether some number of n pairs is NaN or infinite.
REGARD_INLINE bool wild_pairs(const uint32_t *pairs, int64_t n) {
    constexpr int W = Vec<uint32_t>::lanes;
    IntVec<uint32_t> wild{};
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const U x = load(pairs + i);
        wild |= ((x & 0x7f80u) == 0x7f80u) | ((x & 0x7f800000u) == 0x7f800000u);
    }
    for (; i < n; ++i) wild[0] |= (pairs[i] & 0x7f80) == 0x7f80 || (pairs[i] & 0x7f800000) == 0x7f800000;
    return any<uint32_t>(wild);
}

// Numbers that are not finite made 0.
inline void tame_pairs(uint32_t *pairs, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        if ((pairs[i] & 0x7f80) == 0x7f80) pairs[i] &= 0xffff0000;
        if ((pairs[i] & 0x7f800000) == 0x7f800000) pairs[i] &= 0xffff;
    }
}

// The tokens of one head of one batch row, from token `begin` on, with one stride.
template <typename K>
struct Tokens {
    const typename K::Stored *data;
    int64_t stride;  // elements
    int64_t dim;
    int64_t begin = 0;

    Tokens() = default;
    Tokens(const regard_tensor &t, int64_t b, int64_t h, int64_t d)
        : data(static_cast<const typename K::Stored *>(t.data) + b * t.batch + h * t.head), stride(t.token), dim(d) {}
    Tokens(const typename K::Stored *rows, int64_t step, int64_t d, int64_t first)
        : data(rows), stride(step), dim(d), begin(first) {}

    const typename K::Stored *at(int64_t token) const { return data + (token - begin) * stride; }

    // Of a row across; whole tiles where products are tiled.
    static int64_t units(int64_t dim) {
        const int64_t n = (dim + K::Product::pair - 1) / K::Product::pair;
        return K::tiled ? up(n, 16) : n;
    }
    // What `across` may need: wide rows, or pairs with zeros beyond a dim that ends within a unit.
    static int64_t across_bytes(int64_t dim, int64_t tokens) {
        if constexpr (K::in_place) return 0;
        return up(tokens * units(dim) * int64_t(sizeof(typename K::Unit)), 64);
    }
    // Down: tokens of a unit, and what one takes.
    static constexpr int together = K::tiled ? 32 : K::Product::pair;
    static int64_t unit_bytes(int64_t dim) {
        return (K::tiled ? up(dim, 16) * 16 : dim) * int64_t(sizeof(typename K::Unit));
    }
    static int64_t down_bytes(int64_t dim, int64_t tokens) {
        if constexpr (K::in_place) return 0;
        return up((tokens + together - 1) / together * unit_bytes(dim), 64);
    }

    // Tokens first to first + count, to be read across: units along the dim.
    Rows across(int64_t first, int64_t count, char *scratch) const {
        if constexpr (K::in_place) {
            return {reinterpret_cast<const char *>(at(first)), stride * int64_t(sizeof(typename K::Stored))};
        } else if constexpr (K::pairs) {
            const int64_t n = units(dim);
            if (dim == 2 * n) return {reinterpret_cast<const char *>(at(first)), stride * 2};
            for (int64_t j = 0; j < count; ++j) {
                char *row = scratch + j * n * 4;
                memcpy(row, at(first + j), size_t(dim) * 2);
                memset(row + dim * 2, 0, size_t(n * 4 - dim * 2));
            }
            return {scratch, n * 4};
        } else {
            return widened(first, count, scratch);
        }
    }

    // The same, to be read down: units along the tokens. `first` is even, a multiple of 32 where products are tiled:
    // then tokens are transposed, 32 at a time. A unit beyond the last token has zeros.
    Rows down(int64_t first, int64_t count, char *scratch, [[maybe_unused]] Ahead *ahead = nullptr) const {
        if constexpr (K::in_place) {
            return {reinterpret_cast<const char *>(at(first)), stride * int64_t(sizeof(typename K::Stored))};
#if defined(REGARD_TILES)
        } else if constexpr (K::tiled) {
            const int64_t step = turned_bytes(dim);
            for (int64_t j = 0; j < count; j += TURNED)
                turn(reinterpret_cast<const char *>(at(first + j)), stride * 2, count - j < TURNED ? count - j : TURNED,
                     dim, scratch + j / TURNED * step, ahead);
            return {scratch, step};
#endif
        } else if constexpr (K::pairs) {
            return paired(first, count, scratch);
        } else {
            return widened(first, count, scratch);
        }
    }

    // Whether some number of these tokens is NaN or infinite.
    bool wild(int64_t first, int64_t count) const {
        typename K::V all[4]{};  // four sums, so that none waits for the one before
        typename K::Wide rest = 0;
        for (int64_t j = 0; j < count; ++j) {
            const typename K::Stored *row = at(first + j);
            int64_t i = 0;
            for (; i + 4 * K::W <= dim; i += 4 * K::W)
#pragma GCC unroll 4
                for (int n = 0; n < 4; ++n) all[n] = fma(load_wide(row + i + n * K::W), typename K::V{}, all[n]);
            for (; i + K::W <= dim; i += K::W) all[0] = fma(load_wide(row + i), typename K::V{}, all[0]);
            for (; i < dim; ++i) rest += widen(row[i]) * 0;
        }
        for (int i = 0; i < K::W; ++i) rest += all[0][i] + all[1][i] + all[2][i] + all[3][i];
        return rest != rest;
    }

  private:
    Rows widened(int64_t first, int64_t count, char *scratch) const {
        using Wide = typename K::Wide;
        for (int64_t j = 0; j < count; ++j) {
            Wide *row = reinterpret_cast<Wide *>(scratch) + j * dim;
            const typename K::Stored *from = at(first + j);
            int64_t i = 0;
            for (; i + K::W <= dim; i += K::W) store(row + i, load_wide(from + i));
            for (; i < dim; ++i) row[i] = widen(from[i]);
        }
        return {scratch, dim * int64_t(sizeof(Wide))};
    }

    Rows paired(int64_t first, int64_t count, char *scratch) const {
        for (int64_t j = 0; j < count; j += 2)
            pair_rows(at(first + j), j + 1 < count ? at(first + j + 1) : nullptr, dim,
                      reinterpret_cast<uint32_t *>(scratch) + j / 2 * dim);
        return {scratch, dim * 4};
    }
};

// The rows that share a tile of lanes: queries of one head, or, where they are few, of several heads of a group.
struct Lanes {
    int64_t batch, head, first;
    int64_t per_head;  // lane l is query first + l % per_head of head head + l / per_head
    int count;

    // a division takes as long as some 30 products, so where there is one head there is none
    int64_t head_of(int lane) const { return one_head() ? head : head + lane / per_head; }
    int64_t query_of(int lane) const { return first + (one_head() ? lane : lane % per_head); }
    bool one_head() const { return count <= per_head; }
    int vectors(int width) const { return (count + width - 1) / width; }
};

}  // namespace REGARD_ISA
}  // namespace regard
