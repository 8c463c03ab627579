// From raw products to scores: scale, softcap, biases, mask. One definition for all kernels.
#pragma once

#include "dropout.h"
#include "source.h"

namespace regard {
namespace REGARD_ISA {

// Which lanes of a block are computed: tokens low to high of the block by vectors first to last.
struct Piece {
    int low, high, first, last;
};

REGARD_INLINE int rows_of(const Piece *pieces, int n) {
    int rows = 0;
    for (int i = 0; i < n; ++i) rows += pieces[i].high - pieces[i].low;
    return rows;
}

// The parameters of a call that scores need. A score is the product itself if nothing but a scale above 0
// is to be done, and multiplied by `unit` where it is used; else it is made whole, and `unit` is 1.
// A scale that is 0 as T is 0; a softcap that is infinite as T caps nothing.
template <typename T>
struct Scoring {
    using V = typename Vec<T>::type;
    bool whole;
    bool capped;
    T scale, cap, unit;

    explicit Scoring(const regard_call &c)
        : whole(c.softcap != 0 || c.distance || c.bias || !(T(c.scale) > 0)),
          capped(c.softcap != 0 && T(c.softcap) < T(__builtin_inf())),
          scale(T(c.scale)),
          cap(T(c.softcap)),
          unit(whole ? T(1) : T(c.scale)) {}

    // A whole score from a product and what is added to it.
    template <Precision how = Precision::wide>
    REGARD_INLINE V shaped(V product, V added) const {
        if (capped) return scaled_tanh<how>(product * broadcast(T(scale / cap)), cap, added);
        return fma(product, broadcast(scale), added);
    }
};

// A number of a tensor of any type.
template <typename T>
T any_number(const void *data, int64_t dtype, int64_t at) {
    switch (dtype) {
        case REGARD_F64:
            return T(static_cast<const double *>(data)[at]);
        case REGARD_F32:
            return T(static_cast<const float *>(data)[at]);
        case REGARD_BF16:
            return T(widen(static_cast<const bf16 *>(data)[at]));
        default:
            return T(widen(static_cast<const f16 *>(data)[at]));
    }
}

// Adjacent numbers of such a tensor.
template <typename T>
REGARD_INLINE typename Vec<T>::type any_vector(const void *data, int64_t dtype, int64_t at) {
    if (dtype == (sizeof(T) == 4 ? REGARD_F32 : REGARD_F64)) return load(static_cast<const T *>(data) + at);
    if constexpr (sizeof(T) == 4) {
        if (dtype == REGARD_BF16) return load_wide(static_cast<const bf16 *>(data) + at);
        if (dtype == REGARD_F16) return load_wide(static_cast<const f16 *>(data) + at);
    }
    typename Vec<T>::type x{};
    for (int i = 0; i < Vec<T>::lanes; ++i) x[i] = any_number<T>(data, dtype, at + i);
    return x;
}

// The bias of a block, lanes are queries: out[key][lane], both kinds added.
template <typename T>
void bias_by_query(const regard_call &c, const Lanes &lanes, int64_t first, int count, T *out) {
    const int64_t bias_batch = lanes.batch * c.bias_batch;
    const auto at = [&](int lane) {
        return bias_batch + lanes.head_of(lane) * c.bias_head + lanes.query_of(lane) * c.bias_row;
    };
    constexpr bool single = sizeof(T) == 4;
    if (!c.bias) {
        for (int64_t i = 0; i < int64_t(count) * LANES; ++i) out[i] = 0;
    } else if (c.bias_key == 1 && c.bias_dtype == (single ? REGARD_F32 : REGARD_F64)) {
        gather_lanes<T, T>([&](int lane) { return static_cast<const T *>(c.bias) + at(lane) + first; }, lanes.count,
                           count, out);
    } else if (single && c.bias_key == 1 && c.bias_dtype == REGARD_BF16) {
        if constexpr (single)
            gather_lanes<T, bf16>([&](int lane) { return static_cast<const bf16 *>(c.bias) + at(lane) + first; },
                                  lanes.count, count, out);
    } else if (single && c.bias_key == 1 && c.bias_dtype == REGARD_F16) {
        if constexpr (single)
            gather_lanes<T, f16>([&](int lane) { return static_cast<const f16 *>(c.bias) + at(lane) + first; },
                                 lanes.count, count, out);
    } else {
        for (int lane = 0; lane < lanes.count; ++lane)
            for (int j = 0; j < count; ++j)
                out[j * LANES + lane] = any_number<T>(c.bias, c.bias_dtype, at(lane) + (first + j) * c.bias_key);
    }
    if (!c.distance) return;
    const T *distance = static_cast<const T *>(c.distance);
    for (int lane = 0; lane < lanes.count; ++lane) {
        const T *from = distance + lanes.head_of(lane) * c.distance_head + c.keys - 1 + lanes.query_of(lane);
        for (int j = 0; j < count; ++j) out[j * LANES + lane] += from[-(first + j)];
    }
}

// The mask of a block whose lanes are queries: bits[token] for partial halves. Lanes of several heads repeat its low
// bits.
struct Bits128 {
    uint64_t of[BLOCK];
};
REGARD_INLINE void lane_bits(const Block &block, const Lanes &lanes, Bits128 &bits) {
    for (int i = 0; i < 2; ++i) {
        const uint64_t *from = block.half[i].bits;
        if (!from) continue;
        if (lanes.one_head()) {
            for (int j = 0; j < TILE; ++j) bits.of[i * TILE + j] = from[j];
            continue;
        }
        uint64_t copies = 0;  // a one where each head's lanes begin
        for (int64_t at = 0; at < lanes.count; at += lanes.per_head) copies |= uint64_t(1) << at;
        const uint64_t own = (uint64_t(1) << lanes.per_head) - 1;
        for (int j = 0; j < TILE; ++j) bits.of[i * TILE + j] = (from[j] & own) * copies;
    }
}

// Bit `lane` of `count` tokens, and of those after them that fill a vector.
REGARD_INLINE uint64_t row_bits(const uint64_t *of, int lane, int count) {
    uint64_t kept = 0;
    int i = 0;
#if defined(__AVX512F__)
    const __m512i bit = _mm512_set1_epi64(int64_t(uint64_t(1) << lane));
    for (; i < count; i += 8) kept |= uint64_t(_mm512_test_epi64_mask(_mm512_loadu_si512(of + i), bit)) << i;
#elif defined(__AVX2__)
    const __m128i to_sign = _mm_cvtsi32_si128(63 - lane);
    for (; i < count; i += 4) {
        const __m256i some = _mm256_sll_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(of + i)), to_sign);
        kept |= uint64_t(_mm256_movemask_pd(_mm256_castsi256_pd(some))) << i;
    }
#endif
    for (; i < count; ++i) kept |= (of[i] >> lane & 1) << i;
    return kept;
}

