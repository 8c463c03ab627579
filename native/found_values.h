// Where the values of up to 64 tokens are, for a few rows of weights: rows of memory, or rows of codes and their
// scales. Values of the call's type and codes in rows are read in place; others, and adjacent tokens of
// parts with different forms, are decoded into rows first.
#pragma once

#include "decode_segments.h"
#include "rows.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct FoundValues {
    using T = typename K::Wide;
    using S = typename K::Stored;
    static constexpr int W = K::W, MOST = 64;  // tokens

    const int64_t dim;                 // of a value
    S *const rows;                     // room for the decoded values of a block, if they cannot be read in place
    float *const scales, *const lows;  // [64][groups of dims]
    int64_t form;
    int64_t group = 0, groups = 0;  // dims of a scale; scales of a token
    int64_t step = 0;               // from row to row; 0: not the same
    bool has_low = false;
    const char *row[MOST];

    static int64_t bytes(int64_t dim) {
        return Source<K>::bytes(dim, BLOCK) + 2 * up(MOST * most_groups(dim) * int64_t(sizeof(float)), 64);
    }

    FoundValues(int64_t v_dim, char *scratch)
        : dim(v_dim),
          rows(reinterpret_cast<S *>(scratch)),
          scales(reinterpret_cast<float *>(scratch + Source<K>::bytes(v_dim, BLOCK))),
          lows(scales + up(MOST * most_groups(v_dim), 16)) {}

    // Tokens low to high of the block at `first`, which begin in run `from` of a stretch.
    void find(const Source<K> &values, const Stretch &stretch, int from, int64_t first, int low, int high) {
        const Run &run = stretch.run[from];
        bool alike = in_place(run);
        int to = from;
        for (; to < stretch.count && stretch.run[to].first < first + high; ++to)
            alike &= stretch.run[to].part == run.part;
        form = alike ? run.part->form : int64_t(K::form);
        if (alike && form > REGARD_F16)
            group = run.part->group, groups = (dim + group - 1) / group, has_low = run.part->low;
        for (int i = from; i < to; ++i) {
            Run part = stretch.run[i];
            const int64_t before = first + low - part.first, end = first + high - part.first;
            if (end < part.count) part.count = end;
            if (before > 0) part.first += before, part.slot += before, part.count -= before;
            take(values, part, int(part.first - first - low), alike);
        }
        const int last = high - low - 1;  // see DecodeValues::mix_dims
        step = last ? row[1] - row[0] : 64;
        if (to == from + 1) return;  // rows of one run are evenly apart
        for (int j = 2; j <= last; ++j)
            if (row[j] - row[j - 1] != step) step = 0;
    }

    // Where a part ends, so that tokens beside one another change no bit; a pair of tokens may be of two.
    static int until_other(const Stretch &stretch, int run, int64_t first) {
        if (K::pairs || K::by_32) return int(BLOCK);
        const regard_part *const part = stretch.run[run].part;
        while (run < stretch.count && stretch.run[run].part == part) ++run;
        return run < stretch.count ? int(stretch.run[run].first - first) : int(BLOCK);
    }

  private:
    static int64_t most_groups(int64_t dim) { return (dim + 15) / 16; }

    // Whether its rows can be read in place: a vector of dims has one scale.
    bool in_place(const Run &run) const {
        if (!run.part) return false;
        const regard_part &p = *run.part;
        if (p.form == K::form) return true;
        if (p.form <= REGARD_F16) return is_same<S, float> && p.form >= REGARD_BF16;
        if (K::pairs || K::chained || (K::integers && p.form != REGARD_FP8 && is_segment(p))) return false;
        return sizeof(T) == 4 && !p.tiled && dim % W == 0 && (p.group % 16 == 0 || p.group >= dim);
    }

    // Whether values of a part are multiplied as integers, but for tokens beside those of other parts.
    bool is_segment([[maybe_unused]] const regard_part &p) const {
#if defined(REGARD_INTEGERS)
        return CodedSegment::fits(&p, dim);
#else
        return false;
#endif
    }

    // The tokens of a run, which begin at place j.
    void take(const Source<K> &values, const Run &run, int j, bool as_stored) {
        const char **to = row + j;
        if (!as_stored) {
            S *const mine = rows + j * dim;
            decode(run, values.head, dim, mine);
            for (int i = 0; i < run.count; ++i) to[i] = reinterpret_cast<const char *>(mine + i * dim);
            return;
        }
        const regard_part &p = *run.part;
        if (p.form <= REGARD_F16) {
            const char *at = values.row(run, 0);
            const int64_t apart = p.data_step * Source<K>::bytes_of(p.form);
            for (int i = 0; i < run.count; ++i) to[i] = at + i * apart;
            return;
        }
        const uint8_t *at = codes_of(p, run.page, values.head, run.slot);
        for (int i = 0; i < run.count; ++i) to[i] = reinterpret_cast<const char *>(at + i * p.data_step);
        widen_scales(p, scales_of(p, p.scale, run.page, values.head, run.slot), groups, run.count,
                     p.form == REGARD_FP8 ? Fp8::unit : 1, scales + j * groups);
        widen_scales(p, scales_of(p, p.low, run.page, values.head, run.slot), groups, run.count, 1, lows + j * groups);
    }

    static void widen_scales(const regard_part &p, const bf16 *from, int64_t count, int64_t tokens, float unit,
                             float *to) {
        constexpr int lanes = Vec<float>::lanes;
        if (!from) {
            for (int64_t i = 0; i < tokens * count; ++i) to[i] = 0;
        } else if (p.scale_step == count) {
            int64_t i = 0;
            for (; i + lanes <= tokens * count; i += lanes) store(to + i, load_wide(from + i) * unit);
            for (; i < tokens * count; ++i) to[i] = widen(from[i]) * unit;
        } else {
            for (int64_t j = 0; j < tokens; ++j)
                for (int64_t i = 0; i < count; ++i) to[j * count + i] = widen(from[j * p.scale_step + i]) * unit;
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
