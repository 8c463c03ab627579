// Where the tokens of a span are stored, 16 after 16: the same for a tensor and for pages.
#pragma once

#include "source.h"

namespace regard {
namespace REGARD_ISA {

struct Sixteens {
    static constexpr int EACH = 16, COUNT = int(SPAN) / EACH, AFTER = 32;

    const char *at[COUNT + AFTER];  // behind those of the span what is read next, as far as it is asked for
    bool in_one;                    // those of the span one after another

    // The span from token `first` on, if whole sixteens lie together as the call's type, row after row; if they must
    // be, all in one page.
    template <typename K>
    bool find(const Source<K> &of, int64_t first, bool must) {
        Run run;
        if (must && !(Runs(of.parts, of.batch, first, first + SPAN).next(run) && run.count == SPAN)) return false;
        in_one = true;
        if (found(of, first, COUNT, at) < COUNT) return false;
        const int64_t step = EACH * of.dim * int64_t(sizeof(typename K::Stored));
        for (int i = 1; i < COUNT; ++i) in_one &= at[i] == at[i - 1] + step;
        return true;
    }

    // Behind the span up to `wanted` times 16 tokens of others, from `first` on, then the last again until there are
    // `count`. How many of these lie together.
    template <typename K>
    int follow(const Source<K> &other, int64_t first, int wanted, int count) {
        const int n = found(other, first, wanted, at + COUNT);
        for (int i = n; i < count; ++i) at[COUNT + i] = at[COUNT + i - 1];
        return n;
    }
    void follow(const Sixteens &other, int count) {
        for (int i = 0; i < count; ++i) at[COUNT + i] = other.at[i];
    }

  private:
    template <typename K>
    static int found(const Source<K> &of, int64_t first, int count, const char **to) {
        const int64_t step = EACH * of.dim * int64_t(sizeof(typename K::Stored)), last = first + count * EACH;
        int n = 0;
        Run run;
        for (Runs runs(of.parts, of.batch, first, last); runs.next(run);) {
            if (run.count % EACH || !Source<K>::is_own(run) || run.part->data_step != of.dim) break;
            const char *row = of.row(run, 0);
            for (int64_t j = 0; j < run.count; j += EACH, row += step) to[n++] = row;
        }
        return n;
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
