// The C interface, each function a line or two over the C++ behind it.
#include "abi.h"

#include "detect.h"

int regard_abi_version() { return REGARD_ABI_VERSION; }

const char *const *regard_isas() { return regard::isas(); }

const char *regard_isa() {
    const char *const *isa = regard_isas();
    while (isa[1]) ++isa;
    return *isa;
}
