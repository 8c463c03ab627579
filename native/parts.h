// Keys and values in parts: where a token is, and what its elements are. Pages and codecs are known here and in
// codes.h, and nowhere else.
#pragma once

#include "codes.h"
#include "transpose.h"

namespace regard {
namespace REGARD_ISA {

// Keys or values as a call gives them in parts; no parts: they are a tensor.
struct Parts {
    const regard_part *all;
    int64_t count;

    explicit operator bool() const { return count > 0; }
};

REGARD_INLINE Parts keys_of(const regard_call &c) { return {c.k_parts, c.k_count}; }
REGARD_INLINE Parts values_of(const regard_call &c) { return {c.v_parts, c.v_count}; }

// Adjacent tokens in one page of a part, from `first` on, counted in the row. Beyond all parts: no part.
struct Run {
    const regard_part *part;
    int64_t page, slot;
    int64_t first, count;
};

// The tokens first to last of a batch row, run by run.
class Runs {
  public:
    Runs(const Parts &parts, int64_t batch, int64_t first, int64_t last)
        : part_(parts.all), end_(parts.all + parts.count), batch_(batch), at_(first), last_(last) {}

    bool next(Run &run) {
        if (at_ >= last_) return false;
        while (part_ != end_ && end_of(*part_) <= at_) begin_ = end_of(*part_++), page_ = -1;
        run.first = at_;
        if (part_ == end_) {
            run.part = nullptr, run.count = last_ - at_;
        } else {
            const regard_part &p = *part_;
            const int64_t slot = p.skip + at_ - begin_, until = least(end_of(p), last_);
            const int64_t number = slot == (page_ + 1) * p.page ? page_ + 1 : slot / p.page;  // most often the next
            page_ = number;
            run.part = part_, run.slot = slot - number * p.page;
            run.page = p.table ? p.table[batch_ * p.table_row + number] : batch_;
            run.count = least(p.page - run.slot, until - at_);
        }
        at_ += run.count;
        return true;
    }

  private:
    static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
    int64_t end_of(const regard_part &p) const { return p.ends ? p.ends[batch_] : p.end; }

