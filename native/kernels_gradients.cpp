// Gradients of one instruction set.
#include "gradients.h"
#include "set.h"

namespace regard {
namespace REGARD_ISA {
namespace {

// work(Kind) for the type of the call; with few rows and keys bf16 is multiplied as float32.
template <typename Result, typename Work>
REGARD_INLINE Result by_product(const regard_gradient &g, Work work) {
    if (g.call.dtype == REGARD_BF16 && Division(g.call).small) return work(Kind<bf16, Fused<float>>{});
    return by_kind<Result, ProductOfBf16>(g.call.dtype, work);
}

int64_t shared(const regard_gradient &g) {
    return by_product<int64_t>(g, [&](auto kind) { return Gradients<decltype(kind)>::shared_bytes(g); });
}

int64_t scratch(const regard_gradient &g) {
    return by_product<int64_t>(g, [&](auto kind) { return Backward<decltype(kind)>::bytes(g); });
}

regard_status run(const regard_gradient &g, int half, int64_t unit, int64_t &done, const Pause &pause, char *shared,
                  char *scratch) {
    return by_product<regard_status>(g, [&](auto kind) {
        Gradients<decltype(kind)> gradients(g, shared, scratch);
        return half ? gradients.second(unit, done, pause) : gradients.first(unit, done, pause);
    });
}

}  // namespace

const GradientKernels gradients = {shared, scratch, gradient_units, run};

}  // namespace REGARD_ISA
}  // namespace regard
