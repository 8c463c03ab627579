// The inner loops: products of a few rows with 64 lanes, in registers.
//
// A tile has 64 lanes (queries), in vectors side by side. Of the other operand single elements are read in place
// and broadcast. Both products of attention have this form:
//
//     scores   out[r] =  sum_i  rows[r][i] * lanes[i]     r: keys, i: dims     across: i runs along a row
//     mixing   out[r] += sum_i  rows[i][r] * lanes[i]     r: dims, i: keys     down: i runs down a column
//
// In each lane a sum is one chain of multiply-adds in the order of i (with AMX two, by 32: chains.h), whatever the
// other lanes do and however the rows are grouped: a row's bits are its own. Blocking: R rows by N vectors are in
// registers, 6 x 4 of 32, 6 x 2 or 3 x 4 of 16. Steps of 512-bit products are written out two at a time:
// native/MEASUREMENTS.md.
#pragma once

#include <type_traits>

#include "chains.h"
#include "exp.h"
#include "float16.h"
#include "transpose.h"

namespace regard {
namespace REGARD_ISA {

constexpr int LANES = 64;

// A product: what is broadcast (Unit), how many elements of a row that is (pair), what a multiply-add is.
template <typename T>
struct Fused {
    using Wide = T;
    using Unit = T;
    struct Mode {};  // of the processor, while few rows are multiplied
    static constexpr bool tiled = false, chained = false;
    static constexpr int pair = 1;
    static constexpr Precision precision = Precision::wide;
    using Vector = typename Vec<T>::type;
    static REGARD_INLINE Vector repeat(const char *p) {
        T x;
        memcpy(&x, p, sizeof x);
        return broadcast(x);
    }
    static REGARD_INLINE Vector madd(Vector a, Vector b, Vector c) { return fma(a, b, c); }
};
#if defined(REGARD_PAIRS)
struct Pairs {
    static constexpr bool tiled = false, chained = false;
    struct Mode {};
    using Wide = float;
    using Unit = uint32_t;
    static constexpr int pair = 2;
    static constexpr Precision precision = Precision::rough;
    using Vector = U;
    static REGARD_INLINE U repeat(const char *p) {
        uint32_t x;
        memcpy(&x, p, sizeof x);
        return broadcast_pair(x);
    }
    static REGARD_INLINE F madd(U a, U b, F c) { return dot_pairs(a, b, c); }
};
using ProductOfBf16 = Pairs;
#else
using ProductOfBf16 = Fused<float>;
#endif
#if defined(REGARD_TILES)
// The sums of tiles by vectors, for few rows: chains.h.
struct Chained : Fused<float> {
    using Mode = Flushing;
    static constexpr bool chained = true;
    static constexpr Precision precision = Precision::rough;
};
struct Tiled : Pairs {  // in tiles of 16 x 16 sums: amx.h
    static constexpr bool tiled = true;
};
#endif

enum class Along { across, down };
// What sums start from, and whether the largest of each lane is noted besides.
// `added`: sums start from zero and are added to out, which rounds them less often where many products add to one sum.
// `score`: they start from zero and are made whole scores at the end.
enum class Start { zero, out, added, score };

// What makes a product a whole score: product * scale + from[lane], `from` moving on by `row` elements from row to row.
template <typename T>
struct Adds {
    const T *from;
    int64_t row;
    T scale;

    REGARD_INLINE Adds at(int64_t r) const { return {from + r * row, row, scale}; }
};

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int VECTORS = 4;
constexpr int rows_at_once(int vectors) { return vectors == 4 ? 6 : vectors == 3 ? 8 : vectors == 2 ? 12 : 16; }
#elif defined(__AVX2__)  // 114 of some 118 GFLOP/s on Zen 4, and no more by 3 x 4
constexpr int VECTORS = 2;
constexpr int rows_at_once(int) { return 6; }
#else  // SSE2 products overwrite an operand: 3 x 4 copies and broadcasts less than 6 x 2, 41.7 GFLOP/s for 38.1 (Zen 4)
constexpr int VECTORS = 4;
constexpr int rows_at_once(int vectors) { return vectors == 4 ? 3 : vectors == 3 ? 4 : 6; }
#endif

// Rows of memory that will be needed, asked for line by line between products: a few lines each eight steps. All at
// once, they would occupy every line buffer of a core (10 to 24), and products would wait, or lines be dropped.
class Ahead {
  public:
    struct Part {
        const char *row;
        int64_t stride, bytes, rows;
    };