    const regard_part *part_, *end_;
    const int64_t batch_;
    int64_t begin_ = 0, page_ = -1, at_, last_;  // page_: of the last run, or -1
};

// ---- elements, one by one -------------------------------------------------------------------------------------------

// The scales, or lows, of a slot of codes in rows, or of its tile: of dims or groups of them; per_token: of the slot
// and those after it.
REGARD_INLINE const bf16 *scales_of(const regard_part &p, const void *from, int64_t page, int64_t head, int64_t slot) {
    if (!from) return nullptr;
    const bf16 *at = static_cast<const bf16 *>(from) + page * p.scale_page + head * p.scale_head;
    return p.tiled && p.per_token ? at + slot : at + (p.tiled ? slot / p.group : slot) * p.scale_step;
}

// The codes of a slot in rows, or of its tile.
REGARD_INLINE const uint8_t *codes_of(const regard_part &p, int64_t page, int64_t head, int64_t slot) {
    const int64_t step = p.tiled ? slot / TOKENS : slot;
    return static_cast<const uint8_t *>(p.data) + page * p.data_page + head * p.data_head + step * p.data_step;
}

// Number `d` of a slot, of codes.
inline float coded_number(const regard_part &p, int64_t page, int64_t head, int64_t slot, int64_t d) {
    const uint8_t *codes = codes_of(p, page, head, slot);
    const bf16 *scale = scales_of(p, p.scale, page, head, slot), *low = scales_of(p, p.low, page, head, slot);
    const bool nibbles = p.form == REGARD_INT4;
    int64_t byte = d, high = 0, of = p.tiled ? (p.per_token ? 0 : d) : d / p.group;
    if (nibbles && p.tiled) byte = d / 2, high = d % 2;
    if (nibbles && !p.tiled) byte = d / 32 * 16 + d % 16, high = d % 32 / 16;
    const uint8_t code = codes[p.tiled ? byte * TOKENS + slot % TOKENS : byte];
    const float number = coded(p.form, nibbles ? code >> 4 * high & 15 : code);
    return fma(number, widen(scale[of]), low ? widen(low[of]) : 0.0f);
}

// ---- elements in rows -----------------------------------------------------------------------------------------------

// The first `count` lanes, rounded to S.
template <typename S>
REGARD_INLINE void put(S *to, F x, int64_t count) {
    constexpr int W = Vec<float>::lanes;
    if constexpr (sizeof(S) < 8) {
        if (count >= W) return store_narrow(to, x);
    }
    for (int64_t i = 0; i < W && i < count; ++i) to[i] = narrow<S>(x[i]);
}

template <typename S, typename From>
void plain_rows(const Run &run, int64_t head, int64_t dim, S *to) {
    constexpr int W = Vec<float>::lanes;
    const regard_part &p = *run.part;
    const From *from = static_cast<const From *>(p.data) + run.page * p.data_page + head * p.data_head;
    for (int64_t j = 0; j < run.count; ++j, to += dim) {
        const From *row = from + (run.slot + j) * p.data_step;
        int64_t d = 0;
        if constexpr (is_same<S, From>) {
            memcpy(static_cast<void *>(to), row, size_t(dim) * sizeof(S));
            d = dim;
        } else if constexpr (sizeof(S) < 8 && sizeof(From) < 8) {
            for (; d + W <= dim; d += W) store_narrow(to + d, load_wide(row + d));
        }
        for (; d < dim; ++d) to[d] = narrow<S>(widen(row[d]));
    }
}

// Dims d to `end` of a row, which have one scale, N vectors at a time while there are N; returns where it stopped.
template <int N, typename S, typename Code>
REGARD_INLINE int64_t code_dims(const uint8_t *codes, int64_t d, int64_t end, F scale, F low, S *to) {
    constexpr int W = Vec<float>::lanes;
    for (; d + N * W <= end; d += N * W) {
        F x[N];
        Code::rows(codes, d, x);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) put(to + d + n * W, fma(x[n], scale, low), W);
    }
    return d;
}

// Rows whose every vector has one scale.
template <int N, typename S, typename Code>
void code_vectors(const Run &run, int64_t head, int64_t dim, S *to) {
    const regard_part &p = *run.part;
    for (int64_t slot = run.slot; slot < run.slot + run.count; ++slot, to += dim) {
        const uint8_t *codes = codes_of(p, run.page, head, slot);
        const bf16 *scale = scales_of(p, p.scale, run.page, head, slot);
        const bf16 *low = scales_of(p, p.low, run.page, head, slot);
        int64_t d = 0;
        for (int64_t g = 0; d < dim; ++g) {
            const int64_t end = dim - d < p.group ? dim : d + p.group;
            const F by = broadcast(widen(scale[g]) * Code::unit), with = low ? broadcast(widen(low[g])) : F{};
            d = code_dims<N, S, Code>(codes, d, end, by, with, to);
            if (N > 1) d = code_dims<1, S, Code>(codes, d, end, by, with, to);
            if (d == end) continue;
            if (Code::nibbles) put(to + d, fma(Code::row(codes, d), by, with), end - d);
            else  // no byte beyond the row may be read
                for (int64_t i = d; i < end; ++i) to[i] = narrow<S>(coded_number(p, run.page, head, slot, i));
            d = end;
        }
    }
}

template <typename S, typename Code>
void code_rows(const Run &run, int64_t head, int64_t dim, S *to) {
    constexpr int W = Vec<float>::lanes;
    const regard_part &p = *run.part;
    if (p.group % (4 * W) == 0 || p.group >= dim) return code_vectors<4, S, Code>(run, head, dim, to);
    if (p.group % (2 * W) == 0) return code_vectors<2, S, Code>(run, head, dim, to);
    if (p.group % W == 0) return code_vectors<1, S, Code>(run, head, dim, to);
    for (int64_t slot = run.slot; slot < run.slot + run.count; ++slot, to += dim)
        for (int64_t d = 0; d < dim; ++d) to[d] = narrow<S>(coded_number(p, run.page, head, slot, d));
}

// bf16 widened, as many as a vector has lanes or fewer; none: 0.
REGARD_INLINE F widened(const bf16 *from, int64_t count) {
    constexpr int W = Vec<float>::lanes;
    if (!from) return F{};
    if (count >= W) return load_wide(from);
    F x{};
    for (int64_t i = 0; i < count; ++i) x[i] = widen(from[i]);
    return x;
}

// Dims d to d + 16 of a tile transposed: a byte each, [tokens][16], at `turned_at`. Those beyond the last are 0.
template <typename Code>
REGARD_INLINE void turn_dims(const uint8_t *codes, int64_t d, int64_t dim, uint8_t *to) {
    if (!Code::nibbles && d + TOKENS <= dim) return turn_bytes(codes + d * TOKENS, to);
    alignas(64) uint8_t rows[TOKENS * TOKENS];
    if (d + TOKENS > dim) memset(rows, 0, sizeof rows);
    typedef uint8_t Sixteen __attribute__((vector_size(16), aligned(1), may_alias));
    for (int64_t i = 0; i < TOKENS && d + i < dim; i += 1 + Code::nibbles) {
        const Sixteen x = *reinterpret_cast<const Sixteen *>(codes + (Code::nibbles ? (d + i) / 2 : d + i) * TOKENS);
        Sixteen *const row = reinterpret_cast<Sixteen *>(rows + i * TOKENS);
        row[0] = Code::nibbles ? Sixteen(x & 15) : x;
        if constexpr (Code::nibbles) row[1] = x >> 4;
    }
    turn_bytes(rows, to);
}

// Tiles store the codes of 16 tokens side by side for each dim. Blocks of 16 dims are transposed, as bytes.
template <typename S, typename Code>
void tile_rows(const Run &run, int64_t head, int64_t dim, S *to) {
    constexpr int W = Vec<float>::lanes, N = int(TOKENS) / W;
    const regard_part &p = *run.part;
    const int64_t end = run.slot + run.count;
    for (int64_t slot = run.slot / TOKENS * TOKENS; slot < end; slot += TOKENS) {
        const uint8_t *codes = codes_of(p, run.page, head, slot);
        const bf16 *scale = scales_of(p, p.scale, run.page, head, slot);
        const bf16 *low = scales_of(p, p.low, run.page, head, slot);
        const int first = int(slot < run.slot ? run.slot - slot : 0),
                  last = int(end - slot < TOKENS ? end - slot : TOKENS);
        for (int64_t d = 0; d < dim; d += TOKENS) {
            alignas(64) uint8_t turned[TOKENS * TOKENS];
            turn_dims<Code>(codes, d, dim, turned);
            F by[N], with[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                const int64_t at = d + n * W, count = dim - at;
                by[n] = widened(p.per_token ? nullptr : scale + at, count) * Code::unit;
                with[n] = widened(low && !p.per_token ? low + at : nullptr, count);
            }
            for (int i = first; i < last; ++i) {
                F x[N];
                Code::turned(turned + turned_at(i), x);
                S *const row = to + (slot + i - run.slot) * dim + d;
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                    if (p.per_token)
                        by[n] = broadcast(widen(scale[i]) * Code::unit),
                        with[n] = broadcast(low ? widen(low[i]) : 0.0f);
                    put(row + n * W, fma(x[n], by[n], with[n]), dim - d - n * W);
                }
            }
        }
    }
}

