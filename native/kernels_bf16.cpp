// Forward passes of bf16 of one instruction set.
#include "pass.h"
#include "set.h"

namespace regard {
namespace REGARD_ISA {

const ForwardKernels forward_bf16 = forward_kernels<ForwardPass<Kind<bf16, ProductOfBf16>>>();

}  // namespace REGARD_ISA
}  // namespace regard