    void add(const Part &part) {
        if (part.rows <= 0 || part.bytes <= 0) return;
        Part &p = parts_[count_++] = part;
        if (p.stride == p.bytes) p.bytes *= p.rows, p.rows = 1;
        lines_ += p.rows * ((p.bytes + 63) / 64);
    }

    // Sets the pace: all lines within the product of `rows` rows by `vectors` vectors in `steps` steps.
    void start(int64_t rows, int64_t steps, int vectors) {
        const int64_t passes = (vectors + VECTORS - 1) / VECTORS;
        const int64_t at_once = rows_at_once(vectors < VECTORS ? vectors : VECTORS);
        share((rows + at_once - 1) / at_once * ((steps + 7) / 8) * passes);
    }

    // The same by the number of times that lines are asked for.
    void share(int64_t stops) { pace_ = stops ? (lines_ + stops - 1) / stops : 0; }

    // Into the first cache, or the second. The end of a row is no branch, and rows without gaps are one (`add`): rows
    // are short, and on Zen 5 mispredictions took a tenth of the product.
    template <bool first = true>
    REGARD_INLINE void ask() {
        for (int64_t n = pace_; n > 0 && next_ < count_;) {
            Part p = parts_[next_];
            int64_t at = at_;
            do {
                __builtin_prefetch(p.row + at, 0, first ? 3 : 2);
                const int64_t end = -int64_t((at += 64) >= p.bytes);
                at &= ~end, p.row += p.stride & end, p.rows += end;
            } while (--n > 0 && p.rows);
            parts_[next_].row = p.row, parts_[next_].rows = p.rows, at_ = at;
            if (!p.rows) ++next_;
        }
    }

