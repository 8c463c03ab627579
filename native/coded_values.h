// Outputs of a few rows of bf16 from values in codes that are multiplied as they are: int8 and int4 as integers
// (fixed.h), e4m3 as bf16 where these are multiplied in pairs.
//
// The scales go to the weights: out += sum_t (p_t scale_t) code_t + sum_t p_t low_t for each group of dims. Weights are
// written relative to the largest of a segment: the tokens of one part within a block, in whole stretches of 32. So
// which are written together follows from positions; tokens that are not listed, or hidden, weigh nothing.
//
// Codes of 8 bits stay where they are: words of two tokens side by side meet pairs of weights (`mix_dims`). Of 4 bits,
// four tokens side by side in a lane meet four weights. So 16 bytes of four rows at a time are transposed into a
// vector, 64 bytes of each row and all tokens of the segment before the next 64. e4m3 is looked up as bf16, which holds
// it exactly, for two tokens side by side; weights times scales are rounded to bf16.
#pragma once

#include "coded_segment.h"

#if defined(__AVX512BW__)
namespace regard {
namespace REGARD_ISA {

class CodedValues : public CodedSegment {
  public:
    static int64_t bytes(int64_t dim) { return CodedSegment::bytes(dim) + AT_ONCE * BLOCK * 16; }

    // weights [16][128], out [16][width].
    CodedValues(int64_t v_dim, int64_t of_row, const float *w, float *to, char *scratch)
        : CodedSegment(v_dim, of_row, w, to, scratch + AT_ONCE * BLOCK * 16),
          transposed_(reinterpret_cast<uint8_t *>(scratch)) {}

    // Adds a segment, `listed` groups of 16 tokens of it. kept(row, token): 16 tokens that are not hidden from a row.
    template <typename Kept>
    void add(const Segment &segment, const Stretch &stretch, int64_t head, int64_t first, uint32_t listed, int rows,
             const Kept &kept, Lines &lines) {
        if (!begin(segment, stretch, head, first, listed)) return;
        nibbles = part->form == REGARD_INT4, floats = part->form == REGARD_FP8;
        if (write_rows<false>(rows)) {  // some scale is not finite, perhaps of hidden tokens
            find_kept(rows, kept);
            write_rows<true>(rows);
        }
#if defined(REGARD_PAIRS)
        if (floats) return mix_floats(segment, rows, kept, lines);
#endif
        if (!nibbles) return mix_rows(rows, lines);
        const int64_t columns = (dim + 31) / 32;
        for (int64_t c = 0; c < columns; c += AT_ONCE) {
            const int some = least(AT_ONCE, columns - c);
            turn(c, some);
            passes(rows, [&](auto few, int r, int pass) { mix<few.count>(c, some, r, pass, lines); });
        }
    }

    // How often `add` asks for lines, for a number of groups of tokens of a part. For e4m3 only with each second pair:
    // with each it took 1.02 to 1.05 times as long (Zen 5).
    static int64_t asks(const regard_part &p, int64_t groups_of_tokens, int64_t dim, int rows) {
        const int64_t fours = rows / 4, rest = (rows % 4 + 1) / 2;
        if (p.form == REGARD_FP8)
            return (fours * ((dim + 63) / 64) + rest * ((dim + 127) / 128)) * groups_of_tokens * 4;
        return (fours + rest) * ((dim + 31) / 32) * groups_of_tokens * 4;
    }

  private:
    static constexpr int COLUMN = 16, AT_ONCE = 4, FOURS = int(BLOCK) / 4;  // bytes of a column; columns; of a row

    uint8_t *const transposed_;            // [4 columns][fours of tokens][64]
    bool nibbles = false, floats = false;  // codes of 4 bits; of e4m3

    // Weights from row r on with the scales of group g, FOURS * 8 bytes each.
    const int8_t *bytes(int r, int64_t g) const { return reinterpret_cast<const int8_t *>(words(r, g)); }

