// Causal linear attention in chunks of up to 64 tokens: features, products, decays and division in one pass.
//
//     W = (Q K^T) o decay, lower triangle     O = W V + read o (Q S)     S = fade S + (write o K)^T V
//
// Q and K are features here, in blocks of 64 of them. Columns of values, and keys of W, are in lanes (tile.h), 64 side
// by side: a panel. Of W, rows are computed in steps of 16, up to the last key that one of them sees: 10 / 16 of its
// products. z, the divisor's state, is a vector beside S.
//
// A chunk of 64 tokens with 64 features and 64 columns has 112 KiB of operands: each product reads lanes of
// 16 KiB from L1 (32 KiB on Zen 4 and Cascade Lake), and all else waits in L2. Of its vector instructions nine tenths
// are products; the exponentials of Elu1 are most of the rest.
//
// A head is one chain of chunks. Where heads are too few for the threads, chunks are parted, three times for each block
// of them: what each adds to S; the sum before each; the rows of each. The same sums in the same order: the same bits.
//
// Favor's features are products of their own (linear_favor.h), and a key is exp(top) times what is stored. So what a
// chunk adds is exp(end) times what is stored, and S is exp(high) times it: high, the largest exponent so far, is known
// when all chunks of a block have their sums (`raise`), and before the scan.
#pragma once

#include "exp.h"
#include "linear_delta.h"
#include "linear_favor.h"
#include "linear_gated.h"
#include "simd.h"
#include "tile.h"

namespace regard {
namespace REGARD_ISA {

template <typename Stored>
class Linear {
    static constexpr int W = Vec<float>::lanes;
    static constexpr int64_t STEP = 16, BLOCK = LANES * LANES;

    const regard_linear &c;
    const bool favor, gated, delta;
    const int64_t dim, blocks, panels, group;
    // of a chunk: in its own memory where chunks are parted, see `use`
    float *k, *gates, *erase, *tops, *levels, *whole;
    float *mine, *k_lanes, *v, *faded, *q, *scaled, *weights, *out, *state, *added;  // see scratch_of
    float *ages, *read, *write, *highs;  // gamma^n: of pairs, of the state at a row, of a key at the end; `set_ages`
    float *near, *past, *pairs, *betas;  // see linear_gated.h
    F bad{};                             // NaN in a lane that met a value that is not finite

    enum Level { END, BEFORE, KEPT, ADDED };  // the exponents of a chunk and of the state before it; factors of both

    static int64_t up(int64_t n) { return (n + STEP - 1) / STEP * STEP; }
    static int64_t panels_of(const regard_linear &c) { return (c.v_dim + LANES - 1) / LANES; }
    static int64_t blocks_of(const regard_linear &c) { return (c.features + LANES - 1) / LANES; }
    static int64_t state_of(const regard_linear &c) { return panels_of(c) * c.features * LANES + up(c.features); }
    static int64_t chunk_of(const regard_linear &c) {
        const int64_t delta = c.beta.data ? (blocks_of(c) + panels_of(c)) * BLOCK : 0;
        return delta + blocks_of(c) * (c.log_gate.data ? 2 * BLOCK + LANES : BLOCK) + LANES + STEP;
    }

  public:
    // Floats of a chunk that is parted from others: a state, [panels][features][64] and z [features], padded; its keys.
    static int64_t parted_of(const regard_linear &c) { return state_of(c) + chunk_of(c); }
    // Floats of a thread.
    static int64_t scratch_of(const regard_linear &c) {
        const bool favor = c.feature == REGARD_FAVOR;
        const int64_t rows = (2 * blocks_of(c) + 3 * panels_of(c) + 1) * BLOCK + (favor ? LANES * up(c.qk_dim) : 0);
        const int64_t gated = c.log_gate.data ? blocks_of(c) * (BLOCK + 2 * LANES) : 0;
        const int64_t delta = c.beta.data ? BLOCK + LANES : 0;
        return delta + gated + rows + state_of(c) + (favor ? state_of(c) : 0) + chunk_of(c) + 6 * LANES;
    }

