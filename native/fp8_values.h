// Outputs of a few rows of bf16 from values in e4m3, where bf16 is multiplied in pairs. Scales and lows as in
// coded_segment.h; weights times scales are rounded to bf16, and codes are looked up as bf16, which holds them exactly,
// for two adjacent tokens at a time.
#pragma once

#include "coded_segment.h"

#if defined(REGARD_PAIRS)
namespace regard {
namespace REGARD_ISA {

class Fp8Values : public CodedSegment {
  public:
    using CodedSegment::CodedSegment;

    // Adds a segment, `listed` groups of 16 tokens of it. kept(row, token): 16 tokens that are not hidden from a row.
    template <typename Kept>
    void add(const Segment &segment, const Stretch &stretch, int64_t head, int64_t first, uint32_t listed, int rows,
             const Kept &kept, Lines &lines) {
        if (!begin(segment, stretch, head, first, listed)) return;
        write_weights(*this, rows, kept);
        const auto hidden = [&](int r, int i, int t) {  // token t of a group from row r
            return at_[i] + t >= segment.high || !(kept(r, at_[i]) >> t & 1);
        };
        passes(rows, [&](auto some, int r, int pass) {
            mix_scaled<some.count, some.count == 4 ? 4 : 8>(r, pass, hidden, lines);
        });
    }

    // How often `add` asks for lines, for a number of groups of tokens of a part. With each second pair only: with each
    // it took 1.02 to 1.05 times as long (Zen 5).
    static int64_t asks(const regard_part &, int64_t groups_of_tokens, int64_t dim, int rows) {
        const int64_t fours = rows / 4, rest = (rows % 4 + 1) / 2;
        return (fours * ((dim + 63) / 64) + rest * ((dim + 127) / 128)) * groups_of_tokens * 4;
    }

  private:
    static constexpr int OF_ROW = int(BLOCK) / 2;  // pairs of weights

    friend CodedSegment;

    // ---- weights ---------------------------------------------------------------------------------------------------

    // R rows of weights times the scales of a group of dims, as bf16. `unit` is NaN for rows with a number that is
    // not finite; it is 1 if `masked`, as hidden tokens are left out already.
    template <int R, bool masked, bool has_low>
    __attribute__((noinline)) void write_group(int r, int64_t g, Fixed &fixed) {
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

    // ---- products --------------------------------------------------------------------------------------------------

    // R rows, as many dims of one scale at a time as there are registers for sums.
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
        const uint32_t *const w = reinterpret_cast<const uint32_t *>(words(r, d / group));
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
                mix_seen<N>(d, dims, r + s, w + s * OF_ROW, fixed.added[s],
                            [&](int i) { return hidden(r + s, i / 16, i % 16); });
            return;
        }
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s) add_sums(sum[s], d, dims, r + s, fixed.added[s]);
    }

    // One row without tokens that are hidden, of whatever codes.
    template <int N, typename Hidden>
    __attribute__((noinline)) void mix_seen(int64_t d, int dims, int r, const uint32_t *w, float added,
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
    REGARD_INLINE void sum_pairs(const uint8_t *const *row, int64_t d, int dims, const uint32_t *w, F (&sum)[R][N],
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
        for (int j = 0; j < count * 8; ++j, ++w) {
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
                const U one = broadcast_pair(w[s * OF_ROW]);
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) sum[s][n] = dot_pairs(x[n], one, sum[s][n]);
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
};

}  // namespace REGARD_ISA
}  // namespace regard
#endif
