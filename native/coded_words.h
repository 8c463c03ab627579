// Outputs of a few rows of bf16 from values in int8 and int4 on AVX2: as coded_segment.h says, with weights that are
// words in fixed point (fixed.h).
//
// A lane is two words, of a dim of two tokens side by side: they are interleaved as bytes, widened, and meet pairs of
// weights.
#pragma once

#include "coded_segment.h"

#if defined(REGARD_INTEGERS) && !defined(__AVX512BW__)
namespace regard {
namespace REGARD_ISA {

class CodedValues : public CodedSegment {
  public:
    using CodedSegment::CodedSegment;

    // Adds a segment, `listed` groups of 16 tokens of it. kept(row, token): 16 tokens that are not hidden from a row.
    template <typename Kept>
    void add(const Segment &segment, const Stretch &stretch, int64_t head, int64_t first, uint32_t listed, int rows,
             const Kept &kept, Lines &lines) {
        if (!begin(segment, stretch, head, first, listed)) return;
        write_weights(*this, rows, kept);
        passes(rows, [&](auto some, int r, int pass) {
            if (part->form == REGARD_INT4) mix_halves<some.count>(r, pass, lines);
            else mix_bytes<some.count>(r, pass, lines);
        });
    }

    // How often `add` asks for lines, for a number of groups of tokens of a part.
    static int64_t asks(const regard_part &p, int64_t groups_of_tokens, int64_t dim, int rows) {
        const bool nibbles = p.form == REGARD_INT4, apart = nibbles && p.group < dim && p.group % 32;
        const int64_t times = (rows / 4 + (rows % 4 + 1) / 2) * (1 + apart), dims = nibbles ? 32 : 16;
        return times * ((dim + dims - 1) / dims) * groups_of_tokens * (16 / TOKENS_OF_ASK) * (nibbles ? 2 : 1);
    }

  private:
    static constexpr int W = Vec<float>::lanes, TOKENS_OF_ASK = 4;

    friend CodedSegment;

    // ---- weights ---------------------------------------------------------------------------------------------------

    // R rows of weights times the scales of a group of dims, in fixed point. Members are copied, as in CodedScores.
    template <int R, bool masked, bool has_low>
    __attribute__((noinline)) void write_group(int r, int64_t g, Fixed &fixed) {
        const int groups_of_tokens = count;
        const float *const scale = scale_ + g * BLOCK, *const low = low_ + g * BLOCK, *const w = weights + r * BLOCK;
        float *const products = products_;
        I most[4] = {};
        F added[4] = {};
        for (int i = 0; i < 2 * groups_of_tokens; ++i) {
            const F by = load(scale + i * W), with = has_low ? load(low + i * W) : F{};
            const float *const from = w + at_[i / 2] + i % 2 * W;
#pragma GCC unroll 4
            for (int s = 0; s < R; ++s) {
                const F p = load(from + s * BLOCK);
                const uint64_t kept = masked ? kept_[r + s][i / 2] >> i % 2 * W & 0xff : 0xff;
                const F x = masked ? select(kept, p * by, F{}) : p * by;
                if (has_low)
                    added[s] = masked ? select(kept, fma(p, with, added[s]), added[s]) : fma(p, with, added[s]);
                store(products + s * BLOCK + i * W, x);
                most[s] = larger_size(most[s], x);
            }
        }
        take_sizes(most, fixed);
        take_added(added, fixed);
        int16_t *const to = words(r, g);
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s) {
            const F steps = broadcast(fixed.steps[s]);
            for (int i = s * int(BLOCK); i < s * int(BLOCK) + groups_of_tokens * 16; i += 16)
                _mm256_storeu_si256((__m256i *)(to + i), in_steps(load(products + i), load(products + i + W), steps));
        }
    }

    // ---- products --------------------------------------------------------------------------------------------------

