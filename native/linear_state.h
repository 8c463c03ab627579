// The state of linear attention: read and written, what a chunk adds to it, and a step of its scan.
//
//     S = fade S + (write o K)^T V
#pragma once

#include "linear_decay.h"
#include "linear_gated.h"

namespace regard {
namespace REGARD_ISA {

// Where the call has a feature of the state of this head: columns, and z where rows are divided.
inline float *state_row(const LinearChunk &c, int64_t feature) {
    const int64_t columns = c.call.v_dim + (c.call.normalise ? 1 : 0);
    return static_cast<float *>(c.call.state) + (c.head * c.dim + feature) * columns;
}

// A row of a panel: up to 64 floats, and zeros after them if it is to be filled.
REGARD_INLINE void copy_row(const float *from, float *to, int64_t size, bool fill) {
    constexpr int W = LinearChunk::W;
    if (size >= LANES) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i += W) store(to + i, load(from + i));
        return;
    }
    for (int64_t i = 0; i < size; ++i) to[i] = from[i];
    for (int64_t i = size; fill && i < LANES; ++i) to[i] = 0;
}

// Of features `low` to `high`.
inline void read_state(LinearChunk &c, int64_t low, int64_t high) {
    float *const z = c.z_of(c.state);
    for (int64_t f = low; f < high; ++f) {
        const float *from = state_row(c, f);
        for (int64_t p = 0; p < c.panels; ++p)
            copy_row(from + p * LANES, c.state + (p * c.dim + f) * LANES, c.call.v_dim - p * LANES, true);
        z[f] = c.call.normalise ? from[c.call.v_dim] : 0.0f;
    }
    for (int64_t f = c.dim; f < LinearChunk::up(c.dim); ++f) z[f] = 0;
}

inline void write_state(const LinearChunk &c, int64_t low, int64_t high) {
    const float *const z = c.z_of(c.state);
    for (int64_t f = low; f < high; ++f) {
        float *to = state_row(c, f);
        for (int64_t p = 0; p < c.panels; ++p)
            copy_row(c.state + (p * c.dim + f) * LANES, to + p * LANES, c.call.v_dim - p * LANES, false);
        if (c.call.normalise) to[c.call.v_dim] = z[f];
    }
}

// The state times what it has left after the chunk.
inline void fade_state(LinearChunk &c) {
    if (!c.call.log_decay && !c.gated) return;
    const float share = kept(c);
    for (int64_t f = 0; f < c.dim; ++f) {
        const float by = c.gated ? c.whole[f] : share;
        for (int64_t p = 0; p < c.panels; ++p)
            for (int64_t i = (p * c.dim + f) * LANES; i < (p * c.dim + f + 1) * LANES; i += LinearChunk::W)
                store(c.state + i, load(c.state + i) * by);
        c.z_of(c.state)[f] *= by;
    }
}

// Sums of keys, which `aged` keys enter with a factor each.
inline void add_keys(const LinearChunk &c, const float *keys, float *z, bool more) {
    constexpr int W = LinearChunk::W;
    for (int64_t f = 0; f < c.dim; f += W) {
        const float *at = keys + LinearChunk::column(f);
        F sum{};
        if (is_aged(c))
            for (int64_t j = 0; j < c.tokens; ++j) sum = fma(load(at + j * LANES), broadcast(c.write[j]), sum);
        else
            for (int64_t j = 0; j < c.tokens; ++j) sum += load(at + j * LANES);
        store(z + f, more ? load(z + f) + sum : sum);
    }
}

// Values, or where keys have a factor each, values times it.
inline const float *faded_values(LinearChunk &c) {
    if (!is_aged(c)) return c.v;
    for (int64_t p = 0; p < c.panels; ++p)
        for (int64_t j = 0; j < c.tokens; ++j) {
            const int64_t row = p * LinearChunk::BLOCK + j * LANES;
            for (int64_t i = row; i < row + c.vectors(p) * LinearChunk::W; i += LinearChunk::W)
                store(c.faded + i, load(c.v + i) * c.write[j]);
        }
    return c.faded;
}

// K^T V, added to a state or written.
inline void add_chunk(LinearChunk &c, float *to, bool more) {
    if (c.gated) gate_keys(c);
    const float *const keys = c.gated ? c.near : c.k, *lanes = faded_values(c);
    for (int64_t p = 0; p < c.panels; ++p, lanes += LinearChunk::BLOCK)
        for (int64_t b = 0; b < c.blocks; ++b) {
            const char *rows = reinterpret_cast<const char *>(keys + b * LinearChunk::BLOCK);
            float *s = to + (p * c.dim + b * LANES) * LANES;
            if (more)
                multiply<Fused<float>, Along::down, Start::added>(rows, LANES * 4, c.some(b), lanes, c.tokens, s, 0,
                                                                  c.vectors(p), nullptr, {}, &c.ahead);
            else
                multiply<Fused<float>, Along::down, Start::zero>(rows, LANES * 4, c.some(b), lanes, c.tokens, s, 0,
                                                                 c.vectors(p), nullptr, {}, &c.ahead);
        }
    add_keys(c, keys, c.z_of(to), more);
}

// The state after the chunk, and in place of what the chunk adds the state before it: of some of the features.
inline void scan_chunk(LinearChunk &c, float *adds, int64_t low, int64_t high) {
    const float share = kept(c), more = c.favor ? c.levels[LinearChunk::ADDED] : 1.0f;
    for (int64_t p = 0; p < c.panels; ++p)
        for (int64_t f = low; f < high; ++f) {
            const F by = broadcast(c.gated ? c.whole[f] : share);
            for (int64_t i = (p * c.dim + f) * LANES; i < (p * c.dim + f + 1) * LANES; i += LinearChunk::W) {
                const F before = load(c.state + i);
                store(c.state + i, before * by + load(adds + i) * more);
                store(adds + i, before);
            }
        }
    float *const z = c.z_of(c.state), *const other = c.z_of(adds);
    for (int64_t f = low; f < high; ++f) {
        const float before = z[f];
        z[f] = z[f] * (c.gated ? c.whole[f] : share) + other[f] * more;
        other[f] = before;
    }
}

}  // namespace REGARD_ISA
}  // namespace regard