    // Columns of all tokens, four rows in a vector: [column][four][16 bytes][4 tokens].
    void turn(int64_t column, int some) const {
        const __mmask8 real = __mmask8((1u << 2 * some) - 1);
        uint8_t *to = transposed_;
        for (int i = 0; i < count * 4; ++i, to += 64) {
            __m512i row[4];
#pragma GCC unroll 4
            for (int t = 0; t < 4; ++t) row[t] = _mm512_maskz_loadu_epi64(real, row_[i * 4 + t] + column * COLUMN);
            const __m512i a = _mm512_shuffle_i32x4(row[0], row[1], 0x44),
                          b = _mm512_shuffle_i32x4(row[2], row[3], 0x44);
            const __m512i c = _mm512_shuffle_i32x4(row[0], row[1], 0xee),
                          d = _mm512_shuffle_i32x4(row[2], row[3], 0xee);
            const __m512i four[4] = {_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd),
                                     _mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xdd)};
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n) {
                _mm512_store_si512(to + n * FOURS * 64, transposed(four[n]));
            }
        }
    }

    // ---- weights ---------------------------------------------------------------------------------------------------

    // All rows; whether some number was not finite. `masked`: without tokens that are hidden.
    template <bool masked>
    bool write_rows(int rows) {
        return write_all(rows, [&](auto some, int r, int64_t g, Fixed &fixed) {
            if (part->low) write_one<some.count, masked, true>(r, g, fixed);
            else write_one<some.count, masked, false>(r, g, fixed);
        });
    }

    template <int R, bool masked, bool has_low>
    void write_one(int r, int64_t g, Fixed &fixed) {
#if defined(REGARD_PAIRS)
        if (floats) return write_pairs<R, masked, has_low>(r, g, fixed);
#endif
        write_group<R, masked, has_low>(r, g, fixed);
    }

    // R rows of weights times the scales of a group of dims, in fixed point.
    template <int R, bool masked, bool has_low>
    __attribute__((noinline)) void write_group(int r, int64_t g, Fixed &fixed) {
        I most[4] = {}, sums[4] = {};
        F added[4] = {};
        const float *const scale = scale_ + g * BLOCK, *const low = low_ + g * BLOCK, *const w = weights + r * BLOCK;
        const int n = count;
        for (int i = 0; i < n; ++i) {
            const F by = load(scale + i * 16), with = has_low ? load(low + i * 16) : F{};
            const float *const from = w + at_[i];
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s) {
                const F p = load(from + s * BLOCK);
                const __mmask16 kept = masked ? kept_[r + s][i] : 0xffff;
                const F x = masked ? F(_mm512_maskz_mul_ps(kept, p, by)) : p * by;
                if (has_low)
                    added[s] = masked ? F(_mm512_mask3_fmadd_ps(p, with, added[s], kept)) : fma(p, with, added[s]);
                store(products_ + s * BLOCK + i * 16, x);
                most[s] = larger_size(most[s], x);
            }
        }
        take_sizes(most, fixed);
        for (int s = 0; n % 2 && s < R; ++s) store(products_ + s * BLOCK + n * 16, F{});
        int8_t *to = reinterpret_cast<int8_t *>(words(r, g));
        const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
        for (int i = 0; i < n; i += 2, to += 64)
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s) {
                const float *const from = products_ + s * BLOCK + i * 16;
                const __m512i whole = in_steps(load(from), load(from + 16), broadcast(fixed.steps[s]));
                const __m512i fours = nibbles ? _mm512_permutexvar_epi64(order, by_fours<Order::apart>(whole)) : whole;
                _mm512_storeu_si512(to + s * FOURS * 8, fours);
                if (!nibbles) sums[s] = add_steps(sums[s], whole);
            }
        take_added(added, fixed);
        if (!nibbles) take_sums(sums, fixed);
    }

