// Whether a call makes sense. Nothing of it is used before this says so; the check itself reads the struct and, when
// its sizes are right, the schedules: about a nanosecond for each run and patch.
#pragma once

#include "abi.h"

namespace regard {

// REGARD_DONE, or what is wrong. Isa and workspace are not looked at.
regard_status check(const regard_call &call);
regard_status check(const regard_gradient &gradient);
regard_status check(const regard_sweep &sweep);
regard_status check(const regard_linear &linear);

}  // namespace regard
