// Attention for few queries (decoding): at most 16 rows that share a key head make one pass over its keys.
//
// Here lanes are keys for the scores, and dims for the output, so that no lane is idle: 16 keys are transposed in
// registers (4 shuffles for each vector of them), and then meet every row. Each sum is made in the order in which
// forward.h makes it, so a row gets the same bits from either: scores dim after dim, outputs key after key, weights in
// trees of 16, running sums rescaled at blocks and started anew at spans. Spans are what threads share: the split
// depends on positions alone.
//
// Bound by memory: a vector of keys or values costs 3 to 5 cycles of arithmetic for 4 rows, and 10 to arrive at 25
// GB/s. Every line is asked for once, 16 KiB ahead and in the order in which lines lie: 28 GB/s on one thread where 4
// KiB ahead gave 19, and a third more for a single row than in the order of the transposition.
#pragma once

#include "forward.h"

namespace regard {
namespace REGARD_ISA {

constexpr int FEW = 16;  // rows

// Bytes ahead of what is read that memory is asked for.
constexpr int64_t AHEAD = int64_t(16) << 10;

template <typename K>
struct Decode {
    using T = typename K::Wide;
    using V = typename K::V;
    using P = typename K::Product;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W;
    static constexpr T NEVER = -T(INFINITE);

    // What is kept of a span until all are merged: [rows][width] sums, then tops and totals.
    struct Part {
        T *out, *top, *total;
    };

    const regard_call &c;
    const Scoring<T> scoring;
    const T factor;
    const int64_t units, width;  // of a query; of an output row, whole vectors
    Unit *queries;               // [16][units]
    T *scores;                   // [16][128]
    Unit *weights;               // [16][128 / pair]

    static int64_t wide(const regard_call &c) { return up(c.v_dim, W); }
    static int64_t part_bytes(const regard_call &c) { return up(FEW * (wide(c) + 2) * int64_t(sizeof(T)), 64); }
    static int64_t bytes(const regard_call &c) {
        return up(FEW * Tokens<K>::units(c.qk_dim) * int64_t(sizeof(Unit)), 64) + 2 * FEW * BLOCK * int64_t(sizeof(T)) +
               part_bytes(c);
    }

    Decode(const regard_call &call, char *scratch)
        : c(call),
          scoring(call),
          factor(T(scoring.unit * LOG2E)),
          units(Tokens<K>::units(call.qk_dim)),
          width(wide(call)) {
        queries = reinterpret_cast<Unit *>(scratch);
        scratch += up(FEW * units * int64_t(sizeof(Unit)), 64);
        scores = reinterpret_cast<T *>(scratch);
        weights = reinterpret_cast<Unit *>(scores);
        if (K::pairs) weights = reinterpret_cast<Unit *>(scores + FEW * BLOCK);
    }

    static Part part(const regard_call &c, char *at) {
        T *out = reinterpret_cast<T *>(at);
        return {out, out + FEW * wide(c), out + FEW * (wide(c) + 1)};
    }

    // The sums of one span.
    regard_status run(const Lanes &lanes, int64_t row, int64_t span, const Part &into) {
        for (int r = 0; r < lanes.count; ++r) into.top[r] = NEVER, into.total[r] = 0;
        Walk walk(c.by_query, row, c.keys, span * SPAN);
        Block block;
        if (!walk.next((span + 1) * SPAN, block)) return walk.bad ? REGARD_BAD_SCHEDULE : REGARD_DONE;
        take_queries(lanes);
        memset(into.out, 0, size_t(lanes.count * width) * sizeof(T));
        const int64_t kv = lanes.head / (c.heads / c.kv_heads);
        const Tokens<K> k(c.k, lanes.batch, kv, c.qk_dim), v(c.v, lanes.batch, kv, c.v_dim);
        do step(block, lanes, k, v, into);
        while (walk.next((span + 1) * SPAN, block));
        return walk.bad ? REGARD_BAD_SCHEDULE : REGARD_DONE;
    }

    void take_queries(const Lanes &lanes) {
        const S *data = static_cast<const S *>(c.q.data) + lanes.batch * c.q.batch;
        for (int r = 0; r < lanes.count; ++r) {
            const S *from = data + lanes.head_of(r) * c.q.head + lanes.query_of(r) * c.q.token;
            Unit *to = queries + r * units;
            if constexpr (K::pairs) {
                to[units - (units > 0)] = 0;
                memcpy(to, from, size_t(c.qk_dim) * 2);
            } else {
                for (int64_t i = 0; i < c.qk_dim; ++i) to[i] = widen(from[i]);
            }
        }
    }

