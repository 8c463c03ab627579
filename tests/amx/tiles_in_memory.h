// AMX's tiles as plain memory, so that native/amx.h runs, and sanitizers watch what it reads, on machines without AMX.
//
// Included before all else (-include) where kernels_amx.cpp is compiled with the flags of avx512bf16: a function
// here for each instruction that amx.h uses. (Intel's manual, volume 2, TDPBF16PS: in each lane the products of even
// numbers are one chain of multiply-adds, those of odd ones another; numbers below the normal ones count as 0.)
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_release
#define _tile_loadd tiles_in_memory::load
#define _tile_stored tiles_in_memory::store
#define _tile_zero tiles_in_memory::zero
#define _tile_dpbf16ps tiles_in_memory::multiply
#define _tile_loadconfig tiles_in_memory::load_config
#define _tile_storeconfig tiles_in_memory::store_config
#define _tile_release tiles_in_memory::release
#define __AMX_BF16__ 1

namespace tiles_in_memory {

struct Config {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

struct alignas(64) Tile {
    char row[16][64];
};

struct Registers {
    Config config;
    Tile tile[8];
};

inline thread_local Registers registers{};

// Of a thread that configured its tiles: to the others the machine sends a signal.
inline Tile &tile(int n) {
    if (registers.config.palette != 1 || registers.config.rows[n] != 16 || registers.config.bytes[n] != 64) abort();
    return registers.tile[n];
}

inline void release() { registers = {}; }

inline void load_config(const void *from) {
    release();
    memcpy(&registers.config, from, sizeof(Config));
}

inline void store_config(void *to) { memcpy(to, &registers.config, sizeof(Config)); }

inline void zero(int n) { tile(n) = {}; }

inline void load(int n, const void *from, int64_t stride) {
    Tile &to = tile(n);
    for (int r = 0; r < 16; ++r) memcpy(to.row[r], static_cast<const char *>(from) + r * stride, 64);
}

inline void store(int n, void *to, int64_t stride) {
    const Tile &from = tile(n);
    for (int r = 0; r < 16; ++r) memcpy(static_cast<char *>(to) + r * stride, from.row[r], 64);
}

// Of pairs of bf16, as float32.
inline __m512 even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 odd(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xffff0000))));
}

__attribute__((noinline)) inline void multiply_normal(Tile &sums, const Tile &rows, const Tile &lanes) {
    for (int r = 0; r < 16; ++r) {
        __m512 a = _mm512_setzero_ps(), b = _mm512_setzero_ps();
        for (int i = 0; i < 16; ++i) {
            int32_t pair;
            memcpy(&pair, rows.row[r] + 4 * i, sizeof pair);
            const __m512i one = _mm512_set1_epi32(pair), of = _mm512_load_si512(lanes.row[i]);
            a = _mm512_fmadd_ps(even(one), even(of), a);
            b = _mm512_fmadd_ps(odd(one), odd(of), b);
        }
        _mm512_store_ps(sums.row[r], _mm512_add_ps(_mm512_load_ps(sums.row[r]), _mm512_add_ps(a, b)));
    }
}

inline void multiply(int sums, int rows, int lanes) {
    constexpr unsigned DENORMALS_ARE_ZERO = 0x40, FLUSH_TO_ZERO = 0x8000;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | DENORMALS_ARE_ZERO | FLUSH_TO_ZERO);
    multiply_normal(tile(sums), tile(rows), tile(lanes));
    _mm_setcsr(before);
}

}  // namespace tiles_in_memory
