// Gradients of one instruction set.
#include "gradients.h"
#include "set.h"

namespace regard {
namespace REGARD_ISA {
namespace {

// work(Kind) for the type of the call.
template <typename Result, typename Work>
REGARD_INLINE Result by_kind(const regard_gradient &g, Work work) {
    switch (g.call.dtype) {
        case REGARD_F64:
            return work(Kind<double, Fused<double>>{});
        case REGARD_F32:
            return work(Kind<float, Fused<float>>{});
        case REGARD_F16:
            return work(Kind<f16, Fused<float>>{});
        default:
            if (Division(g.call).small) return work(Kind<bf16, Fused<float>>{});
            return work(Kind<bf16, ProductOfBf16>{});
    }
}

int64_t shared(const regard_gradient &g) {
    return by_kind<int64_t>(g, [&](auto kind) { return Gradients<decltype(kind)>::shared_bytes(g); });
}

int64_t scratch(const regard_gradient &g) {
    return by_kind<int64_t>(g, [&](auto kind) { return Backward<decltype(kind)>::bytes(g); });
}

regard_status run(const regard_gradient &g, int half, int64_t unit, int64_t &done, const Pause &pause, char *shared,
                  char *scratch) {
    return by_kind<regard_status>(g, [&](auto kind) {
        Gradients<decltype(kind)> gradients(g, shared, scratch);
        return half ? gradients.second(unit, done, pause) : gradients.first(unit, done, pause);
    });
}

}  // namespace

const GradientKernels gradients = {shared, scratch, gradient_units, run};

}  // namespace REGARD_ISA
}  // namespace regard
