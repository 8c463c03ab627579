// Tokens of one part within a block whose codes are multiplied without being decoded, with few rows of weights: int8
// and int4 as integers (fixed.h; coded_values.h, coded_words.h), e4m3 as bf16 where these are multiplied in pairs
// (fp8_values.h). Here: where tokens are stored, their scales, and which rows are written together.
//
// The scales go to the weights: out += sum_t (p_t scale_t) code_t + sum_t p_t low_t for each group of dims. Weights are
// written relative to the largest of a segment: the tokens of one part within a block, in whole stretches of 32. So
// which are written together follows from positions; tokens that are not listed, or hidden, weigh nothing.
#pragma once

#include "fixed.h"
#include "scores.h"

#if defined(REGARD_INTEGERS)
namespace regard {
namespace REGARD_ISA {

// Tokens of a block, counted in it.
struct Segment {
    const regard_part *part;
    int low, high;
};

class CodedSegment {
  public:
    static constexpr int STRETCH = 32, FEW_ROWS = 16;  // tokens

    static int64_t bytes(int64_t dim) {
        const int64_t groups = up(dim, 16) / 16;
        return groups * BLOCK * (2 * 4 + FEW_ROWS * 2) + 4 * BLOCK * 4 +
               up(groups * PASSES * int64_t(sizeof(Fixed)), 64);
    }

    // weights [16][128], out [16][width].
    CodedSegment(int64_t v_dim, int64_t of_row, const float *w, float *to, char *scratch)
        : dim(v_dim), width(of_row), weights(w), out(to) {
        const int64_t most = up(dim, 16) / 16;
        scale_ = reinterpret_cast<float *>(scratch);
        low_ = scale_ + most * BLOCK;
        products_ = low_ + most * BLOCK;
        words_ = reinterpret_cast<int16_t *>(products_ + 4 * BLOCK);
        fixed_ = reinterpret_cast<Fixed *>(words_ + most * FEW_ROWS * BLOCK);
    }

    // Whether values of a part can be read so: a vector of dims has one scale.
    static bool fits(const regard_part *p, int64_t dim) {
        if (!p || (p->form != REGARD_INT8 && p->form != REGARD_INT4 && !(PAIRS && p->form == REGARD_FP8))) return false;
        return !p->tiled && dim % 16 == 0 && (p->group % 16 == 0 || p->group >= dim);
    }

    // The segments among the tokens of a stretch, in the block at `first`; at most 4. Tokens beyond all parts, which
    // read as 0, may follow them.
    static int segments(const Stretch &stretch, int64_t first, int64_t dim, Segment (&found)[4]) {
        const regard_part *of[4] = {};
        bool fit[4] = {};
        int until[4] = {}, count = 0;
        for (int i = 0; i < stretch.count; ++i) {
            const Run &run = stretch.run[i];
            const int low = int(run.first - first), high = low + int(run.count);
            for (int s = low / STRETCH; s * STRETCH < high; ++s) {
                const int begin = most(low, s * STRETCH), end = least(high, (s + 1) * STRETCH);
                if (begin == s * STRETCH) of[s] = run.part, fit[s] = fits(run.part, dim);
                else if (run.part && run.part != of[s]) fit[s] = false;
                if (run.part) until[s] = end;
            }
        }
        for (int s = 0; s < 4; ++s) {
            if (!fit[s]) continue;
            if (count && found[count - 1].part == of[s] && found[count - 1].high == s * STRETCH)
                found[count - 1].high = until[s];
            else found[count++] = {of[s], s * STRETCH, until[s]};
        }
        return count;
    }

  protected:
    static constexpr int GROUPS_OF_TOKENS = int(BLOCK) / 16, PASSES = FEW_ROWS / 4 + 2;
#if defined(REGARD_PAIRS)
    static constexpr bool PAIRS = true;  // of bf16 are multiplied: codes of e4m3 as well
#else
    static constexpr bool PAIRS = false;
#endif

    const int64_t dim, width;
    const float *const weights;
    float *const out;
    float *scale_, *low_;  // [groups of dims][128]
    float *products_;      // weights times scales [4][128]
    int16_t *words_;       // the same in fixed point or as bf16 [groups of dims][16][128]
    Fixed *fixed_;         // [passes][groups of dims]
    const regard_part *part = nullptr;
    int64_t group = 0, groups = 0;
    int count = 0;              // groups of 16 tokens that are listed
    int at_[GROUPS_OF_TOKENS];  // their places
    const uint8_t *row_[BLOCK];
    uint16_t kept_[FEW_ROWS][GROUPS_OF_TOKENS];  // if some scale is not finite

    // Weights from row r on with the scales of group g.
    int16_t *words(int r, int64_t g) const { return words_ + (g * FEW_ROWS + r) * BLOCK; }

    // Takes `listed` groups of 16 tokens of a segment; false if there are none.
    bool begin(const Segment &segment, const Stretch &stretch, int64_t head, int64_t first, uint32_t listed) {
        part = segment.part;
        group = part->group, groups = (dim + group - 1) / group;
        find(segment, stretch, head, first, listed);
        return count;
    }

