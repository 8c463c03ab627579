// Causal linear attention in chunks of up to 64 tokens: features, products, decays and division in one pass.
//
//     W = (Q K^T) o decay, lower triangle     O = W V + read o (Q S)     S = fade S + (write o K)^T V
//
// Q and K are features here. Columns of values, and keys of W, are in lanes (tile.h), 64 side by side: a panel. Of W,
// rows are computed in steps of 16, up to the last key that one of them sees: 10 / 16 of its products. z, the divisor's
// state, is a vector beside S.
//
// A chunk of 64 tokens with 64 features and 64 columns has 112 KiB of operands: each product reads lanes of
// 16 KiB from L1 (32 KiB on Zen 4 and Cascade Lake), and all else waits in L2. Of its vector instructions nine tenths
// are products; the exponentials of Elu1 are most of the rest.
//
// A head is one chain of chunks. Where heads are too few for the threads, chunks are parted, three times for each block
// of them: what each adds to S; the sum before each; the rows of each. The same sums in the same order: the same bits.
#pragma once

#include "exp.h"
#include "simd.h"
#include "tile.h"

namespace regard {
namespace REGARD_ISA {

template <typename Stored>
class Linear {
    static constexpr int W = Vec<float>::lanes;
    static constexpr int64_t STEP = 16;

    const regard_linear &c;
    const int64_t dim, padded, panels, group;
    float *k, *k_lanes, *v, *q, *weights, *out, *state;  // see scratch_of
    float *ages, *read, *write;  // gamma^n: of pairs, of the state at a row, of a key at the end
    F bad{};                     // NaN in a lane that met a value that is not finite

    static int64_t up(int64_t n) { return (n + STEP - 1) / STEP * STEP; }
    static int64_t panels_of(const regard_linear &c) { return (c.v_dim + LANES - 1) / LANES; }

  public:
    // Floats of a state: [panels][dim][64], and z [dim], padded.
    static int64_t state_of(const regard_linear &c) { return panels_of(c) * c.qk_dim * LANES + up(c.qk_dim); }
    // Floats of a thread.
    static int64_t scratch_of(const regard_linear &c) {
        const int64_t rows = 2 * LANES * up(c.qk_dim) + up(c.qk_dim) * LANES;
        return rows + (2 * panels_of(c) + 1) * LANES * LANES + state_of(c) + 4 * LANES;
    }

    Linear(const regard_linear &call, float *scratch)
        : c(call), dim(c.qk_dim), padded(up(dim)), panels(panels_of(c)), group(c.heads / c.kv_heads) {
        k = scratch;
        k_lanes = k + LANES * padded;
        q = k_lanes + LANES * padded;
        v = q + LANES * padded;
        out = v + panels * LANES * LANES;
        weights = out + panels * LANES * LANES;
        state = weights + LANES * LANES;
        ages = state + state_of(c);
        read = ages + 2 * LANES;
        write = read + LANES;
    }

    // All chunks of a head.
    bool run(int64_t head, int64_t first, int64_t count) {
        read_state(head, state);
        for (int64_t n = first; n < first + count; ++n) {
            const int64_t tokens = begin(head, n);
            if (c.q.data) rows(head, n, tokens, state);
            fade(state);
            if (c.k.data) add(tokens, state, true);
        }
        write_state(head, state);
        return is_finite();
    }

    // What chunk n adds to the state.
    bool sums(int64_t head, int64_t n, float *to) {
        add(begin(head, n), to, false);
        return is_finite();
    }

    // In place of what each chunk adds, the state before it: of some of the features.
    void scan(int64_t head, int64_t first, int64_t count, int64_t low, int64_t high, float *all) {
        read_state(head, state, low, high);
        const int64_t step = state_of(c);
        for (int64_t n = 0; n < count; ++n, all += step) {
            set_ages(head, tokens_of(first + n));
            for (int64_t p = 0; p < panels; ++p)
                swap(state + (p * dim + low) * LANES, all + (p * dim + low) * LANES, (high - low) * LANES);
            float *const z = state + panels * dim * LANES, *const other = all + panels * dim * LANES;
            const float kept = whole();
            for (int64_t f = low; f < high; ++f) {
                const float before = z[f];
                z[f] = z[f] * kept + other[f];
                other[f] = before;
            }
        }
        write_state(head, state, low, high);
    }

    // The rows of chunk n, before which the state is `from`.
    bool read_rows(int64_t head, int64_t n, const float *from) {
        if (!c.k.data) read_state(head, state);
        rows(head, n, begin(head, n), c.k.data ? from : state);
        return is_finite();
    }

