// The tokens of one head of one batch row, however they are stored: a tensor is one plain part.
#pragma once

#include "caches.h"
#include "rows.h"

namespace regard {
namespace REGARD_ISA {

// What is read of a block: the runs of some of its tokens, in order.
struct Stretch {
    int count = 0;
    Run run[BLOCK];
};

// Memory that will be read, prefetched in the order of addresses, a few lines at a time and evenly: bursts come later.
class Lines {
  public:
    static constexpr int LINE = 64, SPARSE = 512;

    Lines() : into_first_(caches().asks_into_first), count_(0) {}

    void clear() { count_ = 0, lines_ = 0, place_ = {}; }
    // One line of each `step` bytes.
    void add(const void *from, int64_t bytes, int step = LINE) {
        if (count_ == SPOTS || bytes <= 0) return;
        const char *at = static_cast<const char *>(from);
        if (!count_) place_.at = at, place_.end = at + bytes;
        spots_[count_++] = {at, at + bytes, step};
        lines_ += (bytes + step - 1) / step;
    }
    // All of them in this many calls.
    void share(int64_t times) { place_.pace = times > 0 ? int((lines_ * WHOLE + times - 1) / times) : 0; }

    // Where it got to, for loops that keep that in registers.
    struct Place {
        const char *at = nullptr, *end = nullptr;
        int pace = 0, due = 0, spot = 0;  // pace, due: in lines / WHOLE
    };
    REGARD_INLINE Place place() const { return place_; }
    REGARD_INLINE void back(const Place &place) { place_ = place; }
    REGARD_INLINE void ask(Place &p) const {
        if (p.at == p.end) return;
        for (p.due += p.pace; p.due >= WHOLE; p.due -= WHOLE) {
            if (into_first_) __builtin_prefetch(p.at);
            else __builtin_prefetch(p.at, 0, 2);  // into the second
            p.at += spots_[p.spot].step;          // in a register it would cost AVX2 a tenth
            if (__builtin_expect(p.at >= p.end, 0)) {
                if (++p.spot == count_) {
                    p.at = p.end;
                    return;
                }
                p.at = spots_[p.spot].from, p.end = spots_[p.spot].end;
            }
        }
    }
    REGARD_INLINE void ask() { ask(place_); }

  private:
    static constexpr int SPOTS = 4 * BLOCK, WHOLE = 256;
    struct Spot {
        const char *from, *end;
        int step;
    };
    const bool into_first_;
    int count_;
    int64_t lines_ = 0;
    Place place_;
    Spot spots_[SPOTS];
};

template <typename K>
struct Source {
    using S = typename K::Stored;

    const regard_part tensor;  // the tensor as a part
    const Parts parts;
    const int64_t batch, head, dim;

    Source(const Parts &p, const regard_tensor &t, int64_t b, int64_t h, int64_t d)
        : tensor(whole(t)), parts(p ? p : Parts{&tensor, 1}), batch(b), head(h), dim(d) {}
    Source(const Source &) = delete;

    // What `some` may need for `count` tokens.
    static int64_t bytes(int64_t dim, int64_t tokens) { return up(tokens * dim * int64_t(sizeof(S)), 64); }

    // Tokens first to first + count: in place if they are contiguous, else in `scratch`.
    Tokens<K> some(int64_t first, int64_t count, char *scratch) const {
        S *rows = reinterpret_cast<S *>(scratch);
        Run run;
        for (Runs runs(parts, batch, first, first + count); runs.next(run);) {
            if (run.count == count && is_own(run))
                return {reinterpret_cast<const S *>(row(run, 0)), run.part->data_step, dim, first};
            decode(run, head, dim, rows + (run.first - first) * dim);
        }
        return {rows, dim, dim, first};
    }

    // Tokens first to last, at most a block.
    void find(int64_t first, int64_t last, Stretch &found) const {
        found.count = 0;
        for (Runs runs(parts, batch, first, last); runs.next(found.run[found.count]);) ++found.count;
    }

    // Rows from a token on, to be prefetched; none if they are no tensor.
    Ahead::Part ahead(int64_t token, int64_t count) const {
        const int64_t item = sizeof(S);
        if (parts.all != &tensor) return {nullptr, 0, 0, 0};
        const char *row = static_cast<const char *>(tensor.data) +
                          (batch * tensor.data_page + head * tensor.data_head + token * tensor.data_step) * item;
        return {row, tensor.data_step * item, dim * item, count};
    }

