// The sums of a few rows over a span of keys, and how those of all spans become the result: merged in order, divided by
// their totals, rounded.
#pragma once

#include "forward_sums.h"

namespace regard {
namespace REGARD_ISA {

constexpr int FEW = 16;  // rows

// Sums [rows][width], not yet divided by their totals; lanes are dims.
template <typename K>
struct DecodeSums {
    using T = typename K::Wide;
    static constexpr T NEVER = -T(INFINITE);

    T *out, *top, *total;

    static int64_t wide(const regard_call &c) { return up(c.v_dim, K::W); }  // of a row, whole vectors
    static int64_t bytes(const regard_call &c) { return up(FEW * (wide(c) + 2) * int64_t(sizeof(T)), 64); }
    static DecodeSums at(const regard_call &c, char *memory) {
        T *out = reinterpret_cast<T *>(memory);
        return {out, out + FEW * wide(c), out + FEW * (wide(c) + 1)};
    }

    // No key was seen: `out` is not looked at.
    void clear(int rows) const {
        for (int r = 0; r < rows; ++r) top[r] = NEVER, total[r] = 0;
    }
    bool empty(int r) const { return total[r] == 0 && top[r] == NEVER; }
};

template <typename K>
struct DecodeMerge {
    using T = typename K::Wide;
    using V = typename K::V;
    using S = typename K::Stored;
    using Sums = DecodeSums<K>;
    static constexpr int W = K::W;

    const regard_call &c;
    const T unit, factor;  // of a score; to the exponent of 2
    const int64_t width;

    // All spans of some rows merged in order, and the result written. `parts` are `stride` bytes apart.
    void finish(const Lanes &lanes, char *parts, int64_t stride, int64_t spans) const {
        alignas(64) T top[FEW], total[FEW], share[FEW], lse[FEW];
        for (int i = 0; i < FEW; ++i) top[i] = Sums::NEVER, total[i] = 0;
        const Sums whole = Sums::at(c, parts);
        for (int r = 0; r < lanes.count; ++r) {
            bool first = true;
            for (int64_t s = 0; s < spans; ++s) {
                const Sums p = Sums::at(c, parts + s * stride);
                if (p.empty(r)) continue;
                if (first) take(r, p, whole, top[r], total[r]);
                else merge(r, p, whole, top[r], total[r]);
                first = false;
            }
        }
        for (int v = 0; v < lanes.count; v += W) finished<T>(load(top + v), load(total + v), unit, lse + v, share + v);
        for (int r = 0; r < lanes.count; ++r) write(lanes, r, whole.out + r * width, lse[r], share[r]);
    }

  private:
    void take(int r, const Sums &from, const Sums &to, T &top, T &total) const {
        top = from.top[r], total = from.total[r];
        if (from.out != to.out) memcpy(to.out + r * width, from.out + r * width, size_t(width) * sizeof(T));
    }

    void merge(int r, const Sums &from, const Sums &to, T &top, T &total) const {
        const T a = top, b = from.top[r];
        top = a > b ? a : b;
        const T wa = a == top ? T(1) : exp2(broadcast(T((a - top) * factor)))[0];
        const T wb = b == top ? T(1) : exp2(broadcast(T((b - top) * factor)))[0];
        total = fma(from.total[r], wb, T(total * wa));
        for (int64_t d = 0; d < width; d += W) {
            T *at = to.out + r * width + d;
            store(at, fma(load(from.out + r * width + d), broadcast(wb), load(at) * wa));
        }
    }

    void write(const Lanes &lanes, int r, const T *sums, T lse, T share) const {
        const int64_t h = lanes.head_of(r), i = lanes.query_of(r);
        if (c.sink) share = sunk(lse, share, static_cast<const T *>(c.sink)[h]);
        static_cast<T *>(c.lse)[(lanes.batch * c.heads + h) * c.queries + i] = lse;
        S *out = static_cast<S *>(c.out.data) + lanes.batch * c.out.batch + h * c.out.head + i * c.out.token;
        for (int64_t d = 0; d < c.v_dim; d += W) {
            const V x = share == 0 ? V{} : load(sums + d) * share;
            if (d + W <= c.v_dim) {
                store_narrow(out + d, x);
                continue;
            }
            S last[W];  // by a vector as well: bf16 below the normal ones become 0 there
            store_narrow(last, x);
            memcpy(out + d, last, size_t(c.v_dim - d) * sizeof(S));
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