  private:
    // ---- features -------------------------------------------------------------------------------------------------

    bool is_finite() const {
        for (int i = 0; i < W; ++i)
            if (bad[i] != bad[i]) return false;
        return true;
    }

    int64_t tokens_of(int64_t n) const { return c.tokens - n * c.chunk < c.chunk ? c.tokens - n * c.chunk : c.chunk; }
    int64_t key_head(int64_t head) const { return head % c.kv_heads; }
    int64_t batch(int64_t head) const { return head / c.kv_heads; }

    static const Stored *row(const regard_tensor &t, int64_t b, int64_t h, int64_t token) {
        return static_cast<const Stored *>(t.data) + b * t.batch + h * t.head + token * t.token;
    }

    // exp(x) for x <= 0: what x log2 e loses by rounding is added as a factor.
    static REGARD_INLINE F exp_below(F x) {
        const F t = x * float(LOG2E);
        const F lost = fma(x, broadcast(float(LOG2E)), -t) + x * float(LOG2E - double(float(LOG2E)));
        const F power = exp2(t);
        return fma(power, lost * float(LN2), power);
    }

    template <int feature>
    REGARD_INLINE F mapped(F x, F factor) {
        bad = fma(x, F{}, bad);
        if (feature == REGARD_ELU1) return (x > 0.0f ? x : F{}) + exp_below(x < 0.0f ? x : F{});
        if (feature == REGARD_RELU) return (x > 0.0f ? x : F{}) + factor;
        return x * factor;
    }

    // `count` rows of `size` elements to rows `stride` apart, followed by zeros up to a whole vector.
    template <int feature>
    __attribute__((noinline)) void map(const regard_tensor &t, int64_t b, int64_t h, int64_t token, int64_t count,
                                       int64_t from, int64_t size, float factor, float *to, int64_t stride) {
        const F by = broadcast(factor);
        for (int64_t j = 0; j < count; ++j, to += stride) {
            const Stored *x = row(t, b, h, token + j) + from;
            int64_t i = 0;
            for (; i + W <= size; i += W) store(to + i, mapped<feature>(load_wide(x + i), by));
            if (i == size) continue;
            Stored rest[W] = {};
            float found[W];
            memcpy(rest, x + i, size_t(size - i) * sizeof(Stored));
            store(found, mapped<feature>(load_wide(rest), by));
            for (int l = 0; l < W; ++l) to[i + l] = i + l < size ? found[l] : 0.0f;
        }
    }

    void features(const regard_tensor &t, int64_t b, int64_t h, int64_t token, int64_t count, float factor, float *to) {
        if (c.feature == REGARD_ELU1) map<REGARD_ELU1>(t, b, h, token, count, 0, dim, 0, to, padded);
        else if (c.feature == REGARD_RELU)
            map<REGARD_RELU>(t, b, h, token, count, 0, dim, float(c.epsilon), to, padded);
        else map<REGARD_IDENTITY>(t, b, h, token, count, 0, dim, factor, to, padded);
        const int64_t filled = (dim + W - 1) / W * W;
        for (int64_t j = 0; j < count && filled < padded; ++j)
            for (int64_t i = filled; i < padded; i += W) store(to + j * padded + i, F{});
    }

    // Keys as rows, as lanes and, for the state, times their decay; values in panels. Returns the chunk's tokens.
    int64_t begin(int64_t head, int64_t n) {
        const int64_t tokens = tokens_of(n), b = batch(head), h = key_head(head), at = n * c.chunk;
        set_ages(head, tokens);
        if (!c.k.data) return tokens;
        features(c.k, b, h, at, tokens, 1, k);
        for (int64_t p = 0; p < panels; ++p) {
            const int64_t left = c.v_dim - p * LANES;
            map<REGARD_IDENTITY>(c.v, b, h, at, tokens, p * LANES, left < LANES ? left : LANES, 1,
                                 v + p * LANES * LANES, LANES);
        }
        return tokens;
    }

    // ---- decay ----------------------------------------------------------------------------------------------------

    double log_decay(int64_t head) const {
        return c.log_decay ? static_cast<const float *>(c.log_decay)[key_head(head) * c.log_decay_head] : 0.0;
    }
    float whole() const { return ages[LANES]; }

