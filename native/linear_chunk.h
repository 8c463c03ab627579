// A chunk of linear attention: which tokens it has, how it is cut into blocks, and its memory.
//
//     block   64 tokens x 64 features              [blocks][64][64]
//     panel   64 tokens x 64 columns of values     [panels][64][64]
//     state   features x columns, and z, the divisor's state: [panels][features][64], [features]
//
// What is left of the last vector of a row is zeros. z is there, and is zeros, where nothing is divided.
#pragma once

#include "abi.h"
#include "simd.h"
#include "tile.h"

namespace regard {
namespace REGARD_ISA {

struct LinearChunk {
    static constexpr int W = Vec<float>::lanes;
    static constexpr int64_t STEP = 16, BLOCK = LANES * LANES;  // rows of W are computed in steps
    enum Level { END, BEFORE, KEPT, ADDED };  // of Favor: the exponents of a chunk and of the state before it; factors

    const regard_linear &call;
    const bool favor, gated, delta;
    const int64_t dim, blocks, panels, group;
    int64_t head = 0, n = 0, tokens = 0;  // a head of keys, which of its chunks, and how many tokens that has
    Ahead ahead;                          // rows of memory that are next: linear_ahead.h
    F bad{};                              // NaN in a lane that met a value that is not finite

    // of a chunk: in memory of its own where chunks are parted (`use`). k: [blocks]; gates: [blocks], and `whole`, of
    // all tokens together, a float a feature; erase: [blocks], of Delta; tops: exponents of keys; levels: by Level
    float *k, *gates, *erase, *tops, *levels, *whole;
    // of a thread. mine: a chunk; k_lanes: keys in lanes [blocks]; v: values, and what Delta writes; faded: values with
    // what they have left at the end; scaled: rows for Favor; weights: [64][64]; added: what a chunk adds, of Favor
    float *mine, *k_lanes, *v, *faded, *q, *scaled, *weights, *out, *state, *added;
    // factors: ages[63 - age] of a pair; read: of the state at a row; write: of a key at the end; highs: exponents of
    // rows
    float *ages, *read, *write, *highs;
    float *near, *past;    // of Gated: rows as `gate_pairs` has them, and two floats a feature
    float *pairs, *betas;  // of Delta: decays [64][64], and fractions

    LinearChunk(const regard_linear &its_call, float *scratch)
        : call(its_call),
          favor(call.feature == REGARD_FAVOR),
          gated(call.log_gate.data),
          delta(call.beta.data),
          dim(call.features),
          blocks(blocks_of(call)),
          panels(panels_of(call)),
          group(call.heads / call.kv_heads) {
        const auto take = [&](int64_t floats) { return (scratch += floats) - floats; };
        mine = take(chunk_of(call));
        k_lanes = take(blocks * BLOCK), q = take(blocks * BLOCK);
        v = take(panels * BLOCK), faded = take(panels * BLOCK), out = take(panels * BLOCK);
        weights = take(BLOCK);
        scaled = take(favor ? LANES * up(call.qk_dim) : 0);
        state = take(state_of(call)), added = take(favor ? state_of(call) : 0);
        ages = take(2 * LANES), read = take(LANES), write = take(LANES), highs = take(LANES);
        near = take(gated ? blocks * BLOCK : 0), past = take(gated ? 2 * blocks * LANES : 0);
        pairs = take(delta ? BLOCK : 0), betas = take(delta ? LANES : 0);
        use(mine);
    }

    // Floats of a thread.
    static int64_t scratch_of(const regard_linear &call) {
        const bool favor = call.feature == REGARD_FAVOR;
        const int64_t rows =
            (2 * blocks_of(call) + 3 * panels_of(call) + 1) * BLOCK + (favor ? LANES * up(call.qk_dim) : 0);
        const int64_t gated = call.log_gate.data ? blocks_of(call) * (BLOCK + 2 * LANES) : 0;
        const int64_t delta = call.beta.data ? BLOCK + LANES : 0;
        return delta + gated + rows + state_of(call) + (favor ? state_of(call) : 0) + chunk_of(call) + 6 * LANES;
    }

    // Floats of a chunk that is parted from others: a state, then what `use` places.
    static int64_t parted_of(const regard_linear &call) { return state_of(call) + chunk_of(call); }
    static int64_t state_of(const regard_linear &call) {
        return panels_of(call) * call.features * LANES + up(call.features);
    }

    void use(float *chunk) {
        k = chunk;
        gates = k + blocks * BLOCK;
        erase = gates + (gated ? blocks * BLOCK : 0);
        tops = erase;
        if (delta) {
            v = erase + blocks * BLOCK;
            tops = v + panels * BLOCK;
        }
        levels = tops + LANES;
        whole = levels + STEP;
    }

    void go_to(int64_t to_head, int64_t to) {
        head = to_head, n = to;
        tokens = tokens_of(call, n);
    }
    static int64_t tokens_of(const regard_linear &call, int64_t n) {
        const int64_t left = call.tokens - n * call.chunk;
        return left < call.chunk ? left : call.chunk;
    }

    int64_t first_token() const { return n * call.chunk; }
    int64_t key_head() const { return head % call.kv_heads; }
    int64_t batch() const { return head / call.kv_heads; }

    // Features of block b; columns and vectors of a panel.
    int64_t some(int64_t b) const { return dim - b * LANES < LANES ? dim - b * LANES : LANES; }
    int64_t width(int64_t panel) const {
        const int64_t left = call.v_dim - panel * LANES;
        return left < LANES ? left : LANES;
    }
    int vectors(int64_t panel) const { return int((width(panel) + W - 1) / W); }
    // Where blocks have a feature, in the first row.
    static int64_t column(int64_t feature) { return feature / LANES * BLOCK + feature % LANES; }
    float *z_of(float *its_state) const { return its_state + panels * dim * LANES; }
    const float *z_of(const float *its_state) const { return its_state + panels * dim * LANES; }

    bool is_finite() const {
        for (int i = 0; i < W; ++i)
            if (bad[i] != bad[i]) return false;
        return true;
    }
    void look_at(F x) { bad = fma(x, F{}, bad); }

    // The first lanes of a vector, a bit for each.
    static uint64_t first_lanes(int64_t count) {
        return count <= 0 ? 0 : count >= W ? ~uint64_t(0) : (uint64_t(1) << count) - 1;
    }
    static int64_t up(int64_t n) { return (n + STEP - 1) / STEP * STEP; }

  private:
    static int64_t panels_of(const regard_linear &call) { return (call.v_dim + LANES - 1) / LANES; }
    static int64_t blocks_of(const regard_linear &call) { return (call.features + LANES - 1) / LANES; }
    static int64_t chunk_of(const regard_linear &call) {
        const int64_t delta = call.beta.data ? (blocks_of(call) + panels_of(call)) * BLOCK : 0;
        return delta + blocks_of(call) * (call.log_gate.data ? 2 * BLOCK + LANES : BLOCK) + LANES + STEP;
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