    Linear(const regard_linear &call, float *scratch)
        : c(call),
          favor(c.feature == REGARD_FAVOR),
          gated(c.log_gate.data),
          delta(c.beta.data),
          dim(c.features),
          blocks(blocks_of(c)),
          panels(panels_of(c)),
          group(c.heads / c.kv_heads) {
        const auto take = [&](int64_t floats) { return (scratch += floats) - floats; };
        mine = take(chunk_of(c));
        k_lanes = take(blocks * BLOCK), q = take(blocks * BLOCK);
        v = take(panels * BLOCK), faded = take(panels * BLOCK), out = take(panels * BLOCK);
        weights = take(BLOCK);
        scaled = take(favor ? LANES * up(c.qk_dim) : 0);
        state = take(state_of(c)), added = take(favor ? state_of(c) : 0);
        ages = take(2 * LANES), read = take(LANES), write = take(LANES), highs = take(LANES);
        near = take(gated ? blocks * BLOCK : 0), past = take(gated ? 2 * blocks * LANES : 0);
        pairs = take(delta ? BLOCK : 0), betas = take(delta ? LANES : 0);
        use(mine);
    }

    // All chunks of a head.
    bool run(int64_t head, int64_t first, int64_t count) {
        read_state(head, state);
        for (int64_t n = first; n < first + count; ++n) {
            const int64_t tokens = begin(head, n);
            if (delta) {
                solve(tokens);
                for (int64_t p = 0; p < panels; ++p) correct(tokens, p, 0, vectors(p));
            }
            if (favor && c.k.data) {
                add(tokens, added, false);
                raise(head, tokens);
            }
            if (c.q.data) rows(head, n, tokens, state);
            if (!c.k.data) continue;
            if (favor) {
                step(head, tokens, added, 0, dim);
                continue;
            }
            if (delta) {
                for (int64_t p = 0; p < panels; ++p) replace(tokens, p, 0, vectors(p));
                continue;
            }
            fade(head, tokens);
            add(tokens, state, true);
        }
        write_state(head, state);
        return is_finite();
    }

    // What chunk n adds to the state, and its keys.
    bool sums(int64_t head, int64_t n, float *to) {
        use(to + state_of(c));
        const int64_t tokens = begin(head, n);
        if (delta) solve(tokens);
        else add(tokens, to, false);
        return is_finite();
    }

    // The exponents before each chunk, of Favor.
    void raise_all(int64_t head, int64_t first, int64_t count, float *all) {
        for (int64_t n = first; n < first + count; ++n, all += parted_of(c)) {
            use(all + state_of(c));
            raise(head, tokens_of(n));
        }
    }

    // In place of what each chunk adds, the state before it: of some of the features.
    void scan(int64_t head, int64_t first, int64_t count, int64_t low, int64_t high, float *all) {
        read_state(head, state, low, high);
        for (int64_t n = first; n < first + count; ++n, all += parted_of(c)) {
            use(all + state_of(c));
            step(head, tokens_of(n), all, low, high);
        }
        write_state(head, state, low, high);
    }

    // The same of Delta, of columns `low` and on; and in place of what a chunk would write, what it does write.
    void scan_columns(int64_t head, int64_t first, int64_t count, int64_t low, float *all) {
        const int64_t p = low / LANES;
        const int from = int(low % LANES / W), last = from + COLUMNS / W, to = last < vectors(p) ? last : vectors(p);
        read_state(head, state);
        for (int64_t n = first; n < first + count; ++n, all += parted_of(c)) {
            const int64_t tokens = tokens_of(n);
            use(all + state_of(c));
            set_fades(head, n, tokens);
            for (int64_t i = p * dim * LANES; i < (p + 1) * dim * LANES; i += LANES)
                for (int l = from * W; l < to * W; l += W) store(all + i + l, load(state + i + l));
            correct(tokens, p, from, to);
            replace(tokens, p, from, to);
        }
        for (int64_t f = 0; f < dim; ++f)
            for (int64_t l = low; l < low + COLUMNS && l < c.v_dim; ++l)
                place(head)[f * columns() + l] = state[(p * dim + f) * LANES + l % LANES];
    }

    // The rows of chunk n, before which the state is `from`.
    bool read_rows(int64_t head, int64_t n, float *from) {
        const int64_t tokens = tokens_of(n);
        set_ages(head, tokens);
        if (c.k.data) {
            use(from + state_of(c));
            if (delta) set_fades(head, n, tokens);
            else values(head, n, tokens);
        } else read_state(head, state);
        rows(head, n, tokens, c.k.data ? from : state);
        return is_finite();
    }

