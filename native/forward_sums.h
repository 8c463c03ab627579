// Running sums of a softmax, lanes are queries: what a tile has of the keys so far.
//
// The maximum is only moved when a score exceeds it by 2^8: then weights are at most 256, sums lose nothing, and
// rescaling the output becomes rare. (Online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867; the rare rescaling:
// as in the fourth FlashAttention.)
#pragma once

#include "rows.h"

namespace regard {
namespace REGARD_ISA {

// The log-sum-exp of rows, and what their sums are multiplied with. No key was seen: -inf and 0.
template <typename T>
REGARD_INLINE void finished(typename Vec<T>::type top, typename Vec<T>::type total, T unit, T *lse, T *share) {
    using V = typename Vec<T>::type;
    const IntVec<T> empty = total == T(0);
    const V some = empty ? V{} + T(1) : total;
    store(lse, empty ? broadcast(T(-INFINITE)) : top * unit + natural_log<T>(some));
    store(share, empty ? V{} : T(1) / some);
}

// The share of a row's sums where a sink takes weight as well: sums / total * sigmoid(lse - sink).
template <typename T>
T sunk(T lse, T share, T sink) {
    if (share == 0) return 0;
    const double below = double(sink) - double(lse);
    return share * T(below > 0 ? ::exp(-below) / (1 + ::exp(-below)) : 1 / (1 + ::exp(below)));
}

// The sums over some keys: out [v_dim][64], not yet divided by total.
template <typename K>
struct Sums {
    using T = typename K::Wide;
    using V = typename K::V;
    static constexpr int W = K::W;
    static constexpr double NEVER = -INFINITE;

    T *out, *top, *total;
    int64_t dim;
    T factor;  // of a score, to the exponent of 2

    static int64_t bytes(int64_t dim) { return out_bytes(dim) + 2 * LANES * int64_t(sizeof(T)); }
    static int64_t out_bytes(int64_t dim) { return (K::tiled ? up(dim, 16) : dim) * LANES * int64_t(sizeof(T)); }

    Sums() = default;
    Sums(char *at, int64_t v_dim, T exponent)
        : out(reinterpret_cast<T *>(at)),
          top(reinterpret_cast<T *>(at + out_bytes(v_dim))),
          total(top + LANES),
          dim(v_dim),
          factor(exponent) {}

    void clear(int vectors) {
        for (int v = 0; v < vectors; ++v) store(top + v * W, broadcast(T(NEVER))), store(total + v * W, V{});
        for (int64_t i = 0; i < dim; ++i)
            for (int v = 0; v < vectors; ++v) store(out + i * LANES + v * W, V{});
    }

    // Sums whose output the first product will write.
    void start(const T *found, int vectors) {
        for (int v = 0; v < vectors; ++v) store(top + v * W, load(found + v * W)), store(total + v * W, V{});
    }

    // The maximum moved where it must be; shift: what is taken from scores. (Not fma(score, factor, -shift * factor):
    // that rounds the second product, by more than the exponent of any weight where scores are large.)
    void raise(const T *most, T *shift, int vectors) {
        bool rescaled = false;
        for (int v = 0; v < vectors; ++v) {
            const V found = load(most + v * W), old = load(top + v * W);
            const IntVec<T> higher = (found - old) * factor > T(8);
            const V now = any<T>(higher) ? (higher ? found : old) : old;
            store(shift + v * W, now == T(NEVER) ? V{} : now);
            if (any<T>(higher)) rescale(v, higher, now), rescaled = true;
        }
        if (rescaled) stay_awake<K>();
    }

    // These, and those of other keys.
    void merge(const Sums &other, int vectors) {
        alignas(64) T mine[LANES], yours[LANES];
        for (int v = 0; v < vectors; ++v) {
            const V a = load(top + v * W), b = load(other.top + v * W);
            const V most = a > b ? a : b;
            const V wa = a == most ? broadcast(T(1)) : exp2((a - most) * factor);
            const V wb = b == most ? broadcast(T(1)) : exp2((b - most) * factor);
            store(mine + v * W, wa);
            store(yours + v * W, wb);
            store(top + v * W, most);
            store(total + v * W, fma(load(other.total + v * W), wb, load(total + v * W) * wa));
        }
        for (int64_t i = 0; i < dim; ++i)
            for (int v = 0; v < vectors; ++v) {
                T *at = out + i * LANES + v * W;
                const V added = load(other.out + i * LANES + v * W);
                store(at, fma(added, load(yours + v * W), load(at) * load(mine + v * W)));
            }
    }

    // A dim of the output, lanes from `lane` on, each by its share; 0 of anything is 0.
    REGARD_INLINE V shared(int64_t i, int lane, const T *share) const {
        const V by = load(share + lane);
        return by == T(0) ? V{} : load(out + i * LANES + lane) * by;
    }

  private:
    void rescale(int v, IntVec<T> higher, V now) {
        const V alpha = higher ? exp2<K::Product::precision>((load(top + v * W) - now) * factor) : broadcast(T(1));
        store(top + v * W, now);
        store(total + v * W, load(total + v * W) * alpha);
        for (int64_t i = 0; i < dim; ++i) {
            T *at = out + i * LANES + v * W;
            store(at, load(at) * alpha);
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