    void step(const Block &block, const Lanes &lanes, const Tokens<K> &k, const Tokens<K> &v, const Part &into) {
        const int tokens = int(c.keys - block.first < BLOCK ? c.keys - block.first : BLOCK);
        Bits128 bits;
        lane_bits(block, lanes, bits);
        Piece pieces[8];
        const int n = cut<LANES>(block, bits, tokens, lanes.count, pieces);  // whole rows: first and last do not matter
        for (int i = 0; i < n; ++i)
            for (int j = pieces[i].low; j < pieces[i].high; j += 16) {
                int r = 0;
                for (; r + 8 <= lanes.count; r += 8) score<8>(k, block.first + j, r, j);
                if (r + 4 <= lanes.count) score<4>(k, block.first + j, r, j), r += 4;
                if (r + 2 <= lanes.count) score<2>(k, block.first + j, r, j), r += 2;
                if (r < lanes.count) score<1>(k, block.first + j, r, j);
            }
        for (int r = 0; r < lanes.count; ++r) weigh(block, lanes, bits, pieces, n, r, into);
        bool wild = false;
        for (int i = 0; i < 2; ++i) {
            const int from = i * int(TILE), to = tokens < from + TILE ? tokens : from + int(TILE);
            if (block.half[i].bits && from < to) wild |= v.wild(block.first + from, to - from);
        }
        for (int i = 0; i < n; ++i) {
            const Piece &p = pieces[i];
            if (wild) mix_wild(block, bits, p, lanes, v, into);
            else  // 32 keys for all dims, so that lines are read nearly in order
                for (int j = p.low; j < p.high; j += 32)
                    mix_rows(block.first, {j, j + 32 < p.high ? j + 32 : p.high, 0, 0}, lanes.count, v, into);
        }
    }

    // Products of rows r to r + R with 16 keys from `token` on, to column j of the scores.
    template <int R>
    REGARD_INLINE void score(const Tokens<K> &k, int64_t token, int r, int j) {
        const int64_t last = c.keys - 1;
        const char *q = reinterpret_cast<const char *>(queries + r * units);
        const int64_t next = units * int64_t(sizeof(Unit)), rows = AHEAD / (c.qk_dim * int64_t(sizeof(S)) + 1) + 1;
        for (int g = 0; g < 16; g += W) {
            const S *row[W];
            for (int lane = 0; lane < W; ++lane) row[lane] = k.at(token + g + lane < last ? token + g + lane : last);
            const int64_t bytes = c.qk_dim * int64_t(sizeof(S));
            Ahead ahead{reinterpret_cast<const char *>(k.at(token + g + rows)), k.stride * int64_t(sizeof(S)), bytes};
            const int64_t lines =
                r == 0 && token + g + W + rows < last ? (W * ((bytes + 63) / 64) * W + units - 1) / units : 0;
            V sum[R];
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i) sum[i] = V{};
            int64_t u = 0;
            for (; u + W <= whole_units(); u += W) {
                typename Vec<Unit>::type block[W];
#pragma GCC unroll 16
                for (int lane = 0; lane < W; ++lane) {
                    block[lane] = load_units(stored(row[lane]) + u);
                }
                ahead.ask(lines);
                transpose<Unit>(block);
#pragma GCC unroll 16
                for (int i = 0; i < W; ++i)
#pragma GCC unroll 8
                    for (int s = 0; s < R; ++s)
                        sum[s] = P::madd(block[i], P::repeat(q + s * next + (u + i) * int64_t(sizeof(Unit))), sum[s]);
            }
            for (; u < units; ++u) {
                typename Vec<Unit>::type one{};
                for (int lane = 0; lane < W; ++lane) one[lane] = single_unit(row[lane], u);
                for (int s = 0; s < R; ++s)
                    sum[s] = P::madd(one, P::repeat(q + s * next + u * int64_t(sizeof(Unit))), sum[s]);
            }
#pragma GCC unroll 8
            for (int s = 0; s < R; ++s) store(scores + (r + s) * BLOCK + j + g, sum[s]);
        }
    }

