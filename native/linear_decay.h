// Factors of Decay, gamma^age, and exponents of Favor's features: what the state, pairs and keys have left.
//
// A key of Favor is exp(top) times what is stored. So what a chunk adds is exp(end) times what is stored, and the state
// is exp(high) times it: high, the largest exponent so far, is known when all chunks of a block have their sums
// (`raise_level`), and before the scan.
#pragma once

#include "linear_chunk.h"

namespace regard {
namespace REGARD_ISA {

inline double log_decay(const LinearChunk &c) {
    return c.call.log_decay ? static_cast<const float *>(c.call.log_decay)[c.key_head() * c.call.log_decay_head] : 0.0;
}

// Whether keys have a factor each.
inline bool is_aged(const LinearChunk &c) {
    return c.call.k.data && (c.call.log_decay || c.favor || c.call.log_fade.data);
}

// ages[63 - n] is gamma^n, so that the factors of row i begin at 63 - i; of Favor its logarithm.
inline void set_ages(LinearChunk &c) {
    const double log = log_decay(c);
    if (!c.call.log_decay && !c.favor) return;
    for (int64_t n = 0; n < LANES; ++n) {
        if (c.favor) {
            c.ages[LANES - 1 - n] = float(log * double(n));
        } else {
            const float power = float(__builtin_exp(log * double(n)));
            c.ages[LANES - 1 - n] = power;
            if (n < c.tokens) c.write[c.tokens - 1 - n] = power;
            c.read[n] = float(__builtin_exp(log * double(n + 1)));
        }
        c.ages[LANES + n] = 0;
    }
}

// Of the state, after the chunk; but for gates.
inline float kept(const LinearChunk &c) {
    if (c.favor) return c.levels[LinearChunk::KEPT];
    return c.call.log_decay ? float(__builtin_exp(log_decay(c) * double(c.tokens))) : 1.0f;
}

// Of Favor: the largest exponent at the end of the chunk, and what keys have left there.
inline void set_end(LinearChunk &c) {
    const float log = float(log_decay(c));
    float end = -INFINITE;
    for (int64_t j = 0; j < c.tokens; ++j) {
        c.write[j] = c.tops[j] + log * float(c.tokens - 1 - j);
        end = c.write[j] > end ? c.write[j] : end;
    }
    for (int64_t j = 0; j < c.tokens; ++j) c.write[j] = float(__builtin_exp(double(c.write[j] - end)));
    c.levels[LinearChunk::END] = end;
}

// Of Favor: from the state's exponent before the chunk, that after it.
inline void raise_level(LinearChunk &c) {
    float *const levels = c.levels, &high = static_cast<float *>(c.call.top)[c.head];
    const float end = levels[LinearChunk::END], old = high + float(log_decay(c)) * float(c.tokens);
    const float next = old > end ? old : end;
    levels[LinearChunk::BEFORE] = high;
    levels[LinearChunk::KEPT] = float(__builtin_exp(double(old - next)));
    levels[LinearChunk::ADDED] = float(__builtin_exp(double(end - next)));
    high = next;
}

// Of Favor: the largest exponent that each row sees, and what the state has left there.
inline void set_highs(LinearChunk &c) {
    const float log = float(log_decay(c)), before = c.levels[LinearChunk::BEFORE];
    float high = before;
    for (int64_t i = 0; i < c.tokens; ++i) {
        high = high + log > c.tops[i] ? high + log : c.tops[i];
        c.highs[i] = high;
        c.read[i] = float(__builtin_exp(double(before + log * float(i + 1) - high)));
    }
}

}  // namespace REGARD_ISA
}  // namespace regard
