// The addresses of a span's tokens, one for each 16: the same for a tensor and for pages.
#pragma once

#include "source.h"

namespace regard {
namespace REGARD_ISA {

struct Sixteens {
    static constexpr int EACH = 16, COUNT = int(SPAN) / EACH, AFTER = 64;

    const char *at[COUNT + AFTER];  // of the span, then of what is read next, as far as it is prefetched
    int64_t bytes;                  // of 16 tokens
    bool in_one;                    // whether those of the span are contiguous

    // False unless every 16 tokens are contiguous rows of the call's type; with `one_page`, unless the whole span is
    // in one page.
    template <typename K>
    bool find(const Source<K> &of, int64_t first, bool one_page) {
        Run run;
        if (one_page && !(Runs(of.parts, of.batch, first, first + SPAN).next(run) && run.count == SPAN)) return false;
        bytes = EACH * of.dim * int64_t(sizeof(typename K::Stored));
        if (!bytes || found(of, first, COUNT, at) < COUNT) return false;
        int64_t apart = 0;
        for (int i = 0; i < COUNT; ++i) apart |= at[i] - at[0] - i * bytes;
        in_one = !apart;
        return true;
    }

    // What is read behind the span: `count` times as many bytes as 16 of its tokens have, at `next`, of which each
    // holds `each` bytes and there are `known`. Behind the last nothing is known, and it is repeated.
    void follow(int count, const char *const *next, int64_t each, int known) {
        for (int i = 0; i < count; ++i) {
            const int64_t from = i * bytes / each;
            at[COUNT + i] = from < known ? next[from] + i * bytes % each : at[COUNT + i - 1];
        }
    }

    // The addresses of up to `count` times 16 tokens from `first` on, until some are stored otherwise. How many.
    template <typename K>
    static int found(const Source<K> &of, int64_t first, int count, const char **to) {
        const int64_t each = EACH * of.dim * int64_t(sizeof(typename K::Stored));
        int n = 0;
        Run run;
        for (Runs runs(of.parts, of.batch, first, first + count * EACH); runs.next(run);) {
            if (run.count % EACH || !Source<K>::is_own(run) || run.part->data_step != of.dim) break;
            const char *row = of.row(run, 0);
            for (int64_t j = 0; j < run.count; j += EACH, row += each) to[n++] = row;
        }
        return n;
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
