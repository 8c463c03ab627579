// Forward passes of f16 of one instruction set.
#include "pass.h"
#include "set.h"

namespace regard {
namespace REGARD_ISA {

const ForwardKernels forward_f16 = forward_kernels<ForwardPass<Kind<f16, Fused<float>>>>();

}  // namespace REGARD_ISA
}  // namespace regard
