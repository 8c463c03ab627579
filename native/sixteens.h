// The addresses of the tokens of adjacent blocks of a span, one for each 16: the same for a tensor and for pages.
// Tokens behind the last whole sixteen are copied, with rows of 0 behind them, just before they are read: by then they
// are on their way.
#pragma once

#include "source.h"

namespace regard {
namespace REGARD_ISA {

struct Sixteens {
    static constexpr int EACH = 16, MOST = int(SPAN) / EACH, AFTER = 64;

    const char *at[MOST + AFTER];  // of the blocks, then of what is read next, as far as it is prefetched
    int count;                     // of the blocks' sixteens
    int64_t bytes;                 // of 16 tokens
    bool in_one;                   // whether those of the blocks are contiguous
    char *copy;                    // room for 16 tokens
    int64_t left;                  // of the last sixteen the bytes that there are, if not all

    int tokens() const { return count * EACH; }

    // False unless every 16 of `tokens` from `first` on are contiguous rows of the call's type; with `one_page`, unless
    // all are in one page. room: for 16 tokens.
    template <typename K>
    bool find(const Source<K> &of, int64_t first, int64_t tokens, bool one_page, char *room) {
        Run run;
        const int whole = int(tokens) / EACH;
        const int64_t end = first + tokens;
        if (one_page && !(Runs(of.parts, of.batch, first, end).next(run) && run.count == tokens)) return false;
        bytes = EACH * of.dim * int64_t(sizeof(typename K::Stored));
        if (!bytes || found(of, first, whole, at) < whole) return false;
        int64_t apart = 0;
        for (int i = 0; i < whole; ++i) apart |= at[i] - at[0] - i * bytes;
        in_one = !apart;
        count = whole, copy = room, left = 0;
        return tokens % EACH == 0 || add_some(of, first + whole * EACH, tokens % EACH);
    }

    // A sixteen of which there are `rows` tokens, from `first` on.
    template <typename K>
    bool add_some(const Source<K> &of, int64_t first, int64_t rows) {
        Run run;
        if (!Runs(of.parts, of.batch, first, first + rows).next(run)) return false;
        if (run.count != rows || !Source<K>::is_own(run) || run.part->data_step != of.dim) return false;
        left = rows * (bytes / EACH);
        at[count++] = of.row(run, 0);
        return true;
    }

    // Before the last sixteen is read.
    void fill_last() {
        if (!left) return;
        memcpy(copy, at[count - 1], size_t(left));
        memset(copy + left, 0, size_t(bytes - left));
        at[count - 1] = copy, left = 0;
    }

    // What is read behind the blocks: `times` as many bytes as 16 of their tokens have, at `next`, of which each holds
    // `each` bytes and there are `known`. Behind the last nothing is known, and it is repeated.
    void follow(int times, const char *const *next, int64_t each, int known) {
        for (int i = 0; i < times; ++i) {
            const int64_t from = i * bytes / each;
            at[count + i] = from < known ? next[from] + i * bytes % each : at[count + i - 1];
        }
    }

    // The addresses of up to `most` times 16 tokens from `first` on, until some are stored otherwise. How many.
    template <typename K>
    static int found(const Source<K> &of, int64_t first, int most, const char **to) {
        const int64_t each = EACH * of.dim * int64_t(sizeof(typename K::Stored));
        int n = 0;
        Run run;
        for (Runs runs(of.parts, of.batch, first, first + most * EACH); runs.next(run);) {
            if (run.count % EACH || !Source<K>::is_own(run) || run.part->data_step != of.dim) break;
            const char *row = of.row(run, 0);
            for (int64_t j = 0; j < run.count; j += EACH, row += each) to[n++] = row;
        }
        return n;
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