    int64_t whole_units() const { return c.qk_dim / P::pair; }
    static REGARD_INLINE auto stored(const S *row) {
        if constexpr (K::pairs) return reinterpret_cast<const Unit *>(row);
        else return row;
    }
    REGARD_INLINE Unit single_unit(const S *row, int64_t u) const {
        if constexpr (K::pairs)
            return uint32_t(row[2 * u].bits) | (2 * u + 1 < c.qk_dim ? uint32_t(row[2 * u + 1].bits) << 16 : 0u);
        else return widen(row[u]);
    }

    // Row r: scores whole, the maximum, weights and their sum.
    void weigh(const Block &block, const Lanes &lanes, const Bits128 &bits, const Piece *pieces, int n, int r,
               const Part &into) {
        T *s = scores + r * BLOCK;
        V most = broadcast(NEVER);
        for (int i = 0; i < n; ++i)
            for (int j = pieces[i].low; j < pieces[i].high; j += W) {
                const int count = pieces[i].high - j < W ? pieces[i].high - j : W;
                V x = load(s + j);
                if (scoring.whole) x = scoring.shaped(x, added(lanes, r, block.first + j, count));
                const uint64_t kept = kept_bits(block, bits, r, j, count);
                if (kept != (W == 64 ? ~uint64_t(0) : (uint64_t(1) << W) - 1)) x = select(kept, x, broadcast(NEVER));
                store(s + j, x);
                most = larger(x, most);
            }
        T found = NEVER;
        for (int i = 0; i < W; ++i) found = most[i] > found ? most[i] : found;
        T now = into.top[r];
        if ((found - now) * factor > T(8)) rescale(r, found, now, into);
        const V shift = broadcast(now == NEVER ? T(0) : now);
        T total = into.total[r];
        for (int i = 0; i < n; ++i)
            for (int j = pieces[i].low; j < pieces[i].high; j += 16) total += sixteen(lanes, block.first, r, j, shift);
        into.total[r] = total;
    }

    // The bits of tokens j to j + count in lane r.
    static REGARD_INLINE uint64_t kept_bits(const Block &block, const Bits128 &bits, int r, int j, int count) {
        const uint64_t all = (uint64_t(1) << count) - 1;
        if (!block.half[j / TILE].bits) return all;
        uint64_t kept = 0;
        for (int i = 0; i < count; ++i) kept |= (bits.of[j + i] >> r & 1) << i;
        return kept;
    }

    // What is added to the scores of row r and keys from `token` on.
    V added(const Lanes &lanes, int r, int64_t token, int count) const {
        V sum{};
        const int64_t h = lanes.head_of(r), i = lanes.query_of(r);
        if (c.bias) {
            const int64_t at = lanes.batch * c.bias_batch + h * c.bias_head + i * c.bias_row + token * c.bias_key;
            if (count == W && c.bias_key == 1 && c.bias_dtype == (sizeof(T) == 4 ? REGARD_F32 : REGARD_F64))
                sum = load(static_cast<const T *>(c.bias) + at);
            else
                for (int j = 0; j < count; ++j) sum[j] = any_number<T>(c.bias, c.bias_dtype, at + j * c.bias_key);
        }
        if (!c.distance) return sum;
        const T *from = static_cast<const T *>(c.distance) + h * c.distance_head + c.keys - 1 + i - token;
        V far{};
        for (int j = 0; j < count; ++j) far[j] = from[-j];
        return c.bias ? sum + far : far;
    }

    void rescale(int r, T found, T &now, const Part &into) {
        const T alpha = exp2<P::precision>(broadcast(T((now - found) * factor)))[0];
        now = into.top[r] = found;
        into.total[r] *= alpha;
        for (int64_t d = 0; d < width; d += W) store(into.out + r * width + d, load(into.out + r * width + d) * alpha);
    }

    // Weights of 16 keys, and their sum as a tree of neighbours.
    REGARD_INLINE T sixteen(const Lanes &lanes, int64_t first, int r, int j, V shift) {
        T *s = scores + r * BLOCK + j;
        const bool drops = c.dropout > 0;
        alignas(64) T sum[16];
        for (int g = 0; g < 16; g += W) {
            V x = load(s + g);
            const int left = int(c.keys - first) - j - g;  // keys that there are
            if (left < W) x = select(left > 0 ? (uint64_t(1) << left) - 1 : 0, x, broadcast(NEVER));
            x = exp2<P::precision>((x - shift) * factor);
            store(sum + g, x);
            if constexpr (K::pairs) store_narrow(reinterpret_cast<bf16 *>(weights) + r * BLOCK + j + g, x);
            else store(s + g, x);
        }
        if (drops) drop(lanes, first, r, j);
#pragma GCC unroll 4
        for (int n = 16; n > 1; n /= 2)
#pragma GCC unroll 8
            for (int i = 0; i < n / 2; ++i) sum[i] = sum[2 * i] + sum[2 * i + 1];
        return sum[0];
    }