// The pieces of a block with something to compute, `tokens` of which exist; at most 8. W: lanes of a vector; G: tokens
// that are computed together.
template <int W, int G = 16>
REGARD_INLINE int cut(const Block &block, const Bits128 &bits, int tokens, int lanes, Piece *pieces) {
    const int vectors = (lanes + W - 1) / W;
    const uint64_t real = lanes == LANES ? ~uint64_t(0) : (uint64_t(1) << lanes) - 1;
    int n = 0;
    const auto put = [&](Piece p) {
        if (n && pieces[n - 1].high == p.low && pieces[n - 1].first == p.first && pieces[n - 1].last == p.last)
            pieces[n - 1].high = p.high;
        else pieces[n++] = p;
    };
    for (int i = 0; i < 2; ++i) {
        const int low = i * int(TILE), high = tokens < low + TILE ? tokens : low + int(TILE);
        if (!block.half[i].listed || low >= high) continue;
        if (!block.half[i].bits) {
            put({low, high, 0, vectors});
            continue;
        }
        for (int g = low; g < high; g += G) {
            const int end = g + G < high ? g + G : high;
            uint64_t some = 0;
            for (int j = g; j < end; ++j) some |= bits.of[j];
            some &= real;
            if (some) put({g, end, __builtin_ctzll(some) / W, (63 - __builtin_clzll(some)) / W + 1});
        }
    }
    return n;
}

}  // namespace REGARD_ISA
}  // namespace regard