    // Rows that are written, and multiplied, together.
    template <int R>
    struct Together {
        static constexpr int count = R;
    };
    template <typename Each>
    static REGARD_INLINE void passes(int rows, Each each) {
        int pass = 0, r = 0;
        for (; r + 4 <= rows; r += 4) each(Together<4>{}, r, pass++);
        if (r + 2 <= rows) each(Together<2>{}, r, pass++), r += 2;
        if (r < rows) each(Together<1>{}, r, pass);
    }

    // The weights of all rows; where some scale is not finite, perhaps of hidden tokens, once more without those.
    template <typename Values, typename Kept>
    void write_weights(Values &values, int rows, const Kept &kept) {
        if (!write_rows<false>(values, rows)) return;
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < count; ++j) kept_[i][j] = uint16_t(kept(i, at_[j]));
        write_rows<true>(values, rows);
    }

  private:
    // All rows; whether some number was not finite. `masked`: without tokens that are hidden.
    template <bool masked, typename Values>
    bool write_rows(Values &values, int rows) {
        bool wild = false;
        passes(rows, [&](auto some, int r, int pass) {
            for (int64_t g = 0; g < groups; ++g) {
                Fixed &fixed = fixed_[pass * groups + g];
                if (part->low) values.template write_group<some.count, masked, true>(r, g, fixed);
                else values.template write_group<some.count, masked, false>(r, g, fixed);
                for (int s = 0; s < some.count; ++s) wild |= !(fixed.unit[s] * 0 + fixed.added[s] * 0 == 0);
            }
        });
        return wild;
    }

    void find(const Segment &segment, const Stretch &stretch, int64_t head, int64_t first, uint32_t listed) {
        count = 0;
        const Run *run = stretch.run;
        for (int j = segment.low; j < segment.high; j += 16) {
            if (!(listed >> j / 16 & 1)) continue;
            at_[count] = j;
            const int end = least(segment.high, j + 16), place = count * 16;
            for (int i = j; i < end;) {
                while (run->first + run->count <= first + i) ++run;
                const int64_t slot = run->slot + first + i - run->first;
                const int some = least(end - i, run->first + run->count - first - i);
                take(run->page, head, slot, some, place + i - j);
                i += some;
            }
            for (int i = end; i < j + 16; ++i) {
                row_[place + i - j] = row_[place];
                for (int64_t g = 0; g < groups; ++g)
                    scale_[g * BLOCK + place + i - j] = low_[g * BLOCK + place + i - j] = 0;
            }
            ++count;
        }
        for (int i = count * 16; count % 2 && i < count * 16 + 16; ++i)
            row_[i] = row_[0];  // those of weights that are 0
    }

    void take(int64_t page, int64_t head, int64_t slot, int some, int place) {
        const uint8_t *codes = codes_of(*part, page, head, slot);
        for (int i = 0; i < some; ++i) row_[place + i] = codes + i * part->data_step;
        spread(scales_of(*part, part->scale, page, head, slot), some, scale_ + place);
        if (part->low) spread(scales_of(*part, part->low, page, head, slot), some, low_ + place);
    }

    // Scales [tokens][groups], widened, as [groups][tokens].
    void spread(const bf16 *from, int some, float *to) const {
        const int64_t step = part->scale_step;
#if defined(__AVX512F__)
        if (some == 16 && step == 1 && groups == 1) return store(to, load_wide(from));
        if (some == 16 && step == 2 && groups == 2) return apart(_mm512_loadu_si512(from), to);
        if (some == 16 && step == 4 && groups == 4) {
            const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
            const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 32);
            apart(_mm512_permutex2var_epi32(a, even, b), to);
            return apart(_mm512_permutex2var_epi32(a, odd, b), to + 2 * BLOCK);
        }
#else
        if (some == 16 && step == groups && (groups == 1 || groups == 2 || groups == 4)) {
            for (int i = 0; i < 16; i += 8, to += 8) eight(from + i * step, to);
            return;
        }
#endif
        for (int i = 0; i < some; ++i)
            for (int64_t g = 0; g < groups; ++g) to[g * BLOCK + i] = widen(from[i * step + g]);
    }
#if defined(__AVX512F__)
    static void apart(__m512i pairs, float *to) {
        store(to, (F)_mm512_slli_epi32(pairs, 16));
        store(to + BLOCK, (F)_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
    }
#else
    // Those of eight tokens with 1, 2 or 4 groups.
    void eight(const bf16 *from, float *to) const {
        if (groups == 1) return store(to, load_wide(from));
        if (groups == 2) return apart(_mm256_loadu_si256((const __m256i *)from), to);
        const __m256i order = _mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0);
        const __m256i a = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)from), order);
        const __m256i b = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)(from + 16)), order);
        apart(_mm256_permute2x128_si256(a, b, 0x20), to);
        apart(_mm256_permute2x128_si256(a, b, 0x31), to + 2 * BLOCK);
    }
    static void apart(__m256i pairs, float *to) {
        store(to, (F)_mm256_slli_epi32(pairs, 16));
        store(to + BLOCK, (F)_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
    }
#endif
};

}  // namespace REGARD_ISA
}  // namespace regard
#endif
