// Which instruction sets this machine runs, and which of them this library has kernels for.
#pragma once

// 1 for each instruction set that is compiled besides "portable": CMakeLists.txt defines them.
#if !defined(REGARD_WITH_AVX2)
#define REGARD_WITH_AVX2 0
#endif
#if !defined(REGARD_WITH_AVX512)
#define REGARD_WITH_AVX512 0
#endif
#if !defined(REGARD_WITH_AVX512VNNI)
#define REGARD_WITH_AVX512VNNI 0
#endif
#if !defined(REGARD_WITH_AVX512BF16)
#define REGARD_WITH_AVX512BF16 0
#endif
#if !defined(REGARD_WITH_AMX)
#define REGARD_WITH_AMX 0
#endif
#if !defined(REGARD_TILES_IN_MEMORY)  // tests/amx: kernels that run without AMX
#define REGARD_TILES_IN_MEMORY 0
#endif
#if !defined(REGARD_WITH_NEON)
#define REGARD_WITH_NEON 0
#endif

namespace regard {

// Names of the sets that are compiled and run here, plainest first, ended by a null pointer. The first is always
// "portable".
const char *const *isas();

// The best one that this machine runs, built or not.
const char *best_isa();

}  // namespace regard
