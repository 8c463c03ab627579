// The C interface of libregard: all that Python sees of it, and all that it exports.
//
// C linkage and plain types, so that the library is built without Python.h or torch, and serves every Python and torch.
// Whoever changes the meaning of anything declared here raises REGARD_ABI_VERSION, here and in src/regard/native.py: a
// library left over from another version is then refused instead of misread.
#pragma once

#define REGARD_ABI_VERSION 1
#define REGARD_API extern "C" __attribute__((visibility("default")))

// The version of this interface that the library was built with.
REGARD_API int regard_abi_version();

// The fastest instruction set that is built in and that this machine runs: the last of regard_isas().
REGARD_API const char *regard_isa();

// Every such instruction set, plainest first, ended by a null pointer: {"portable", "avx2", nullptr}.
REGARD_API const char *const *regard_isas();