    // ages[63 - n] is gamma^n, so that the factors of row i begin at 63 - i.
    void set_ages(int64_t head, int64_t tokens) {
        const double log = log_decay(head);
        if (!c.log_decay) {
            ages[LANES] = 1;
            return;
        }
        for (int64_t n = 0; n < LANES; ++n) {
            const float power = float(__builtin_exp(log * double(n)));
            ages[LANES - 1 - n] = power;
            if (n < tokens) write[tokens - 1 - n] = power;
            read[n] = float(__builtin_exp(log * double(n + 1)));
        }
        ages[LANES] = float(__builtin_exp(log * double(tokens)));
        for (int64_t n = 1; n < LANES; ++n) ages[LANES + n] = 0;
    }

    void fade(float *s) {
        if (!c.log_decay) return;
        const F by = broadcast(whole());
        for (int64_t i = 0; i < state_of(c); i += W) store(s + i, load(s + i) * by);
    }

    void swap(float *s, float *added, int64_t count) {
        const F by = broadcast(whole());
        for (int64_t i = 0; i < count; i += W) {
            const F before = load(s + i);
            store(s + i, before * by + load(added + i));
            store(added + i, before);
        }
    }

    // ---- state ----------------------------------------------------------------------------------------------------

    int64_t columns() const { return c.v_dim + (c.normalise ? 1 : 0); }
    float *place(int64_t head) const { return static_cast<float *>(c.state) + head * dim * columns(); }

    void read_state(int64_t head, float *to, int64_t low = 0, int64_t high = -1) {
        float *const z = to + panels * dim * LANES;
        for (int64_t f = low; f < (high < 0 ? dim : high); ++f) {
            const float *from = place(head) + f * columns();
            for (int64_t p = 0; p < panels; ++p)
                copy(from + p * LANES, to + (p * dim + f) * LANES, c.v_dim - p * LANES, true);
            z[f] = c.normalise ? from[c.v_dim] : 0.0f;
        }
        for (int64_t f = dim; f < padded; ++f) z[f] = 0;
    }

    void write_state(int64_t head, const float *from, int64_t low = 0, int64_t high = -1) {
        const float *const z = from + panels * dim * LANES;
        for (int64_t f = low; f < (high < 0 ? dim : high); ++f) {
            float *to = place(head) + f * columns();
            for (int64_t p = 0; p < panels; ++p)
                copy(from + (p * dim + f) * LANES, to + p * LANES, c.v_dim - p * LANES, false);
            if (c.normalise) to[c.v_dim] = z[f];
        }
    }

    // A row of a panel: up to 64 floats, and zeros after them if it is to be filled.
    static REGARD_INLINE void copy(const float *from, float *to, int64_t size, bool fill) {
        if (size >= LANES) {
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i += W) store(to + i, load(from + i));
            return;
        }
        for (int64_t i = 0; i < size; ++i) to[i] = from[i];
        for (int64_t i = size; fill && i < LANES; ++i) to[i] = 0;
    }

    int vectors(int64_t panel) const {
        const int64_t left = c.v_dim - panel * LANES;
        return int(((left < LANES ? left : LANES) + W - 1) / W);
    }

    // K^T V, added to a state or written.
    void add(int64_t tokens, float *to, bool more) {
        if (c.log_decay)
            for (int64_t j = 0; j < tokens; ++j) {
                const F by = broadcast(write[j]);
                for (int64_t i = 0; i < padded; i += W) store(k + j * padded + i, load(k + j * padded + i) * by);
            }
        const char *rows_of_k = reinterpret_cast<const char *>(k);
        for (int64_t p = 0; p < panels; ++p) {
            const float *lanes = v + p * LANES * LANES;
            float *s = to + p * dim * LANES;
            if (more)
                multiply<Fused<float>, Along::down, Start::added>(rows_of_k, padded * 4, dim, lanes, tokens, s, 0,
                                                                  vectors(p));
            else
                multiply<Fused<float>, Along::down, Start::zero>(rows_of_k, padded * 4, dim, lanes, tokens, s, 0,
                                                                 vectors(p));
        }
        float *z = to + panels * dim * LANES;
        for (int64_t i = 0; i < padded; i += W) {
            F sum{};
            for (int64_t j = 0; j < tokens; ++j) sum += load(k + j * padded + i);
            store(z + i, more ? load(z + i) + sum : sum);
        }
    }

    // ---- rows -----------------------------------------------------------------------------------------------------