  private:
    void use(float *chunk) {
        k = chunk;
        gates = k + blocks * BLOCK;
        erase = gates + (gated ? blocks * BLOCK : 0);
        tops = erase;
        if (delta) {
            v = erase + blocks * BLOCK;  // what is written
            tops = v + panels * BLOCK;
        }
        levels = tops + LANES;
        whole = levels + STEP;
    }

    // ---- features -------------------------------------------------------------------------------------------------

    bool is_finite() const {
        for (int i = 0; i < W; ++i)
            if (bad[i] != bad[i]) return false;
        return true;
    }

    int64_t tokens_of(int64_t n) const { return c.tokens - n * c.chunk < c.chunk ? c.tokens - n * c.chunk : c.chunk; }
    int64_t key_head(int64_t head) const { return head % c.kv_heads; }
    int64_t batch(int64_t head) const { return head / c.kv_heads; }

    // Features of block b; vectors of a panel.
    int64_t some(int64_t b) const { return dim - b * LANES < LANES ? dim - b * LANES : LANES; }
    int vectors(int64_t panel) const {
        const int64_t left = c.v_dim - panel * LANES;
        return int(((left < LANES ? left : LANES) + W - 1) / W);
    }

    static const Stored *row(const regard_tensor &t, int64_t b, int64_t h, int64_t token) {
        return static_cast<const Stored *>(t.data) + b * t.batch + h * t.head + token * t.token;
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

    // Blocks of 64 rows of 64 features; of Favor also the exponent of each row.
    void features(const regard_tensor &t, int64_t b, int64_t h, int64_t token, int64_t count, float factor, float *to,
                  float *top) {
        if (favor) {
            const int64_t stride = up(c.qk_dim);
            map<REGARD_IDENTITY>(t, b, h, token, count, 0, c.qk_dim, float(__builtin_sqrt(c.scale)), scaled, stride);
            return map_favor(scaled, stride, c.qk_dim, count, static_cast<const float *>(c.vectors), dim, to, top);
        }
        for (int64_t n = 0; n < blocks; ++n, to += BLOCK) {
            const int64_t from = n * LANES;
            if (c.feature == REGARD_ELU1) map<REGARD_ELU1>(t, b, h, token, count, from, some(n), 0, to, LANES);
            else if (c.feature == REGARD_RELU)
                map<REGARD_RELU>(t, b, h, token, count, from, some(n), float(c.epsilon), to, LANES);
            else map<REGARD_IDENTITY>(t, b, h, token, count, from, some(n), factor, to, LANES);
        }
    }

    // Keys and values of a chunk; returns its tokens.
    int64_t begin(int64_t head, int64_t n) {
        const int64_t tokens = tokens_of(n);
        set_ages(head, tokens);
        if (!c.k.data) return tokens;
        features(c.k, batch(head), key_head(head), n * c.chunk, tokens, 1, k, tops);
        values(head, n, tokens);
        if (favor) set_end(head, tokens);
        if (gated) set_gates(head, n, tokens);
        if (delta) set_fades(head, n, tokens);
        return tokens;
    }

    // The gates of a chunk, and of all its tokens together.
    void set_gates(int64_t head, int64_t n, int64_t tokens) {
        for (int64_t j = 0; j < tokens; ++j) {
            const float *logs = static_cast<const float *>(c.log_gate.data) + batch(head) * c.log_gate.batch +
                                key_head(head) * c.log_gate.head + (n * c.chunk + j) * c.log_gate.token;
            for (int64_t f = 0; f < dim; f += W) {
                F log = broadcast(*logs);
                if (c.log_gate_feature) {
                    float rest[W] = {};
                    if (dim - f < W) memcpy(rest, logs + f, size_t(dim - f) * sizeof(float));
                    log = load(dim - f < W ? rest : logs + f);
                }
                log = larger(broadcast(-200.0f), log);  // -inf, which is no error
                bad = fma(log, F{}, bad);
                const F gate = exp_below(log);
                store(gates + f / LANES * BLOCK + j * LANES + f % LANES, gate);
                store(whole + f, j ? load(whole + f) * gate : gate);
            }
        }
    }

    // Of Delta: the fractions, and the decays of pairs, of the state at a row, and of a key at the end.
    void set_fades(int64_t head, int64_t n, int64_t tokens) {
        const auto at = [&](const regard_tensor &t, int64_t j) {
            return static_cast<const float *>(
                t.data)[batch(head) * t.batch + key_head(head) * t.head + (n * c.chunk + j) * t.token];
        };
        for (int64_t j = 0; j < tokens; ++j) {
            betas[j] = at(c.beta, j);
            bad = fma(broadcast(betas[j]), F{}, bad);
        }
        if (!c.log_fade.data) return;
        float fades[LANES] = {};
        for (int64_t j = 0; j < tokens; ++j) fades[j] = at(c.log_fade, j);
        for (int64_t l = 0; l < LANES; l += W) {
            const F log = larger(broadcast(-200.0f), load(fades + l));
            bad = fma(log, F{}, bad);
            store(fades + l, exp_below(log));
        }
        float since = 1;
        for (int64_t i = 0; i < tokens; ++i) {
            float *const row_of_pairs = pairs + i * LANES;
            for (int64_t l = 0; l < LANES; l += W)
                store(row_of_pairs + l, i ? load(row_of_pairs - LANES + l) * fades[i] : F{});
            row_of_pairs[i] = 1;
            read[i] = since *= fades[i];
        }
        for (int64_t j = 0; j < tokens; ++j) write[j] = pairs[(tokens - 1) * LANES + j];
    }

    // What a chunk would write if the state were 0, and how it depends on the state: the first in v, and -erase.
    void solve(int64_t tokens) {
        for (int64_t j = 0; j < tokens; ++j) {
            const float by = c.log_fade.data ? -betas[j] * read[j] : -betas[j];
            for (int64_t p = 0; p < panels; ++p)
                for (int64_t i = p * BLOCK + j * LANES; i < p * BLOCK + j * LANES + vectors(p) * W; i += W)
                    store(v + i, load(v + i) * betas[j]);
            for (int64_t f = 0; f < dim; f += W) {
                const int64_t i = f / LANES * BLOCK + j * LANES + f % LANES;
                store(erase + i, load(k + i) * by);
            }
        }
        turn_keys(tokens);
        for (int64_t i = 0; i < tokens; i += STEP) {
            const int64_t count = tokens - i < STEP ? tokens - i : STEP;
            float *const w = weights + i * LANES;
            const int last = int((i + count + W - 1) / W);
            along_features(k + i * LANES, count, k_lanes, w, last);
            for (int64_t r = i; r < i + count; ++r)
                for (int64_t l = 0; l < last * W; l += W) {
                    F sum = load(weights + r * LANES + l) * -betas[r];
                    if (c.log_fade.data) sum *= load(pairs + r * LANES + l);
                    store(weights + r * LANES + l, select(first_lanes(r - l), sum, F{}));
                }
            for (int64_t p = 0; p < panels; ++p) solve_rows(w, v + p * BLOCK, i, count, vectors(p));
            for (int64_t n = 0; n < blocks; ++n) solve_rows(w, erase + n * BLOCK, i, count, int((some(n) + W - 1) / W));
        }
    }

    // Less what the state before the chunk has for its keys: some vectors of a panel.
    void correct(int64_t tokens, int64_t p, int from, int to) {
        for (int64_t n = 0; n < blocks; ++n)
            multiply<Fused<float>, Along::across, Start::out>(reinterpret_cast<const char *>(erase + n * BLOCK),
                                                              LANES * 4, tokens, state + (p * dim + n * LANES) * LANES,
                                                              some(n), v + p * BLOCK, from, to);
    }

    // The state after the chunk: some vectors of a panel.
    void replace(int64_t tokens, int64_t p, int from, int to) {
        const float *lanes = v + p * BLOCK;
        float *const s = state + p * dim * LANES;
        if (c.log_fade.data) {
            const F by = broadcast(read[tokens - 1]);
            for (int64_t i = 0; i < dim * LANES; i += LANES)
                for (int l = from * W; l < to * W; l += W) store(s + i + l, load(s + i + l) * by);
            for (int64_t j = 0; j < tokens * LANES; j += LANES)
                for (int l = from * W; l < to * W; l += W) store(faded + j + l, load(lanes + j + l) * write[j / LANES]);
            lanes = faded;
        }
        for (int64_t n = 0; n < blocks; ++n)
            multiply<Fused<float>, Along::down, Start::added>(reinterpret_cast<const char *>(k + n * BLOCK), LANES * 4,
                                                              some(n), lanes, tokens, s + n * BLOCK, from, to);
    }

    static uint64_t first_lanes(int64_t count) {
        return count <= 0 ? 0 : count >= W ? ~uint64_t(0) : (uint64_t(1) << count) - 1;
    }

    void values(int64_t head, int64_t n, int64_t tokens) {
        for (int64_t p = 0; p < panels; ++p) {
            const int64_t left = c.v_dim - p * LANES;
            map<REGARD_IDENTITY>(c.v, batch(head), key_head(head), n * c.chunk, tokens, p * LANES,
                                 left < LANES ? left : LANES, 1, v + p * BLOCK, LANES);
        }
    }

    // ---- decay ----------------------------------------------------------------------------------------------------

    double log_decay(int64_t head) const {
        return c.log_decay ? static_cast<const float *>(c.log_decay)[key_head(head) * c.log_decay_head] : 0.0;
    }
    // Whether keys have a factor each.
    bool aged() const { return c.k.data && (c.log_decay || favor || c.log_fade.data); }

    // ages[63 - n] is gamma^n, so that the factors of row i begin at 63 - i; of Favor its logarithm.
    void set_ages(int64_t head, int64_t tokens) {
        const double log = log_decay(head);
        if (!c.log_decay && !favor) return;
        for (int64_t n = 0; n < LANES; ++n) {
            if (favor) {
                ages[LANES - 1 - n] = float(log * double(n));
            } else {
                const float power = float(__builtin_exp(log * double(n)));
                ages[LANES - 1 - n] = power;
                if (n < tokens) write[tokens - 1 - n] = power;
                read[n] = float(__builtin_exp(log * double(n + 1)));
            }
            ages[LANES + n] = 0;
        }
    }

    // The largest exponent at the end of the chunk, and what keys have left there.
    void set_end(int64_t head, int64_t tokens) {
        const float log = float(log_decay(head));
        float end = -INFINITE;
        for (int64_t j = 0; j < tokens; ++j) {
            write[j] = tops[j] + log * float(tokens - 1 - j);
            end = write[j] > end ? write[j] : end;
        }
        for (int64_t j = 0; j < tokens; ++j) write[j] = float(__builtin_exp(double(write[j] - end)));
        levels[END] = end;
    }

    // From the state's exponent before the chunk, that after it.
    void raise(int64_t head, int64_t tokens) {
        float &high = static_cast<float *>(c.top)[head];
        const float old = high + float(log_decay(head)) * float(tokens), next = old > levels[END] ? old : levels[END];
        levels[BEFORE] = high;
        levels[KEPT] = float(__builtin_exp(double(old - next)));
        levels[ADDED] = float(__builtin_exp(double(levels[END] - next)));
        high = next;
    }

    // The largest exponent that each row sees, and what the state has left there.
    void set_highs(int64_t head, int64_t tokens) {
        const float log = float(log_decay(head));
        float high = levels[BEFORE];
        for (int64_t i = 0; i < tokens; ++i) {
            high = high + log > tops[i] ? high + log : tops[i];
            highs[i] = high;
            read[i] = float(__builtin_exp(double(levels[BEFORE] + log * float(i + 1) - high)));
        }
    }

    // Of the state, after the chunk; but for gates.
    float kept(int64_t head, int64_t tokens) const {
        return favor ? levels[KEPT] : c.log_decay ? float(__builtin_exp(log_decay(head) * double(tokens))) : 1.0f;
    }

    void fade(int64_t head, int64_t tokens) {
        if (!c.log_decay && !gated) return;
        const float share = kept(head, tokens);
        for (int64_t f = 0; f < dim; ++f) {
            const float by = gated ? whole[f] : share;
            for (int64_t p = 0; p < panels; ++p)
                for (int64_t i = (p * dim + f) * LANES; i < (p * dim + f + 1) * LANES; i += W)
                    store(state + i, load(state + i) * by);
            state[panels * dim * LANES + f] *= by;
        }
    }

    // The state after the chunk, and in place of what the chunk adds the state before it: of some of the features.
    void step(int64_t head, int64_t tokens, float *adds, int64_t low, int64_t high) {
        const float share = kept(head, tokens), more = favor ? levels[ADDED] : 1.0f;
        for (int64_t p = 0; p < panels; ++p)
            for (int64_t f = low; f < high; ++f) {
                const F by = broadcast(gated ? whole[f] : share);
                for (int64_t i = (p * dim + f) * LANES; i < (p * dim + f + 1) * LANES; i += W) {
                    const F before = load(state + i);
                    store(state + i, before * by + load(adds + i) * more);
                    store(adds + i, before);
                }
            }
        float *const z = state + panels * dim * LANES, *const other = adds + panels * dim * LANES;
        for (int64_t f = low; f < high; ++f) {
            const float before = z[f];
            z[f] = z[f] * (gated ? whole[f] : share) + other[f] * more;
            other[f] = before;
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
        for (int64_t f = dim; f < up(dim); ++f) z[f] = 0;
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

    // Keys times all gates after them.
    void gate_keys(int64_t tokens) {
        for (int64_t f = 0; f < dim; f += W) {
            const int64_t at = f / LANES * BLOCK + f % LANES;
            F later = broadcast(1.0f);
            for (int64_t j = tokens - 1; j >= 0; --j) {
                store(near + at + j * LANES, load(k + at + j * LANES) * later);
                later *= load(gates + at + j * LANES);
            }
        }
    }

    // K^T V, added to the state or written.
    void add(int64_t tokens, float *to, bool more) {
        const float *keys = gated ? near : k;
        if (gated) gate_keys(tokens);
        const float *lanes = v;
        if (aged()) {
            lanes = faded;
            for (int64_t p = 0; p < panels; ++p)
                for (int64_t j = 0; j < tokens; ++j)
                    for (int64_t i = p * BLOCK + j * LANES; i < p * BLOCK + j * LANES + vectors(p) * W; i += W)
                        store(faded + i, load(v + i) * write[j]);
        }
        for (int64_t p = 0; p < panels; ++p, lanes += BLOCK)
            for (int64_t n = 0; n < blocks; ++n) {
                const char *rows_of_k = reinterpret_cast<const char *>(keys + n * BLOCK);
                float *s = to + (p * dim + n * LANES) * LANES;
                if (more)
                    multiply<Fused<float>, Along::down, Start::added>(rows_of_k, LANES * 4, some(n), lanes, tokens, s,
                                                                      0, vectors(p));
                else
                    multiply<Fused<float>, Along::down, Start::zero>(rows_of_k, LANES * 4, some(n), lanes, tokens, s, 0,
                                                                     vectors(p));
            }
        float *z = to + panels * dim * LANES;
        for (int64_t f = 0; f < dim; f += W) {
            const float *at = keys + f / LANES * BLOCK + f % LANES;
            F sum{};
            if (aged())
                for (int64_t j = 0; j < tokens; ++j) sum = fma(load(at + j * LANES), broadcast(write[j]), sum);
            else
                for (int64_t j = 0; j < tokens; ++j) sum += load(at + j * LANES);
            store(z + f, more ? load(z + f) + sum : sum);
        }
    }

    // ---- rows -----------------------------------------------------------------------------------------------------

    void rows(int64_t head, int64_t n, int64_t tokens, const float *s) {
        if (favor && c.k.data) set_highs(head, tokens);
        for (int64_t g = 0; g < group; ++g) {
            const int64_t b = batch(head), h = key_head(head) * group + g;
            float *unused = weights;  // a query's exponent is a factor of its whole row
            features(c.q, b, h, n * c.chunk, tokens, float(c.scale), q, unused);
            if (c.k.data && (!g || gated)) turn_keys(tokens);
            if (gated) gate_pairs(q, gates, k_lanes, dim, tokens, near, past, past + blocks * LANES, weights);
            of_earlier(tokens, s);
            for (int64_t i = 0; c.k.data && i < tokens; i += STEP) {
                const int64_t count = tokens - i < STEP ? tokens - i : STEP;
                if (!gated) weigh(i, count, tokens);
                if (delta && !is_written(i, count)) {
                    for (int64_t r = 0; r < count; ++r) mix(i + r, 1, i + r + 1);  // causal: no later keys
                    continue;
                }
                mix(i, count, tokens);
            }
            if (c.normalise) divide(tokens, s + panels * dim * LANES);
            write_rows(b, h, n * c.chunk, tokens);
        }
    }

    // Keys in lanes.
    void turn_keys(int64_t tokens) {
        for (int64_t n = 0; n < blocks; ++n) {
            const float *keys = k + n * BLOCK;
            const auto key = [&](int64_t lane) { return reinterpret_cast<const char *>(keys + lane * LANES); };
            gather_lanes<float, float>(key, int(tokens), some(n), k_lanes + n * BLOCK);
        }
    }

    // out = rows * lanes of all features.
    void along_features(const float *rows_of_q, int64_t count, const float *lanes, float *to, int last) {
        for (int64_t n = 0; n < blocks; ++n, rows_of_q += BLOCK, lanes += BLOCK) {
            const char *from = reinterpret_cast<const char *>(rows_of_q);
            if (n)
                multiply<Fused<float>, Along::across, Start::out>(from, LANES * 4, count, lanes, some(n), to, 0, last);
            else multiply<Fused<float>, Along::across>(from, LANES * 4, count, lanes, some(n), to, 0, last);
        }
    }

    void of_earlier(int64_t tokens, const float *s) {
        for (int64_t p = 0; p < panels; ++p) {
            float *o = out + p * BLOCK;
            along_features(q, tokens, s + p * dim * LANES, o, vectors(p));
            for (int64_t i = 0; aged() && i < tokens; ++i)
                for (int64_t l = 0; l < LANES; l += W) store(o + i * LANES + l, load(o + i * LANES + l) * read[i]);
        }
    }

    // Of the pairs of a row with the keys of a vector.
    REGARD_INLINE F factor(int64_t row, int64_t key) const {
        if (delta) return load(pairs + row * LANES + key);
        const F age = load(ages + LANES - 1 - row + key);
        if (!favor) return age;
        return exp_below(load(tops + key) + age - highs[row]);
    }

    // Rows i and on, `count` of them, with the keys of their chunk.
    void weigh(int64_t i, int64_t count, int64_t tokens) {
        const int64_t seen = i + STEP < tokens ? i + STEP : tokens;
        const int last = int((seen + W - 1) / W);
        float *w = weights + i * LANES;
        along_features(q + i * LANES, count, k_lanes, w, last);
        for (int64_t r = 0; r < count; ++r, w += LANES) {
            for (int64_t l = 0; aged() && l < i; l += W) store(w + l, load(w + l) * factor(i + r, l));
            for (int64_t l = i; l < last * W; l += W) {  // keys after the row
                F sum = load(w + l);
                if (aged()) sum *= factor(i + r, l);
                store(w + l, select(first_lanes(i + r - l + 1), sum, F{}));
            }
        }
    }

    // Whether all that rows i and on write is finite: keys of large norm may let it overflow.
    bool is_written(int64_t i, int64_t count) const {
        F lost{};
        for (int64_t p = 0; p < panels; ++p)
            for (int64_t j = p * BLOCK + i * LANES; j < p * BLOCK + (i + count) * LANES; j += LANES)
                for (int l = 0; l < vectors(p) * W; l += W) lost = fma(load(v + j + l), F{}, lost);
        for (int l = 0; l < W; ++l)
            if (lost[l] != lost[l]) return false;
        return true;
    }

    // Their values.
    void mix(int64_t i, int64_t count, int64_t tokens) {
        const int64_t seen = i + STEP < tokens ? i + STEP : tokens;
        for (int64_t p = 0; p < panels; ++p)
            multiply<Fused<float>, Along::across, Start::out>(reinterpret_cast<const char *>(weights + i * LANES),
                                                              LANES * 4, count, v + p * BLOCK, seen,
                                                              out + p * BLOCK + i * LANES, 0, vectors(p));
    }

    // By the sum of a row's weights: of its chunk, and by z of earlier tokens.
    void divide(int64_t tokens, const float *z) {
        for (int64_t i = 0; i < tokens; i += W) {
            F sums[W];
            for (int r = 0; r < W; ++r) {
                sums[r] = F{};
                if (i + r >= tokens) continue;
                for (int64_t f = 0; f < dim; f += W)
                    sums[r] = fma(load(q + f / LANES * BLOCK + (i + r) * LANES + f % LANES), load(z + f), sums[r]);
                if (aged()) sums[r] *= read[i + r];
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
                        float *o = out + p * BLOCK + r * LANES + l;
                        store(o, load(o) * factors[r - i]);
                    }
        }
    }

    void write_rows(int64_t b, int64_t h, int64_t token, int64_t tokens) {
        for (int64_t i = 0; i < tokens; ++i) {
            Stored *to = const_cast<Stored *>(row(c.out, b, h, token + i));
            for (int64_t p = 0; p < panels; ++p, to += LANES) {
                const float *o = out + p * BLOCK + i * LANES;
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
