// Forward passes of float32 and float64 of one instruction set.
#include "pass.h"
#include "set.h"

namespace regard {
namespace REGARD_ISA {

const ForwardKernels forward_f32 = forward_kernels<ForwardPass<Kind<float, Fused<float>>>>();
const ForwardKernels forward_f64 = forward_kernels<ForwardPass<Kind<double, Fused<double>>>>();

}  // namespace REGARD_ISA
}  // namespace regard
