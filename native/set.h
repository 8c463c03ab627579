// What one instruction set compiles in several files, so that processors share that: forward passes by type of elements
// (kernels_f32.cpp, kernels_bf16.cpp, kernels_f16.cpp) and gradients (kernels_gradients.cpp). kernels.cpp compiles all
// else and puts them into one table.
#pragma once

#include "kernels.h"

namespace regard {
namespace REGARD_ISA {

struct ForwardKernels {
    int64_t (*shared)(const regard_call &);
    int64_t (*scratch)(const regard_call &);
    int64_t (*units)(const regard_call &, int half);
    regard_status (*run)(const regard_call &, int half, int64_t unit, char *shared, char *scratch);
};

template <typename Pass>
constexpr ForwardKernels forward_kernels() {
    return {
        [](const regard_call &c) { return Pass(c).shared(); },
        [](const regard_call &c) { return Pass(c).scratch(); },
        [](const regard_call &c, int half) { return Pass(c).units(half); },
        [](const regard_call &c, int half, int64_t unit, char *shared, char *scratch) {
            return Pass(c).run(half, unit, shared, scratch);
        },
    };
}

struct GradientKernels {
    int64_t (*shared)(const regard_gradient &);
    int64_t (*scratch)(const regard_gradient &);
    int64_t (*units)(const regard_gradient &, int half);
    regard_status (*run)(const regard_gradient &, int half, int64_t unit, int64_t &done, const Pause &, char *shared,
                         char *scratch);
};

extern const ForwardKernels forward_f64, forward_f32, forward_f16, forward_bf16;
extern const GradientKernels gradients;

}  // namespace REGARD_ISA
}  // namespace regard