    // Plain elements of the call's type.
    static bool is_own(const Run &run) { return run.part && run.part->form == K::form; }

    // Token j of a run of plain elements.
    const char *row(const Run &run, int64_t j) const {
        const regard_part &p = *run.part;
        const int64_t at = run.page * p.data_page + head * p.data_head + (run.slot + j) * p.data_step;
        return static_cast<const char *>(p.data) + at * bytes_of(p.form);
    }

    static int64_t bytes_of(int64_t form) { return form == REGARD_F64 ? 8 : form == REGARD_F32 ? 4 : 2; }

    // The memory of a stretch. `in_order`: plain elements will be read row after row, by loads that the machine's own
    // prefetching follows. Then a line of each 512 bytes does, so that pages are looked up in time; every one would
    // take the places that those loads need (Zen 4; how it is on Zen 5 is not known). Where the second cache holds
    // lines that are asked for far ahead, every one does better on AVX-512: 0.85 to 0.94 with one row (caches.h), on
    // AVX2 1.0 to 1.03.
    static int step_of_lines(bool in_order) {
        const bool each = caches().asks_into_first || (VECTOR_BYTES == 64 && caches().lists_each);
        return in_order && !each ? Lines::SPARSE : Lines::LINE;
    }
    void list(const Stretch &stretch, Lines &lines, bool in_order = false) const {
        const int step = step_of_lines(in_order);
        for (int i = 0; i < stretch.count; ++i) {
            const Run &run = stretch.run[i];
            if (!run.part) continue;
            const regard_part &p = *run.part;
            if (p.form <= REGARD_F16)
                list(row(run, 0), dim * bytes_of(p.form), p.data_step * bytes_of(p.form), run.count, lines, step);
            else list_codes(run, lines);
        }
    }

    // Whether a block of these rows takes a quarter or more of the sets of the second level cache that their addresses
    // map to: rows of 512 bytes, 4 KiB apart, map to an eighth of all sets.
    bool crowds() const {
        const regard_part &p = parts.all[0];
        if (p.form > REGARD_F16) return false;
        constexpr int64_t PAGE = 4096;
        const int64_t bytes = dim * bytes_of(p.form), stride = p.data_step * bytes_of(p.form);
        if (stride <= bytes) return false;                                     // also 0, of a token that is repeated
        const int64_t apart = stride & -stride;                                // the largest power of two in it
        const int64_t covered = apart >= PAGE ? bytes : PAGE / apart * bytes;  // of each page
        return BLOCK * bytes * 4 * PAGE >= caches().second * covered;
    }

  private:
    static regard_part whole(const regard_tensor &t) {
        constexpr int64_t all = INT64_MAX / 2;
        // field by field: to clear them first is `rep stos`, some 30 cycles
        return {K::form, all,     nullptr, 0, all, 0,       nullptr, 0, 0, t.data, t.batch,
                t.head,  t.token, 0,       0, 0,   nullptr, nullptr, 0, 0, 0};
    }

    void list_codes(const Run &run, Lines &lines) const {
        const regard_part &p = *run.part;
        const int64_t last = run.slot + run.count - 1,
                      rows = p.tiled ? last / TOKENS - run.slot / TOKENS + 1 : run.count;
        const int64_t units = p.form != REGARD_INT4 ? dim : p.tiled ? (dim + 1) / 2 : (dim + 31) / 32 * 16;
        list(codes_of(p, run.page, head, run.slot), p.tiled ? units * TOKENS : units, p.data_step, rows, lines);
        const bool by_token = p.tiled && p.per_token;
        const int64_t scales = by_token ? 1 : p.tiled ? last / p.group - run.slot / p.group + 1 : run.count;
        const int64_t numbers = by_token ? run.count : p.tiled ? dim : (dim + p.group - 1) / p.group;
        list(scales_of(p, p.scale, run.page, head, run.slot), 2 * numbers, 2 * p.scale_step, scales, lines);
        if (p.low) list(scales_of(p, p.low, run.page, head, run.slot), 2 * numbers, 2 * p.scale_step, scales, lines);
    }

    static void list(const void *from, int64_t bytes, int64_t stride, int64_t rows, Lines &lines,
                     int step = Lines::LINE) {
        if (bytes == stride) return lines.add(from, bytes * rows, step);  // others are no one stream
        for (int64_t i = 0; i < rows; ++i) lines.add(static_cast<const char *>(from) + i * stride, bytes);
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