// The tokens of a run as contiguous rows of `dim` elements of S.
template <typename S>
__attribute__((noinline)) void decode(const Run &run, int64_t head, int64_t dim, S *to) {
    if (!run.part) {
        memset(static_cast<void *>(to), 0, size_t(run.count * dim) * sizeof(S));
        return;
    }
    const bool tiled = run.part->tiled;
    switch (run.part->form) {
        case REGARD_F64:
            return plain_rows<S, double>(run, head, dim, to);
        case REGARD_F32:
            return plain_rows<S, float>(run, head, dim, to);
        case REGARD_BF16:
            return plain_rows<S, bf16>(run, head, dim, to);
        case REGARD_F16:
            return plain_rows<S, f16>(run, head, dim, to);
        case REGARD_INT8:
            return tiled ? tile_rows<S, Int8>(run, head, dim, to) : code_rows<S, Int8>(run, head, dim, to);
        case REGARD_INT4:
            return tiled ? tile_rows<S, Int4>(run, head, dim, to) : code_rows<S, Int4>(run, head, dim, to);
        default:
            return tiled ? tile_rows<S, Fp8>(run, head, dim, to) : code_rows<S, Fp8>(run, head, dim, to);
    }
}

}  // namespace REGARD_ISA
}  // namespace regard