#if defined(REGARD_PAIRS)
    // The same as bf16. Of rows with a number that is not finite `unit` is NaN, and 1 if that cannot be helped.
    template <int R, bool masked, bool has_low>
    __attribute__((noinline)) void write_pairs(int r, int64_t g, Fixed &fixed) {
        F added[4] = {};
        __m512i most{};
        const float *const scale = scale_ + g * BLOCK, *const low = low_ + g * BLOCK, *const w = weights + r * BLOCK;
        bf16 *const to = reinterpret_cast<bf16 *>(words(r, g));
        for (int i = 0; i < count; ++i) {
            const F by = load(scale + i * 16), with = has_low ? load(low + i * 16) : F{};
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s) {
                const F p = load(w + s * BLOCK + at_[i]);
                const __mmask16 kept = masked ? kept_[r + s][i] : 0xffff;
                F x = p * by;
                if (masked) x = _mm512_maskz_mov_ps(kept, within_bf16(x) + (p * 0 + by * 0));
                if (has_low)
                    added[s] = masked ? F(_mm512_mask3_fmadd_ps(p, with, added[s], kept)) : fma(p, with, added[s]);
                const __m512i words = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(x));
                _mm256_storeu_si256((__m256i *)(to + s * BLOCK + i * 16), _mm512_castsi512_si256(words));
                most = _mm512_max_epu16(most, _mm512_add_epi16(words, words));  // without signs
            }
        }
        const bool wild = !masked && _mm512_mask_cmpge_epu16_mask(0xffff, most, _mm512_set1_epi16(short(0xff00)));
        for (int s = 0; s < 4; ++s) fixed.unit[s] = wild ? __builtin_nanf("") : 1;
        take_added(added, fixed);
    }

    // ---- products with e4m3 ----------------------------------------------------------------------------------------

    // Codes are bf16 as they are. All rows, as many dims of one scale at a time as there are registers for sums.
    template <typename Kept>
    void mix_floats(const Segment &segment, int rows, const Kept &kept, Lines &lines) const {
        const auto hidden = [&](int r, int i, int t) {  // token t of a group from row r
            return at_[i] + t >= segment.high || !(kept(r, at_[i]) >> t & 1);
        };
        passes(rows, [&](auto some, int r, int pass) {
            mix_scaled<some.count, some.count == 4 ? 4 : 8>(r, pass, hidden, lines);
        });
    }

    template <int R, int N, typename Hidden>
    void mix_scaled(int r, int pass, const Hidden &hidden, Lines &lines) const {
        for (int64_t d = 0; d < dim;) {
            const int64_t end = (d / group + 1) * group;
            const int dims = least(16 * N, (end < dim ? end : dim) - d);
            const Fixed &fixed = fixed_[pass * groups + d / group];
            if (N > 4 && dims <= 64) mix_pairs<R, 4>(d, dims, r, fixed, hidden, lines);
            else mix_pairs<R, N>(d, dims, r, fixed, hidden, lines);
            d += dims;
        }
    }

    // R rows, up to N vectors of dims.
    template <int R, int N, typename Hidden>
    __attribute__((noinline)) void mix_pairs(int64_t d, int dims, int r, const Fixed &fixed, const Hidden &hidden,
                                             Lines &lines) const {
        const int8_t *const w = bytes(r, d / group);
        F sum[R][N];
        Lines::Place place = lines.place();
        sum_pairs(row_, d, dims, w, sum, [&] { lines.ask(place); });
        lines.back(place);
        __mmask16 nan = 0;
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) nan |= _mm512_cmp_ps_mask(sum[s][n], sum[s][n], _CMP_UNORD_Q);
        if (__builtin_expect(nan, 0)) {  // perhaps of codes that a row does not see
            for (int s = 0; s < R; ++s)
                mix_seen<N>(d, dims, r + s, w + s * FOURS * 8, fixed.added[s],
                            [&](int i) { return hidden(r + s, i / 16, i % 16); });
            return;
        }
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s) add_sums(sum[s], d, dims, r + s, fixed.added[s]);
    }

    // One row without tokens that are hidden, of whatever codes.
    template <int N, typename Hidden>
    __attribute__((noinline)) void mix_seen(int64_t d, int dims, int r, const int8_t *w, float added,
                                            const Hidden &hidden) const {
        static constexpr uint8_t zeros[16 * N] = {};
        const uint8_t *seen[BLOCK];
        for (int i = 0; i < count * 16; ++i) seen[i] = hidden(i) ? zeros : row_[i] + d;
        F sum[1][N];
        sum_pairs(seen, 0, dims, w, sum, [] {});
        add_sums(sum[0], d, dims, r, added);
    }

    // Sums of row r in the order of `sum_pairs`, added to its output.
    template <int N>
    REGARD_INLINE void add_sums(const F (&sum)[N], int64_t d, int dims, int r, float added) const {
#pragma GCC unroll 2
        for (int n = 0; n < N; n += 4) {
            F four[4] = {sum[n], sum[n + 1], sum[n + 2], sum[n + 3]};
            join_fours(four);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                if ((n + i) * 16 >= dims) continue;
                float *const to = out + r * width + d + (n + i) * 16;
                store(to, load(to) + (four[i] + broadcast(added)));
            }
        }
    }

    // Sums of all pairs of tokens, in rows from dim d on: of each 64 dims 0 to 3 of each 16, then 4 to 7 and so on,
    // which takes one instruction for 64 codes where their order takes two.
    template <int R, int N, typename Each>
    REGARD_INLINE void sum_pairs(const uint8_t *const *row, int64_t d, int dims, const int8_t *w, F (&sum)[R][N],
                                 const Each &each) const {
        __mmask64 real[N / 4];
        for (int n = 0; n < N / 4; ++n) {
            const int left = dims - n * 64;
            real[n] = left >= 64 ? ~uint64_t(0) : left > 0 ? ~uint64_t(0) >> (64 - left) : 0;
        }
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sum[s][n] = F{};
        for (int j = 0; j < count * 8; ++j, w += 4) {
            if (j % 2 == 0) each();
            const uint8_t *const even = row[2 * j] + d, *const odd = row[2 * j + 1] + d;
            U x[N];
#pragma GCC unroll 2
            for (int n = 0; n < N; n += 4) {
                const __m512i a = _mm512_maskz_loadu_epi8(real[n / 4], even + n * 16),
                              b = _mm512_maskz_loadu_epi8(real[n / 4], odd + n * 16);
                Fp8::as_bf16(_mm512_unpacklo_epi8(a, b), x[n], x[n + 1]);
                Fp8::as_bf16(_mm512_unpackhi_epi8(a, b), x[n + 2], x[n + 3]);
            }
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s) {
                uint32_t pair;
                memcpy(&pair, w + s * FOURS * 8, 4);
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) sum[s][n] = dot_pairs(x[n], broadcast_pair(pair), sum[s][n]);
            }
        }
    }

    // Quarters of four vectors as four vectors.
    static REGARD_INLINE void join_fours(F (&x)[4]) {
        const __m512 a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
        const __m512 c = _mm512_shuffle_f32x4(x[0], x[1], 0xee), e = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
        x[0] = _mm512_shuffle_f32x4(a, b, 0x88), x[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
        x[2] = _mm512_shuffle_f32x4(c, e, 0x88), x[3] = _mm512_shuffle_f32x4(c, e, 0xdd);
    }
#endif

    // ---- products with int8 ----------------------------------------------------------------------------------------

    // All rows, up to 64 dims of one scale at a time.
    void mix_rows(int rows, Lines &lines) const {
        for (int64_t d = 0; d < dim;) {
            const int64_t end = (d / group + 1) * group;
            const int dims = least(64, (end < dim ? end : dim) - d);
            passes(rows, [&](auto some, int r, int pass) { mix_dims<some.count>(d, dims, r, pass, lines); });
            d += dims;
        }
    }

    // R rows, up to 64 dims. A lane is a word of a token and one of the token 16 further on. A word is 256 times an odd
    // dim and an even one, 128 too large; so words are multiplied with weights, and odd dims alone, and no shuffle is
    // needed. A sum of words may be beyond 32 bits; less 256 times that of odd dims it is not, and that is all the
    // same.
    template <int R>
    __attribute__((noinline)) void mix_dims(int64_t d, int dims, int r, int pass, Lines &lines) const {
        const Fixed &fixed = fixed_[pass * groups + d / group];
        const int8_t *w = bytes(r, d / group);
        const uint32_t real = dims == 64 ? 0xffffffff : (1u << dims / 2) - 1;
        const __mmask32 second = 0xaaaaaaaa;
        const __m512i too_large = _mm512_set1_epi16(128);
        I sum[R][4];  // of dims 0, 1, 2 and 3 of each four
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s) {
            sum[s][0] = sum[s][2] = I{} + (256 * fixed.high[s] + fixed.low[s]);
            sum[s][1] = sum[s][3] = I{};
        }
        Lines::Place place = lines.place();
        for (int i = 0; i < count; i += 2, w += 64)
            for (int j = 0; j < 16; ++j) {
                lines.ask(place);
                const uint8_t *const a = row_[i * 16 + j] + d, *const b = row_[i * 16 + 16 + j] + d;
                const __m512i one = _mm512_maskz_loadu_epi16(real, a), other = _mm512_maskz_loadu_epi16(real, b);
                const __m512i low = _mm512_mask_blend_epi16(second, one, _mm512_slli_epi32(other, 16));
                const __m512i high = _mm512_mask_blend_epi16(second, _mm512_srli_epi32(one, 16), other);
                __m512i x[4];
                x[0] = _mm512_xor_si512(low, too_large), x[2] = _mm512_xor_si512(high, too_large);
                x[1] = _mm512_srai_epi16(low, 8), x[3] = _mm512_srai_epi16(high, 8);
#pragma GCC unroll 4
                for (int s = 0; s < R; ++s) {
                    int32_t pair;
                    memcpy(&pair, w + s * FOURS * 8 + j * 4, 4);
#pragma GCC unroll 4
                    for (int n = 0; n < 4; ++n) sum[s][n] = add_pairs(sum[s][n], x[n], _mm512_set1_epi32(pair));
                }
            }
        lines.back(place);
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s) {
            in_order(sum[s]);
            for (int n = 0; n < dims / 16; ++n) {
                float *const to = out + (r + s) * width + d + n * 16;
                const F more = fma(numbers(sum[s][n]), broadcast(fixed.unit[s]), broadcast(fixed.added[s]));
                store(to, load(to) + more);
            }
        }
    }

    // Sums of dims 0, 1, 2 and 3 of each four, even ones with 256 times the odd ones, as four of 16 dims.
    static REGARD_INLINE void in_order(I (&sum)[4]) {
        const __m512i x[4] = {(__m512i)sum[0], (__m512i)sum[1], (__m512i)sum[2], (__m512i)sum[3]};
        const __m512i a = _mm512_sub_epi32(x[0], _mm512_slli_epi32(x[1], 8)),
                      b = _mm512_sub_epi32(x[2], _mm512_slli_epi32(x[3], 8));
        const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0),
                      high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        const __m512i first = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0),
                      second = _mm512_add_epi64(first, _mm512_set1_epi64(4));
        const __m512i c = _mm512_permutex2var_epi32(a, low, x[1]), e = _mm512_permutex2var_epi32(b, low, x[3]),
                      f = _mm512_permutex2var_epi32(a, high, x[1]), g = _mm512_permutex2var_epi32(b, high, x[3]);
        sum[0] = (I)_mm512_permutex2var_epi64(c, first, e), sum[1] = (I)_mm512_permutex2var_epi64(c, second, e);
        sum[2] = (I)_mm512_permutex2var_epi64(f, first, g), sum[3] = (I)_mm512_permutex2var_epi64(f, second, g);
    }

    // ---- products with int4 ----------------------------------------------------------------------------------------

    // R rows with transposed columns.
    template <int R>
    __attribute__((noinline)) void mix(int64_t column, int some, int r, int pass, Lines &lines) const {
        for (int c = 0; c < some; ++c) {
            const int64_t d = (column + c) * 32, g = d / group;
            const uint8_t *const codes = transposed_ + c * FOURS * 64;
            const bool two = d + 16 < dim, alike = two && (d + 16) / group == g;
            if (alike) mix_vectors<R, 2>(codes, d, g, r, pass, lines);
            else mix_vectors<R, 1>(codes, d, g, r, pass, lines);
            if (two && !alike) mix_vectors<R, 1, true>(codes, d + 16, (d + 16) / group, r, pass, lines);
        }
    }

    template <int R, int N, bool upper = false>
    REGARD_INLINE void mix_vectors(const uint8_t *codes, int64_t d, int64_t g, int r, int pass, Lines &lines) const {
        const Fixed &fixed = fixed_[pass * groups + g];
        const int8_t *w = bytes(r, g);
        Sum sum[R][N];
        start_sums<R, N, false>(fixed, sum);
        Lines::Place place = lines.place();
        for (int i = 0; i < count * 4; ++i, codes += 64, w += 8) {
            lines.ask(place);
            const __m512i both = _mm512_load_si512(codes);
            FourCodes x[N];
            x[0] = upper ? high_codes(both) : low_codes(both);
            if (N == 2) x[N - 1] = high_codes(both);
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s)
#pragma GCC unroll 2
                for (int n = 0; n < N; ++n) add_products(sum[s][n], x[n], w + s * FOURS * 8);
        }
        lines.back(place);
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s)
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) {
                float *const to = out + (r + s) * width + d + n * 16;
                const F more = fma(in_one(sum[s][n]), broadcast(fixed.unit[s]), broadcast(fixed.added[s]));
                store(to, load(to) + more);
            }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
#endif
