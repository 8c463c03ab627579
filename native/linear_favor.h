// Favor's features (Choromanski et al. 2021): exp(w_f . x - |x|^2 / 2) / sqrt(m) of up to 64 tokens.
//
//     stored_f = exp(max(w_f . x - most, -40))     top = most - |x|^2 / 2 - log(m) / 2     most: of w_f . x over f
//
// The feature is stored times exp(top). One matrix product, with features in lanes, and an exponential for each of its
// results, which are never elsewhere than where the features are to be: 64 of 64 rows are 16 KiB.
#pragma once

#include "exp.h"
#include "tile.h"

namespace regard {
namespace REGARD_ISA {

constexpr float FAVOR_SPREAD = 40;  // SPREAD of float32 in src/regard/describe/feature.py

// x: rows of `dim` floats, and zeros up to a whole vector. vectors: [blocks of 64 features][dim][64], zeros after the
// last. to: [blocks][64 rows][64], zeros up to a whole vector.
inline void map_favor(const float *x, int64_t stride, int64_t dim, int64_t count, const float *vectors,
                      int64_t features, float *to, float *tops) {
    constexpr int W = Vec<float>::lanes, SQUARE = LANES * LANES;
    for (int64_t f = 0; f < features; f += LANES) {
        const int64_t some = features - f < LANES ? features - f : LANES;
        multiply<Fused<float>, Along::across>(reinterpret_cast<const char *>(x), stride * 4, count, vectors + f * dim,
                                              dim, to + f * LANES, 0, int((some + W - 1) / W));
    }
    const auto at = [&](int64_t row, int64_t f) { return to + f / LANES * SQUARE + row * LANES + f % LANES; };
    const auto bits = [&](int64_t f) { return features - f >= W ? ~uint64_t(0) : (uint64_t(1) << (features - f)) - 1; };
    const float less = float(__builtin_log(double(features)) / 2);
    for (int64_t i = 0; i < count; i += W) {
        F most[W], squares[W];
        for (int r = 0; r < W; ++r) {
            most[r] = broadcast(-INFINITE), squares[r] = F{};
            if (i + r >= count) continue;
            for (int64_t f = 0; f < features; f += W)
                most[r] = larger(select(bits(f), load(at(i + r, f)), broadcast(-INFINITE)), most[r]);
            for (int64_t d = 0; d < dim; d += W) {
                const F part = load(x + (i + r) * stride + d);
                squares[r] = fma(part, part, squares[r]);
            }
        }
        transpose<float>(most);
        transpose<float>(squares);
        for (int r = 1; r < W; ++r) most[0] = larger(most[r], most[0]), squares[0] += squares[r];
        float mosts[W], top[W];
        store(mosts, most[0]);
        store(top, larger(most[0] - squares[0] * 0.5f - less, broadcast(-__FLT_MAX__)));
        for (int r = 0; r < W && i + r < count; ++r) {
            tops[i + r] = top[r];
            for (int64_t f = 0; f < features; f += W) {
                const F below = larger(load(at(i + r, f)) - mosts[r], broadcast(-FAVOR_SPREAD));
                store(at(i + r, f), select(bits(f), exp_below(below), F{}));
            }
        }
    }
}

}  // namespace REGARD_ISA
}  // namespace regard
