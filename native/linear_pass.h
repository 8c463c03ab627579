// Linear attention on several threads: the workspace that it needs. The pass itself is regard_attend_linear
// (linear.cpp).
#pragma once

#include "abi.h"

namespace regard {

// Bytes, or a regard_status below 0.
int64_t linear_workspace(const regard_linear &c);

}  // namespace regard
