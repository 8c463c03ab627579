// The row avx512vnni: that of avx512, but few rows of bf16 meet codes of 8 and 4 bits by VNNI (fixed.h). Only these
// are compiled once more, in a fifth of the time of a whole set; for Cascade Lake and Ice Lake, which have VNNI and no
// products of bf16.
#include "pass.h"
#include "set.h"

namespace regard {
namespace REGARD_ISA {
namespace {

constexpr ForwardKernels few_rows = forward_kernels<ForwardPass<Kind<bf16, Fused<float>>, true>>();

bool is_own(const regard_call &c, const regard_gradient *g = nullptr) {
    return c.dtype == REGARD_BF16 && !g && !sweep_of(c) && Cut(c).rows;
}

int64_t shared(const regard_call &c, const regard_gradient *g) {
    return is_own(c, g) ? few_rows.shared(c) : avx512.shared(c, g);
}

int64_t scratch(const regard_call &c, const regard_gradient *g) {
    return is_own(c, g) ? few_rows.scratch(c) : avx512.scratch(c, g);
}

int64_t forward_units(const regard_call &c, int half) {
    return is_own(c) ? few_rows.units(c, half) : avx512.forward_units(c, half);
}

regard_status forward(const regard_call &c, int half, int64_t unit, char *shared, char *scratch) {
    return is_own(c) ? few_rows.run(c, half, unit, shared, scratch) : avx512.forward(c, half, unit, shared, scratch);
}

int64_t backward_units(const regard_gradient &g, int half) { return avx512.backward_units(g, half); }

regard_status backward(const regard_gradient &g, int half, int64_t unit, int64_t &done, const Pause &pause,
                       char *shared, char *scratch) {
    return avx512.backward(g, half, unit, done, pause, shared, scratch);
}

int64_t sweep_units(const regard_sweep &s, int half) { return avx512.sweep_units(s, half); }

regard_status sweep(const regard_sweep &s, int half, int64_t unit, int64_t &done, const Pause &pause, char *shared,
                    char *scratch) {
    return avx512.sweep(s, half, unit, done, pause, shared, scratch);
}

int64_t linear_state(const regard_linear &c) { return avx512.linear_state(c); }

int64_t linear_scratch(const regard_linear &c) { return avx512.linear_scratch(c); }

bool linear(const regard_linear &c, LinearPass pass, int64_t unit, int64_t first, int64_t count, float *shared,
            float *scratch) {
    return avx512.linear(c, pass, unit, first, count, shared, scratch);
}

double products(int64_t dtype, int64_t rounds) { return avx512.products(dtype, rounds); }

uint64_t stream(const void *data, int64_t bytes) { return avx512.stream(data, bytes); }

}  // namespace
}  // namespace REGARD_ISA

}  // namespace regard

#include "table.h"