    void drop(const Lanes &lanes, int64_t first, int r, int j) {
        const uint32_t below = dropout_threshold(c.dropout);
        const T rest = T(1 / (1 - c.dropout));
        const uint32_t row =
            dropout_row(c.seed, uint32_t(lanes.batch * c.heads + lanes.head_of(r)), uint32_t(lanes.query_of(r)));
        for (int i = j; i < j + 16; ++i) {
            const bool gone = dropout_bits(row, dropout_column(uint32_t(first + i))) < below;
            if constexpr (K::pairs) {
                bf16 *w = reinterpret_cast<bf16 *>(weights) + r * BLOCK + i;
                *w = gone ? bf16{0} : narrow<bf16>(widen(*w) * rest);
            } else {
                T *w = scores + r * BLOCK + i;
                *w = gone ? T(0) : *w * rest;
            }
        }
    }

    void mix_rows(int64_t first, const Piece &p, int rows, const Tokens<K> &v, const Part &into) {
        int r = 0;
        for (; r + 8 <= rows; r += 8) mix<8, 2>(first, p, r, v, into);
        if (r + 4 <= rows) mix<4, 4>(first, p, r, v, into), r += 4;
        if (r + 2 <= rows) mix<2, 8>(first, p, r, v, into), r += 2;
        if (r < rows) mix<1, 8>(first, p, r, v, into);
    }

    // Rows r to r + R: out += weights x values, N vectors of dims at a time.
    template <int R, int N>
    REGARD_INLINE void mix(int64_t first, const Piece &p, int r, const Tokens<K> &v, const Part &into) {
        int64_t d = 0;
        for (; d + N * W <= c.v_dim; d += N * W) mix_dims<R, N, false>(first, p, r, d, v, into);
        for (; d < c.v_dim; d += W) {
            if (d + W <= c.v_dim) mix_dims<R, 1, false>(first, p, r, d, v, into);
            else mix_dims<R, 1, true>(first, p, r, d, v, into);
        }
    }

    template <int R, int N, bool tail>
    REGARD_INLINE void mix_dims(int64_t first, const Piece &p, int r, int64_t d, const Tokens<K> &v, const Part &into) {
        T *out = into.out + r * width + d;
        const int64_t rows = AHEAD / (c.v_dim * int64_t(sizeof(S)) + 1) + 1, last = c.keys - 1;
        V sum[R][N];
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sum[i][n] = load(out + i * width + n * W);
        for (int j = p.low; j < p.high; j += P::pair) {
            const int64_t token = first + j;
            const S *row = v.at(token), *odd = P::pair == 2 && j + 1 < p.high ? v.at(token + 1) : nullptr;
            const int64_t ahead = token + rows < last ? rows * c.v.token : 0;
            typename P::Vector value[N];
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) {
                if (r == 0) __builtin_prefetch(row + ahead + d + n * W);
                if (r == 0 && odd) __builtin_prefetch(odd + ahead + d + n * W);
                value[n] = values<tail>(row, odd, d + n * W);
            }
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i) {
                const typename P::Vector w =
                    P::repeat(reinterpret_cast<const char *>(weights + (r + i) * (BLOCK / P::pair) + j / P::pair));
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) sum[i][n] = P::madd(value[n], w, sum[i][n]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) store(out + i * width + n * W, sum[i][n]);
    }

    // A vector of values from dim d on: of one token, or of two side by side.
    template <bool tail>
    REGARD_INLINE typename P::Vector values(const S *row, [[maybe_unused]] const S *odd, int64_t d) const {
        if constexpr (K::pairs) {
#if defined(REGARD_PAIRS)
            const __mmask16 real = tail ? __mmask16((1u << (c.v_dim - d)) - 1) : __mmask16(0xffff);
            const __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(real, row + d));
            if (!odd) return (U)even;
            return (U)_mm512_or_si512(
                even, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(real, odd + d)), 16));
