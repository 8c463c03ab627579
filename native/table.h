// The table of the kernels of one instruction set, with which kernels.cpp, kernels_vnni.cpp and kernels_amx.cpp end.
#pragma once

namespace regard {

const Kernels REGARD_KERNELS = {
    REGARD_ISA::shared,         REGARD_ISA::scratch,        REGARD_ISA::forward_units, REGARD_ISA::forward,
    REGARD_ISA::backward_units, REGARD_ISA::backward,       REGARD_ISA::sweep_units,   REGARD_ISA::sweep,
    REGARD_ISA::linear_state,   REGARD_ISA::linear_scratch, REGARD_ISA::linear,        REGARD_ISA::products,
    REGARD_ISA::stream,
};

}  // namespace regard