  private:
    Part parts_[8];  // of two tiles: keys, values; of each its bias, its output, the next one's queries
    int64_t count_ = 0, next_ = 0, at_ = 0, lines_ = 0, pace_ = 0;
};

template <typename P, Along along, Start start, int R, int N>
REGARD_INLINE void product(const char *rows, int64_t stride, const typename P::Unit *lanes, int64_t steps,
                           typename P::Wide *out, typename P::Wide *top, const Adds<typename P::Wide> &adds,
                           Ahead *ahead) {
    using Wide = typename P::Wide;
    using V = typename Vec<Wide>::type;
    constexpr int W = Vec<Wide>::lanes, size = int(sizeof(typename P::Unit));
    const int64_t row = along == Along::across ? stride : size, step = along == Along::across ? size : stride;
    V sum[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] = start == Start::out ? load(out + r * LANES + n * W) : V{};
    const auto add_step = [&](int64_t i) __attribute__((always_inline)) {
        typename P::Vector lane[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) lane[n] = load(lanes + i * LANES + n * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const typename P::Vector one = P::repeat(rows + r * row + i * step);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sum[r][n] = P::madd(one, lane[n], sum[r][n]);
        }
    };
    constexpr bool asks = along == Along::across || start == Start::zero || start == Start::added;
    for (int64_t i = 0, until = steps; i < steps;) {
        if (asks && ahead) ahead->ask(), until = i + 8 < steps ? i + 8 : steps;
        if constexpr (P::pair == 1 && VECTOR_BYTES == 64)
            for (; i + 2 <= until; i += 2) add_step(i), add_step(i + 1);
        for (; i < until; ++i) add_step(i);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            if (start == Start::added) sum[r][n] += load(out + r * LANES + n * W);
            if (start == Start::score)
                sum[r][n] = fma(sum[r][n], broadcast(adds.scale), load(adds.from + r * adds.row + n * W));
            store(out + r * LANES + n * W, sum[r][n]);
        }
    if (!top) return;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 16
        for (int r = 1; r < R; ++r) sum[0][n] = larger(sum[r][n], sum[0][n]);
        store(top + n * W, larger(sum[0][n], load(top + n * W)));
    }
}

// `count` rows by N vectors.
template <typename P, Along along, Start start, int N>
__attribute__((noinline)) void panel(const char *rows, int64_t stride, int64_t count, const typename P::Unit *lanes,
                                     int64_t steps, typename P::Wide *out, typename P::Wide *top,
                                     const Adds<typename P::Wide> &adds, Ahead *ahead) {
    constexpr int R = rows_at_once(N);
    const int64_t row = along == Along::across ? stride : int(sizeof(typename P::Unit));
    int64_t r = 0;
    for (; r + R <= count; r += R) {
        product<P, along, start, R, N>(rows + r * row, stride, lanes, steps, out + r * LANES, top, adds.at(r), ahead);
    }
    if constexpr (R > 8)
        if (r + 8 <= count)
            product<P, along, start, 8, N>(rows + r * row, stride, lanes, steps, out + r * LANES, top, adds.at(r),
                                           ahead),
                r += 8;
    if constexpr (R > 4)
        if (r + 4 <= count)
            product<P, along, start, 4, N>(rows + r * row, stride, lanes, steps, out + r * LANES, top, adds.at(r),
                                           ahead),
                r += 4;
    if (r + 2 <= count)
        product<P, along, start, 2, N>(rows + r * row, stride, lanes, steps, out + r * LANES, top, adds.at(r), ahead),
            r += 2;
    if (r < count)
        product<P, along, start, 1, N>(rows + r * row, stride, lanes, steps, out + r * LANES, top, adds.at(r), ahead);
}

// out[r][vectors first to last] for `count` rows. `stride` is in bytes, from row to row of memory. `top`, if there is
// one, is raised to the largest of each lane.
template <typename P, Along along, Start start = along == Along::across ? Start::zero : Start::out>
REGARD_INLINE void multiply(const char *rows, int64_t stride, int64_t count, const typename P::Unit *lanes,
                            int64_t steps, typename P::Wide *out, int first, int last, typename P::Wide *top = nullptr,
                            Adds<typename P::Wide> adds = {}, Ahead *ahead = nullptr) {
    constexpr int W = Vec<typename P::Wide>::lanes;
    for (int v = first; v < last; v += VECTORS) {
        const typename P::Unit *l = lanes + v * W;
        typename P::Wide *o = out + v * W, *t = top ? top + v * W : nullptr;
        const Adds<typename P::Wide> a{adds.from + v * W, adds.row, adds.scale};
        const int left = last - v;
        if constexpr (VECTORS == 4) {
            if (left >= 4) panel<P, along, start, 4>(rows, stride, count, l, steps, o, t, a, ahead);
            else if (left == 3) panel<P, along, start, 3>(rows, stride, count, l, steps, o, t, a, ahead);
            else if (left == 2) panel<P, along, start, 2>(rows, stride, count, l, steps, o, t, a, ahead);
            else panel<P, along, start, 1>(rows, stride, count, l, steps, o, t, a, ahead);
        } else {
            if (left >= 2) panel<P, along, start, 2>(rows, stride, count, l, steps, o, t, a, ahead);
            else panel<P, along, start, 1>(rows, stride, count, l, steps, o, t, a, ahead);
        }
    }
}

REGARD_INLINE F load_units(const float *p) { return load(p); }
REGARD_INLINE D load_units(const double *p) { return load(p); }
REGARD_INLINE U load_units(const uint32_t *p) {  // pairs of a row of bf16, which begins at any of them
    U x;
    memcpy(&x, p, sizeof x);
    return x;
}
REGARD_INLINE F load_units(const bf16 *p) { return load_wide(p); }
REGARD_INLINE F load_units(const f16 *p) { return load_wide(p); }
REGARD_INLINE uint32_t unit(const uint32_t *p) {
    uint32_t x;
    memcpy(&x, p, 4);
    return x;
}
template <typename S>
REGARD_INLINE auto unit(const S *p) -> decltype(widen(*p)) {
    return widen(*p);
}

// Of rows of bf16, what is transposed as pairs: out[i][lane] and out[i + 1][lane] from one word. The number of units
// done.
template <typename RowAt>
REGARD_INLINE int64_t gather_pairs(RowAt row_at, int lane, int some, int64_t units, float *out) {
    constexpr int W = Vec<uint32_t>::lanes;
    int64_t i = 0;
    for (; i + 2 * W <= units; i += 2 * W) {
        U block[W];
        for (int j = 0; j < W; ++j)
            block[j] = j < some ? load_units(reinterpret_cast<const uint32_t *>(row_at(lane + j) + i)) : U{};
        transpose<uint32_t>(block);
        for (int j = 0; j < W; ++j) {
            store(out + (i + 2 * j) * LANES + lane, F(block[j] << 16));
            store(out + (i + 2 * j + 1) * LANES + lane, F(block[j] & 0xffff0000u));
        }
    }
    return i;
}

// Rows of memory as lanes: out[i][lane] = unit i of row `lane`, for `units` units. Lanes from `count` on get 0.
// T is what a lane holds (4 or 8 bytes), Stored what memory holds.
template <typename T, typename Stored, typename RowAt>
REGARD_INLINE void gather_lanes(RowAt row_at, int count, int64_t units, T *out) {
    constexpr int W = Vec<T>::lanes;
    for (int lane = 0; lane < count; lane += W) {
        const int some = count - lane < W ? count - lane : W;
        int64_t i = 0;
        if constexpr (sizeof(T) == 4 && std::is_same<Stored, bf16>::value)
            i = gather_pairs(row_at, lane, some, units, out);
        for (; i + W <= units; i += W) {
            typename Vec<T>::type block[W];
            for (int j = 0; j < W; ++j)
                block[j] = j < some ? load_units(reinterpret_cast<const Stored *>(row_at(lane + j)) + i)
                                    : typename Vec<T>::type{};
            transpose<T>(block);
            for (int j = 0; j < W; ++j) store(out + (i + j) * LANES + lane, block[j]);
        }
        for (; i < units; ++i)
            for (int j = 0; j < W; ++j)
                out[i * LANES + lane + j] =
                    j < some ? unit(reinterpret_cast<const Stored *>(row_at(lane + j)) + i) : T(0);
    }
}
// Lanes back as rows of memory: row `lane` gets in(i, lane) for i below `units`, as Stored; a vector of lanes from it
// on.
template <typename T, typename Stored, typename RowAt, typename In>
REGARD_INLINE void scatter_lanes(RowAt row_at, int count, int64_t units, In in) {
    constexpr int W = Vec<T>::lanes;
    for (int lane = 0; lane < count; lane += W) {
        const int some = count - lane < W ? count - lane : W;
        int64_t i = 0;
        for (; i + W <= units; i += W) {
            typename Vec<T>::type block[W];
            for (int j = 0; j < W; ++j) block[j] = in(i + j, lane);
            transpose<T>(block);
            for (int j = 0; j < some; ++j) store_narrow(reinterpret_cast<Stored *>(row_at(lane + j)) + i, block[j]);
        }
        for (; i < units; ++i) {
            Stored all[W];  // by a vector as well: bf16 below the normal ones become 0 there
            store_narrow(all, in(i, lane));
            for (int j = 0; j < some; ++j) reinterpret_cast<Stored *>(row_at(lane + j))[i] = all[j];
        }
    }
}
#if defined(REGARD_PAIRS)
// The same of an even number of floats, as bf16: a pair is transposed as one word, so half as much is.
template <typename RowAt, typename In>
REGARD_INLINE void scatter_pairs(RowAt row_at, int count, int64_t units, In in) {
    for (int lane = 0; lane < count; lane += 16)
        for (int64_t i = 0; i < units; i += 32) {
            const int pairs = int(units - i < 32 ? units - i : 32) / 2;
            U block[16];
            for (int j = 0; j < 16; ++j)
                block[j] = j < pairs ? pack_pairs(in(i + 2 * j, lane), in(i + 2 * j + 1, lane)) : U{};
            transpose<uint32_t>(block);
            const __mmask16 all = __mmask16((1 << pairs) - 1);
            for (int j = 0; j < 16 && lane + j < count; ++j)
                _mm512_mask_storeu_epi32(row_at(lane + j) + i, all, (__m512i)block[j]);
        }
}
#endif

template <typename T>
REGARD_INLINE bool any(IntVec<T> m) {
#if defined(__AVX512F__)
    return _mm512_test_epi64_mask((__m512i)m, (__m512i)m) != 0;
#else
    typename Bits<T>::type all = 0;
    for (int i = 0; i < Vec<T>::lanes; ++i) all |= m[i];
    return all != 0;
#endif
}

}  // namespace REGARD_ISA
}  // namespace regard
