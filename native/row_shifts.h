// What is subtracted in each row of a tile: the log-sum-exp from scores, delta = sum(dout * out) from dp.
#pragma once

#include "query_rows.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
struct RowShifts {
    using T = typename K::Wide;
    using V = typename K::V;
    using S = typename K::Stored;
    static constexpr int W = K::W;
    static constexpr double NEVER = -INFINITE;

    const regard_gradient &g;
    const regard_call &c;
    T *shift, *down;  // [64]: -lse, with the sink's share; delta less dlse

    // `again`: delta is known.
    void set_all(const Lanes &lanes, bool again) {
        for (int lane = 0; lane < LANES; ++lane) {
            if (lane < lanes.count) set(lanes, lane, again);
            else shift[lane] = T(NEVER), down[lane] = 0;
        }
    }

    // delta, shift and down of a row. One that saw nothing has none, whatever dout and dlse are.
    void set(const Lanes &lanes, int lane, bool again) {
        const int64_t row = row_number(c, lanes, lane);
        const T lse = static_cast<const T *>(c.lse)[row];
        T *const delta = static_cast<T *>(g.delta) + row;
        if (!again) *delta = lse == T(NEVER) ? 0 : dot(row_at<S>(g.dout, lanes, lane), row_at<S>(c.out, lanes, lane));
        const double sunk = sunk_of(lanes, lane);
        shift[lane] = lse == T(NEVER) ? T(NEVER) : T(-(double(lse) + sunk));
        down[lane] = *delta;
        if (g.dlse && lse != T(NEVER)) down[lane] -= T(static_cast<const T *>(g.dlse)[row] * (sunk ? ::exp(sunk) : 1));
    }

    // By how much the sink raises the log-sum-exp of a row.
    double sunk_of(const Lanes &lanes, int lane) const {
        const T lse = static_cast<const T *>(c.lse)[row_number(c, lanes, lane)];
        if (!c.sink || lse == T(NEVER)) return 0;
        return sink_share(lse, static_cast<const T *>(c.sink)[lanes.head_of(lane)]);
    }

    // log(exp(lse) + exp(sink)) - lse.
    static double sink_share(double lse, double sink) {
        return sink > lse ? sink - lse + ::log1p(::exp(lse - sink)) : ::log1p(::exp(sink - lse));
    }

    T dot(const S *a, const S *b) const {
        V sum{};
        int64_t i = 0;
        for (; i + W <= c.v_dim; i += W) sum = fma(load_wide(a + i), load_wide(b + i), sum);
        T lane[W], rest = 0;
        store(lane, sum);
        for (int n = W / 2; n; n /= 2)
            for (int l = 0; l < n; ++l) lane[l] += lane[l + n];
        for (; i < c.v_dim; ++i) rest = fma(widen(a[i]), widen(b[i]), rest);
        return lane[0] + rest;
    }

    // The error of a row's delta, which is corrected, from the sums of its p and of its ds. The ds of a row must add up
    // to 0, or to the gradient of lse where there is one. p is divided by its sum, which is 1 up to the rounding of
    // exponentials.
    T correct(const Lanes &lanes, int lane, T total, T changes) {
        if (!(total > 0)) return 0;
        T *const delta = static_cast<T *>(g.delta) + row_number(c, lanes, lane);
        const T right = (changes / total + down[lane]) * T(::exp(-sunk_of(lanes, lane)));
        const T wrong = right - *delta;
        *delta = right;
        return wrong;
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