#endif
        } else if constexpr (tail) {
            V x{};
            for (int64_t i = d; i < c.v_dim; ++i) x[i - d] = widen(row[i]);
            return x;
        } else {
            return load_wide(row + d);
        }
    }

    // The same sums, where values that are not finite must not reach rows that do not see them.
    void mix_wild(const Block &block, const Bits128 &bits, const Piece &p, const Lanes &lanes, const Tokens<K> &v,
                  const Part &into) {
        for (int r = 0; r < lanes.count; ++r)
            for (int64_t d = 0; d < c.v_dim; ++d) {
                V sum = broadcast(into.out[r * width + d]);
                for (int j = p.low; j < p.high; j += P::pair) {
                    const typename P::Vector w =
                        P::repeat(reinterpret_cast<const char *>(weights + r * (BLOCK / P::pair) + j / P::pair));
                    const T even = seen(block, bits, r, j, v, d);
                    if constexpr (K::pairs) {
                        const T odd = j + 1 < p.high ? seen(block, bits, r, j + 1, v, d) : T(0);
                        sum = P::madd(pack_pairs(broadcast(even), broadcast(odd)), w, sum);
                    } else {
                        sum = P::madd(broadcast(even), w, sum);
                    }
                }
                into.out[r * width + d] = sum[0];
            }
    }

    T seen(const Block &block, const Bits128 &bits, int r, int j, const Tokens<K> &v, int64_t d) const {
        const T value = widen(v.at(block.first + j)[d]);
        const bool hidden = block.half[j / TILE].bits && !(bits.of[j] >> r & 1);
        return hidden && !(value - value == 0) ? T(0) : value;
    }

    // All spans of some rows merged in order, and the result written. `parts` are `stride` bytes apart.
    void finish(const Lanes &lanes, char *parts, int64_t stride, int64_t spans) {
        alignas(64) T top[LANES], total[LANES], share[LANES], lse[LANES];
        for (int i = 0; i < LANES; ++i) top[i] = NEVER, total[i] = 0;
        const Part whole = part(c, parts);
        for (int r = 0; r < lanes.count; ++r) {
            bool first = true;
            for (int64_t s = 0; s < spans; ++s) {
                const Part p = part(c, parts + s * stride);
                if (p.total[r] == 0 && p.top[r] == NEVER) continue;
                if (first) take(r, p, whole, top[r], total[r]);
                else merge(r, p, whole, top[r], total[r]);
                first = false;
            }
        }
        for (int v = 0; v < FEW; v += W) finished<T>(load(top + v), load(total + v), scoring.unit, lse + v, share + v);
        for (int r = 0; r < lanes.count; ++r) write(lanes, r, whole.out + r * width, lse[r], share[r]);
    }

    void take(int r, const Part &from, const Part &to, T &top, T &total) {
        top = from.top[r], total = from.total[r];
        if (from.out != to.out) memcpy(to.out + r * width, from.out + r * width, size_t(width) * sizeof(T));
    }

    void merge(int r, const Part &from, const Part &to, T &top, T &total) {
        const T a = top, b = from.top[r];
        top = a > b ? a : b;
        const T wa = a == top ? T(1) : exp2(broadcast(T((a - top) * factor)))[0];
        const T wb = b == top ? T(1) : exp2(broadcast(T((b - top) * factor)))[0];
        total = fma(from.total[r], wb, T(total * wa));
        for (int64_t d = 0; d < width; d += W) {
            T *at = to.out + r * width + d;
            store(at, fma(load(from.out + r * width + d), broadcast(wb), load(at) * wa));
        }
    }

    void write(const Lanes &lanes, int r, const T *sums, T lse, T share) {
        const int64_t h = lanes.head_of(r), i = lanes.query_of(r);
        if (c.sink) share = sunk(lse, share, static_cast<const T *>(c.sink)[h]);
        static_cast<T *>(c.lse)[(lanes.batch * c.heads + h) * c.queries + i] = lse;
        S *out = static_cast<S *>(c.out.data) + lanes.batch * c.out.batch + h * c.out.head + i * c.out.token;
        int64_t d = 0;
        for (; d + W <= c.v_dim; d += W) store_narrow(out + d, share == 0 ? V{} : load(sums + d) * share);
        for (; d < c.v_dim; ++d) out[d] = narrow<S>(share == 0 ? T(0) : sums[d] * share);
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