    template <int R>
    void mix_bytes(int r, int pass, Lines &lines) const {
        for (int64_t d = 0; d < dim; d += 16) {
            const int64_t g = d / group;
            I sum[R][2] = {};
            mix<R>(words(r, g), sum, lines, [&](int j, __m256i(&x)[2]) {
                const __m128i a = _mm_loadu_si128((const __m128i *)(row_[j] + d)),
                              b = _mm_loadu_si128((const __m128i *)(row_[j + 1] + d));
                x[0] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
                x[1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
            });
            add_sums<R>(sum, 0, d, r, fixed_[pass * groups + g]);
            add_sums<R>(sum, 1, d + W, r, fixed_[pass * groups + g]);
        }
    }

    // Of each 16 bytes the lower halves are 16 dims, the upper ones the next 16, which may have other scales.
    template <int R>
    void mix_halves(int r, int pass, Lines &lines) const {
        for (int64_t at = 0; at < up(dim, 32); at += 16)  // two lots of 8 bytes for 32 dims
            half_lot<R>(at / 32 * 32 + at % 32 / 2, r, pass, lines);
    }

    template <int R>
    void half_lot(int64_t d, int r, int pass, Lines &lines) const {
        const int64_t byte = d / 32 * 16 + d % 32, g = d / group, next = d + 16 < dim ? (d + 16) / group : g;
        const __m256i lower = _mm256_set1_epi16(15);
        const auto both = [&](int j) {
            const __m128i a = _mm_loadl_epi64((const __m128i *)(row_[j] + byte)),
                          b = _mm_loadl_epi64((const __m128i *)(row_[j + 1] + byte));
            return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b));
        };
        I sum[R][2] = {};
        if (next == g) {
            mix<R>(words(r, g), sum, lines, [&](int j, __m256i(&x)[2]) {
                const __m256i codes = both(j);
                x[0] = _mm256_and_si256(codes, lower), x[1] = _mm256_srli_epi16(codes, 4);
            });
        } else {
            I low[R][1] = {}, high[R][1] = {};
            mix<R>(words(r, g), low, lines, [&](int j, __m256i(&x)[1]) { x[0] = _mm256_and_si256(both(j), lower); });
            mix<R>(words(r, next), high, lines, [&](int j, __m256i(&x)[1]) { x[0] = _mm256_srli_epi16(both(j), 4); });
            for (int s = 0; s < R; ++s) sum[s][0] = low[s][0], sum[s][1] = high[s][0];
        }
        add_sums<R>(sum, 0, d, r, fixed_[pass * groups + g]);
        if (d + 16 < dim) add_sums<R>(sum, 1, d + 16, r, fixed_[pass * groups + next]);
    }

    // Sums over all tokens: N vectors of R rows. codes(j, x): those of tokens j and j + 1.
    template <int R, int N, typename Codes>
    REGARD_INLINE void mix(const int16_t *w, I (&sum)[R][N], Lines &lines, const Codes &codes) const {
        Lines::Place place = lines.place();
        for (int j = 0; j < count * 16; j += TOKENS_OF_ASK) {
            lines.ask(place);
#pragma GCC unroll 2
            for (int i = 0; i < TOKENS_OF_ASK; i += 2, w += 2) {
                __m256i x[N];
                codes(j + i, x);
#pragma GCC unroll 4
                for (int s = 0; s < R; ++s) add_products(sum[s], x, w + s * BLOCK);
            }
        }
        lines.back(place);
    }

    // Vector n of sums added to the outputs from dim d on.
    template <int R, int N>
    REGARD_INLINE void add_sums(const I (&sum)[R][N], int n, int64_t d, int r, const Fixed &fixed) const {
#pragma GCC unroll 4
        for (int s = 0; s < R; ++s) {
            float *const to = out + (r + s) * width + d;
            store(to, load(to) + fma(numbers(sum[s][n]), broadcast(fixed.unit[s]), broadcast(fixed.added[s])));
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
#endif