    void rows(int64_t head, int64_t n, int64_t tokens, const float *s) {
        const auto key = [&](int64_t lane) { return reinterpret_cast<const char *>(k + lane * padded); };
        if (c.k.data) gather_lanes<float, float>(key, int(tokens), dim, k_lanes);
        for (int64_t g = 0; g < group; ++g) {
            const int64_t b = batch(head), h = key_head(head) * group + g;
            features(c.q, b, h, n * c.chunk, tokens, float(c.scale), q);
            of_earlier(tokens, s);
            for (int64_t i = 0; c.k.data && i < tokens; i += STEP)
                of_chunk(i, tokens - i < STEP ? tokens - i : STEP, tokens);
            if (c.normalise) divide(tokens, s + panels * dim * LANES);
            write_rows(b, h, n * c.chunk, tokens);
        }
    }

    void of_earlier(int64_t tokens, const float *s) {
        for (int64_t p = 0; p < panels; ++p) {
            float *o = out + p * LANES * LANES;
            multiply<Fused<float>, Along::across>(reinterpret_cast<const char *>(q), padded * 4, tokens,
                                                  s + p * dim * LANES, dim, o, 0, vectors(p));
            for (int64_t i = 0; c.log_decay && i < tokens; ++i)
                for (int64_t l = 0; l < LANES; l += W) store(o + i * LANES + l, load(o + i * LANES + l) * read[i]);
        }
    }

    // Rows i and on, `some` of them, with the keys of their chunk.
    void of_chunk(int64_t i, int64_t some, int64_t tokens) {
        const int64_t seen = i + STEP < tokens ? i + STEP : tokens;
        const int last = int((seen + W - 1) / W);
        float *w = weights + i * LANES;
        multiply<Fused<float>, Along::across>(reinterpret_cast<const char *>(q + i * padded), padded * 4, some, k_lanes,
                                              dim, w, 0, last);
        for (int64_t r = 0; r < some; ++r, w += LANES) {
            if (c.log_decay)
                for (int64_t l = 0; l < i; l += W) store(w + l, load(w + l) * load(ages + LANES - 1 - i - r + l));
            for (int64_t l = i; l < last * W; l += W) {  // keys after the row
                const int64_t kept = i + r - l + 1;
                const uint64_t bits = kept <= 0 ? 0 : kept >= W ? ~uint64_t(0) : (uint64_t(1) << kept) - 1;
                F x = load(w + l);
                if (c.log_decay) x *= load(ages + LANES - 1 - i - r + l);
                store(w + l, select(bits, x, F{}));
            }
        }
        for (int64_t p = 0; p < panels; ++p)
            multiply<Fused<float>, Along::across, Start::out>(reinterpret_cast<const char *>(weights + i * LANES),
                                                              LANES * 4, some, v + p * LANES * LANES, seen,
                                                              out + p * LANES * LANES + i * LANES, 0, vectors(p));
    }

    // By the sum of a row's weights: of its chunk, and by z of earlier tokens.
    void divide(int64_t tokens, const float *z) {
        for (int64_t i = 0; i < tokens; i += W) {
            F sums[W];
            for (int r = 0; r < W; ++r) {
                sums[r] = F{};
                if (i + r >= tokens) continue;
                for (int64_t f = 0; f < padded; f += W)
                    sums[r] = fma(load(q + (i + r) * padded + f), load(z + f), sums[r]);
                if (c.log_decay) sums[r] *= read[i + r];
                for (int64_t l = 0; c.k.data && l <= i + r; l += W) sums[r] += load(weights + (i + r) * LANES + l);
            }
            transpose<float>(sums);
            for (int r = 1; r < W; ++r) sums[0] += sums[r];
            const F by = 1.0f / (sums[0] == 0.0f ? broadcast(1.0f) : sums[0]);
            float factors[W];
            store(factors, by);
            for (int64_t r = i; r < tokens && r < i + W; ++r)
                for (int64_t p = 0; p < panels; ++p)
                    for (int64_t l = 0; l < vectors(p) * W; l += W) {
                        float *o = out + p * LANES * LANES + r * LANES + l;
                        store(o, load(o) * factors[r - i]);
                    }
        }
    }

    void write_rows(int64_t b, int64_t h, int64_t token, int64_t tokens) {
        for (int64_t i = 0; i < tokens; ++i) {
            Stored *to = const_cast<Stored *>(row(c.out, b, h, token + i));
            for (int64_t p = 0; p < panels; ++p, to += LANES) {
                const float *o = out + p * LANES * LANES + i * LANES;
                const int64_t left = c.v_dim - p * LANES, size = left < LANES ? left : LANES;
                int64_t l = 0;
                for (; l + W <= size; l += W) store_narrow(to + l, load(o + l));
                for (; l < size; ++l) to[l] = narrow<Stored>(o[l]);
            }
        }
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
