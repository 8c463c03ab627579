// The row amx: that of avx512bf16, but attention in bf16 is multiplied in tiles (amx.h). Only that is compiled once
// more. For Sapphire Rapids and later, where a thread makes some thirty times as many products in tiles as by
// vdpbf16ps.
//
// Calls with few query rows are computed here too, so that a row has the same bits in a prompt and in decoding: up to
// four rows make the sums of tiles by vectors (chains.h). Few rows over quantised keys or values, and gradients with
// products in float32 (division.h), go to the row avx512bf16.
#include "gradients.h"
#include "pass.h"
#include "set.h"

namespace regard {
namespace REGARD_ISA {
namespace {

constexpr ForwardKernels in_tiles = forward_kernels<ForwardPass<Kind<bf16, Tiled>>>();
constexpr ForwardKernels in_chains = forward_kernels<ForwardPass<Kind<bf16, Chained>, true>>();
using OwnGradients = Gradients<Kind<bf16, Tiled>>;

constexpr int64_t CHAINED_ROWS = 4;  // at most; more take less time in tiles

bool has_codes(const Parts &parts) {
    for (int64_t i = 0; i < parts.count; ++i)
        if (parts.all[i].form > REGARD_F16) return true;
    return false;
}

// What computes a call here; null where avx512bf16 does.
const ForwardKernels *own(const regard_call &c) {
    if (c.dtype != REGARD_BF16 || sweep_of(c)) return nullptr;
    const Cut cut(c);
    if (!cut.rows) return &in_tiles;
    if (has_codes(keys_of(c)) || has_codes(values_of(c))) return nullptr;
    return cut.at_once * c.queries <= CHAINED_ROWS ? &in_chains : &in_tiles;
}

// Gradients of few rows and keys are products of float32.
bool is_own(const regard_gradient &g) { return g.call.dtype == REGARD_BF16 && !Division(g.call).small; }

int64_t shared(const regard_call &c, const regard_gradient *g) {
    if (g) return is_own(*g) ? OwnGradients::shared_bytes(*g) : avx512bf16.shared(c, g);
    const ForwardKernels *kernels = own(c);
    return kernels ? kernels->shared(c) : avx512bf16.shared(c, g);
}

int64_t scratch(const regard_call &c, const regard_gradient *g) {
    if (g) return is_own(*g) ? Backward<Kind<bf16, Tiled>>::bytes(*g) : avx512bf16.scratch(c, g);
    const ForwardKernels *kernels = own(c);
    return kernels ? kernels->scratch(c) : avx512bf16.scratch(c, g);
}

int64_t forward_units(const regard_call &c, int half) {
    const ForwardKernels *kernels = own(c);
    return kernels ? kernels->units(c, half) : avx512bf16.forward_units(c, half);
}

regard_status forward(const regard_call &c, int half, int64_t unit, char *shared, char *scratch) {
    const ForwardKernels *kernels = own(c);
    if (!kernels) return avx512bf16.forward(c, half, unit, shared, scratch);
    if (kernels == &in_chains) return in_chains.run(c, half, unit, shared, scratch);
    const Tiles tiles;
    return in_tiles.run(c, half, unit, shared, scratch);
}

int64_t backward_units(const regard_gradient &g, int half) { return avx512bf16.backward_units(g, half); }

regard_status backward(const regard_gradient &g, int half, int64_t unit, int64_t &done, const Pause &pause,
                       char *shared, char *scratch) {
    if (!is_own(g)) return avx512bf16.backward(g, half, unit, done, pause, shared, scratch);
    const Tiles tiles;
    OwnGradients gradients(g, shared, scratch);
    return half ? gradients.second(unit, done, pause) : gradients.first(unit, done, pause);
}

int64_t sweep_units(const regard_sweep &s, int half) { return avx512bf16.sweep_units(s, half); }

regard_status sweep(const regard_sweep &s, int half, int64_t unit, int64_t &done, const Pause &pause, char *shared,
                    char *scratch) {
    return avx512bf16.sweep(s, half, unit, done, pause, shared, scratch);
}

int64_t linear_state(const regard_linear &c) { return avx512bf16.linear_state(c); }

int64_t linear_scratch(const regard_linear &c) { return avx512bf16.linear_scratch(c); }

bool linear(const regard_linear &c, LinearPass pass, int64_t unit, int64_t first, int64_t count, float *shared,
            float *scratch) {
    return avx512bf16.linear(c, pass, unit, first, count, shared, scratch);
}

double products(int64_t dtype, int64_t rounds) {
    return dtype == REGARD_BF16 ? tile_products(rounds) : avx512bf16.products(dtype, rounds);
}

uint64_t stream(const void *data, int64_t bytes) { return avx512bf16.stream(data, bytes); }

}  // namespace
}  // namespace REGARD_ISA

}  // namespace regard

#include "table.h"
