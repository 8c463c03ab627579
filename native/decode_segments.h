// Values of a block in codes that are multiplied without being decoded (coded_segment.h): which tokens these are, and
// their products, by the class that multiplies codes of their form.
#pragma once

#include "coded_values.h"
#include "coded_words.h"
#include "fp8_values.h"

#if defined(REGARD_INTEGERS)
namespace regard {
namespace REGARD_ISA {

// Weights of a few rows [16][128], and their outputs [16][width].
struct CodedRows {
    const float *weights;
    float *out;
    int64_t width;
    int count;
};

class DecodeSegments {
  public:
    int count;       // of segments
    uint32_t plain;  // groups of 16 tokens that are in none

    // Of the values of a block, whose first token is `first`, groups of 16 tokens for which `listed` has a bit.
    DecodeSegments(const Stretch &values, int64_t first, int64_t dim, uint32_t listed)
        : plain(listed), values_(values), first_(first), dim_(dim) {
        count = CodedSegment::segments(values, first, dim, segments_);
        for (int i = 0; i < count; ++i) {
            const Segment &some = segments_[i];
            groups_[i] = plain & ((1u << (some.high + 15) / 16) - (1u << some.low / 16));
            plain &= ~groups_[i];
        }
    }

    static int64_t bytes(int64_t dim) { return CodedValues::bytes(dim); }

    // How often `add` asks for lines.
    int64_t asks(int rows) const {
        int64_t all = 0;
        for (int i = 0; i < count; ++i)
            by_form(i, [&](auto of) {
                using Values = typename decltype(of)::Values;
                all += Values::asks(*segments_[i].part, __builtin_popcount(groups_[i]), dim_, rows);
            });
        return all;
    }

    // out += weights x values. kept(row, token): 16 tokens that are not hidden from a row.
    template <typename Kept>
    void add(int64_t head, const CodedRows &rows, const Kept &kept, char *scratch, Lines &lines) const {
        for (int i = 0; i < count; ++i)
            by_form(i, [&](auto of) {
                typename decltype(of)::Values mix(dim_, rows.width, rows.weights, rows.out, scratch);
                mix.add(segments_[i], values_, head, first_, groups_[i], rows.count, kept, lines);
            });
    }

  private:
    template <typename Class>
    struct Of {
        using Values = Class;
    };

    const Stretch &values_;
    const int64_t first_, dim_;
    Segment segments_[4];
    uint32_t groups_[4];

    // Calls work(Of<...>) with the class for the codes of segment i.
    template <typename Work>
    REGARD_INLINE void by_form([[maybe_unused]] int i, Work work) const {
#if defined(REGARD_PAIRS)
        if (segments_[i].part->form == REGARD_FP8) return work(Of<Fp8Values>{});
#endif
        work(Of<CodedValues>{});
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
#endif
