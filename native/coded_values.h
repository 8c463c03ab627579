// Outputs of a few rows of bf16 from values in int8 and int4 on AVX-512. Both are multiplied as integers, as
// coded_segment.h says.
//
// Codes of 8 bits are read in place: words of two adjacent tokens meet pairs of weights (`mix_dims`). Of 4 bits, four
// adjacent tokens in a lane meet four weights. So 16 bytes of four rows at a time are transposed into a vector, 64
// bytes of each row and all tokens of the segment before the next 64.
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
        nibbles = part->form == REGARD_INT4;
        write_weights(*this, rows, kept);
        if (!nibbles) return mix_rows(rows, lines);
        const int64_t columns = (dim + 31) / 32;
        for (int64_t c = 0; c < columns; c += AT_ONCE) {
            const int some = least(AT_ONCE, columns - c);
            turn(c, some);
            passes(rows, [&](auto few, int r, int pass) { mix<few.count>(c, some, r, pass, lines); });
        }
    }

    // How often `add` asks for lines, for a number of groups of tokens of a part.
    static int64_t asks(const regard_part &, int64_t groups_of_tokens, int64_t dim, int rows) {
        return (rows / 4 + (rows % 4 + 1) / 2) * ((dim + 31) / 32) * groups_of_tokens * 4;
    }

  private:
    static constexpr int COLUMN = 16, AT_ONCE = 4, FOURS = int(BLOCK) / 4;  // bytes of a column; columns; of a row

    friend CodedSegment;

    uint8_t *const transposed_;  // [4 columns][fours of tokens][64]
    bool nibbles = false;        // codes of 4 bits

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
