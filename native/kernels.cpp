// One instruction set's kernels: its table, statistics of weights, and linear attention. CMakeLists.txt compiles this
// file, and those of the other passes (set.h), once for each set, with REGARD_ISA naming its namespace and
// REGARD_KERNELS its table.
#include "limits.h"
#include "linear.h"
#include "set.h"
#include "sweep.h"

namespace regard {
namespace REGARD_ISA {
namespace {

const ForwardKernels &forward_of(const regard_call &c) {
    switch (c.dtype) {
        case REGARD_F64:
            return forward_f64;
        case REGARD_F32:
            return forward_f32;
        case REGARD_F16:
            return forward_f16;
        default:
            return forward_bf16;
    }
}

int64_t forward_units(const regard_call &c, int half) { return forward_of(c).units(c, half); }

regard_status forward(const regard_call &c, int half, int64_t unit, char *shared, char *scratch) {
    return forward_of(c).run(c, half, unit, shared, scratch);
}

int64_t backward_units(const regard_gradient &g, int half) { return gradients.units(g, half); }

regard_status backward(const regard_gradient &g, int half, int64_t unit, int64_t &done, const Pause &pause,
                       char *shared, char *scratch) {
    return gradients.run(g, half, unit, done, pause, shared, scratch);
}

int64_t sweep_units(const regard_sweep &s, int half) { return SweepCut(s).units(half); }

regard_status sweep(const regard_sweep &s, int half, int64_t unit, int64_t &done, const Pause &pause, char *shared,
                    char *scratch) {
    return by_kind<regard_status, Fused<float>>(s.call.dtype, [&](auto kind) {
        Sweep<decltype(kind)> sweep(s, shared, scratch);
        return half ? sweep.segment.merge(unit) : sweep.run(unit, done, pause);
    });
}

int64_t shared(const regard_call &c, const regard_gradient *g) {
    if (const regard_sweep *s = sweep_of(c)) return SweepCut(*s).shared();
    return g ? gradients.shared(*g) : forward_of(c).shared(c);
}

int64_t scratch(const regard_call &c, const regard_gradient *g) {
    if (const regard_sweep *s = sweep_of(c))
        return by_kind<int64_t, Fused<float>>(c.dtype, [&](auto kind) { return Sweep<decltype(kind)>::bytes(*s); });
    return g ? gradients.scratch(*g) : forward_of(c).scratch(c);
}

template <typename Stored>
bool linear_of(const regard_linear &c, LinearPass pass, int64_t unit, int64_t first, int64_t count, float *place,
               float *scratch) {
    Linear<Stored> linear(c, scratch);
    switch (pass) {
        case LinearPass::heads:
            return linear.run(unit, first, count);
        case LinearPass::sums:
            return linear.sums(unit, first, count, place);
        case LinearPass::raise:
            linear.raise_all(unit, first, count, place);
            return true;
        case LinearPass::rows:
            return linear.rows(unit, first, count, place);
        default: {
            if (c.beta.data) {
                const int64_t parts = (c.v_dim + COLUMNS - 1) / COLUMNS;
                linear.scan_columns(unit / parts, first, count, unit % parts * COLUMNS, place);
                return true;
            }
            const int64_t parts = (c.features + SCANNED - 1) / SCANNED;
            const int64_t low = unit % parts * SCANNED, high = low + SCANNED < c.features ? low + SCANNED : c.features;
            linear.scan(unit / parts, first, count, low, high, place);
            return true;
        }
    }
}

bool linear(const regard_linear &c, LinearPass pass, int64_t unit, int64_t first, int64_t count, float *place,
            float *scratch) {
    switch (c.dtype) {
        case REGARD_F32:
            return linear_of<float>(c, pass, unit, first, count, place, scratch);
        case REGARD_F16:
            return linear_of<f16>(c, pass, unit, first, count, place, scratch);
        default:
            return linear_of<bf16>(c, pass, unit, first, count, place, scratch);
    }
}

int64_t linear_state(const regard_linear &c) { return LinearChunk::parted_of(c); }
int64_t linear_scratch(const regard_linear &c) { return LinearChunk::scratch_of(c); }

}  // namespace
}  // namespace REGARD_ISA

}  // namespace regard

#include "table.h"
