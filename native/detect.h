// Which instruction sets this machine runs.
#pragma once

namespace regard {

// Names, plainest first, ended by a null pointer. The first is always "portable".
const char *const *isas();

}  // namespace regard
