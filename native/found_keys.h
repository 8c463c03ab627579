// Where the keys of a block are, for a few rows, W at a time: rows of memory, which are transposed in registers; tiles
// of codes, which are decoded as they are met; tiles whose codes are multiplied as they are. Keys that are stored in
// any other way are decoded into rows first.
#pragma once

#include "fp8_scores.h"
#include "rows.h"

namespace regard {
namespace REGARD_ISA {

// W keys: how their elements are read, their column, and which lanes are theirs.
struct KeyGroup {
    int64_t form;
    bool per_token;
    int at, from, to;
    const char *const *row;
    const uint8_t *codes;
    const bf16 *scale, *low;
};

// Adds the products of R rows, from the address q on of the first and `of_row` bytes apart, with a unit of G times W
// keys.
template <typename P, typename V, int R, int G>
REGARD_INLINE void meet_rows(const typename P::Vector (&x)[G], const char *q, int64_t of_row, V (&sum)[R][G]) {
#pragma GCC unroll 8
    for (int s = 0; s < R; ++s) {
        const typename P::Vector one = P::repeat(q + s * of_row);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sum[s][g] = P::madd(x[g], one, sum[s][g]);
    }
}

// Scores of R rows with G groups of keys, rows of 128.
template <typename T, typename V, int R, int G>
REGARD_INLINE void put_scores(T *scores, const KeyGroup *keys, const V (&sum)[R][G]) {
    constexpr int W = int(sizeof(V) / sizeof(T));
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
        for (int s = 0; s < R; ++s) {
            T *const row = scores + s * BLOCK;
            if (keys[g].from == 0 && keys[g].to == W) store(row + keys[g].at, sum[s][g]);
            else
                for (int i = keys[g].from; i < keys[g].to; ++i) row[keys[g].at + i] = sum[s][g][i];
        }
}

template <typename K>
struct FoundKeys {
    using T = typename K::Wide;
    using Unit = typename K::Unit;
    using S = typename K::Stored;
    static constexpr int W = K::W;

    const int64_t dim;    // of a key
    char *const scratch;  // room for the decoded keys of a block, if they cannot be read in place
    int count = 0;        // of groups: rows, then
    int tiles = 0;        // from this one on codes that are decoded, then
    int coded = 0;        // from this one on codes that are multiplied as they are
    KeyGroup groups[BLOCK + BLOCK / W];

    FoundKeys(int64_t qk_dim, char *rows) : dim(qk_dim), scratch(rows) {}

    // Tokens from `first` on; of those in rows whole groups of 16, for which `listed` has a bit.
    void find(const Source<K> &keys, const Stretch &stretch, int64_t first, uint32_t listed) {
        find_rows(keys, stretch, first, listed);
        tiles = count;
        // behind the rows, whose lanes may overlap theirs
        for (int i = 0; i < stretch.count; ++i)
            if (is_tiled(stretch.run[i]) && !as_coded(stretch.run[i])) find_tiles(keys, stretch.run[i], first);
        coded = count;
        for (int i = 0; i < stretch.count; ++i)
            if (as_coded(stretch.run[i])) find_tiles(keys, stretch.run[i], first);
    }

    // Whether two tiles that are multiplied as they are, i and the next, have the same scales, or scales of tokens.
    // Tiles of 8 tokens besides are the halves of one of 16.
    bool is_pair(int i) const {
        const KeyGroup &one = groups[i], &next = groups[i + 1];
        return i + 1 < count && one.form == next.form && one.per_token == next.per_token &&
               (one.per_token ? !one.low == !next.low : one.scale == next.scale) &&
               (K::W == TOKENS || next.codes == one.codes + K::W);
    }

  private:
    const char *row[BLOCK];

    bool is_tiled(const Run &run) const {
        if (K::by_32 || sizeof(T) != 4 || !run.part || run.part->form <= REGARD_F16 || !run.part->tiled) return false;
#if defined(REGARD_INTEGERS)
        if (K::integers && run.part->form != REGARD_FP8) return dim <= CodedScores<Unit>::DIMS;
#endif
        return true;
    }
    // Whether its codes meet queries that are times their scales: as integers, or e4m3 (fp8_scores.h).
    bool as_coded(const Run &run) const {
#if defined(REGARD_FP8_SCORES)
        return K::integers && is_tiled(run);
#else
        return K::integers && is_tiled(run) && run.part->form != REGARD_FP8;
#endif
    }

    // Elements of a narrower type, which are widened as they are loaded.
    static bool is_narrow(const Run &run) {
        return is_same<S, float> && run.part && (run.part->form == REGARD_BF16 || run.part->form == REGARD_F16);
    }

    int64_t form_of(const Stretch &stretch) const {
        int64_t form = -1;
        for (int i = 0; i < stretch.count; ++i) {
            const Run &run = stretch.run[i];
            if (is_tiled(run)) continue;
            if (!is_narrow(run) || (form >= 0 && form != run.part->form)) return K::form;
            form = run.part->form;
        }
        return form < 0 ? int64_t(K::form) : form;
    }

    void find_rows(const Source<K> &keys, const Stretch &stretch, int64_t first, uint32_t listed) {
        const int64_t form = form_of(stretch);
        uint32_t some = 0;
        int done = 0;  // rows below are known
        for (int i = 0; i < stretch.count; ++i) {
            const Run &run = stretch.run[i];
            if (is_tiled(run)) continue;
            const int low = int(run.first - first), high = low + int(run.count);
            const char *at;
            int64_t step;
            if (run.part && run.part->form == form) {
                at = keys.row(run, 0);
                step = run.part->data_step * Source<K>::bytes_of(form);
            } else {
                S *rows = reinterpret_cast<S *>(scratch) + low * dim;
                decode(run, keys.head, dim, rows);
                at = reinterpret_cast<const char *>(rows), step = dim * int64_t(sizeof(S));
            }
            const int begin = low / 16 * 16, end = (high + 15) / 16 * 16;
            for (int j = done > begin ? done : begin; j < low; ++j) row[j] = at;  // lanes that nobody looks at
            for (int j = low; j < high; ++j) row[j] = at + (j - low) * step;
            for (int j = high; j < end; ++j) row[j] = at;
            done = high;
            for (int j = begin; j < end; j += 16) some |= 1u << j / 16;
        }
        for (int j = 0; j < BLOCK; j += W)
            if (some & listed & 1u << j / 16)
                groups[count++] = {form, false, j, 0, W, row + j, nullptr, nullptr, nullptr};
    }

    void find_tiles(const Source<K> &keys, const Run &run, int64_t first) {
        const regard_part &p = *run.part;
        const int column = int(run.first - first);
        for (int64_t slot = run.slot / W * W; slot < run.slot + run.count; slot += W) {
            const int at = column + int(slot - run.slot);
            groups[count++] = {p.form,
                               bool(p.per_token),
                               at,
                               at < column ? column - at : 0,
                               least(W, column + run.count - at),
                               nullptr,
                               codes_of(p, run.page, keys.head, slot) + slot % TOKENS,
                               scales_of(p, p.scale, run.page, keys.head, slot),
                               scales_of(p, p.low, run.page, keys.head, slot)};
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
