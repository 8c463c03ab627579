// Products of bf16 by AMX: 16 x 16 sums of 32 products each by one instruction, in eight tiles of 16 rows of 64 bytes.
//
//     C [16 rows][16 lanes] += A [16 rows][32 numbers] * B [16 pairs][16 lanes]
//
// B are lanes in pairs as Pairs has them, and A are rows of memory, in place: keys for scores. For outputs A are values
// that were transposed: [32 tokens][dim] becomes, for each 16 dims, [16 dims][32 tokens] (`turn`).
//
// In each lane the products of 32 numbers are two chains of multiply-adds, of even and of odd ones, whose sum is then
// added. (TDPBF16PS in Intel's manual, volume 2. It takes numbers below the normal ones as 0.) So sums go by 32 tokens,
// from a multiple of 32 on, and what is hidden among these has a weight of 0.
#pragma once

#include "tile.h"

#if defined(__AMX_BF16__)

namespace regard {
namespace REGARD_ISA {

// Tiles of 16 rows of 64 bytes while it lives; then as they were, since others configure them once and rely on it.
class Tiles {
  public:
    Tiles() {
        _tile_storeconfig(&before_);
        __asm__ volatile("" ::"r"(&before_) : "memory");
        Config all{};
        all.palette = 1;
        for (int i = 0; i < 8; ++i) all.bytes[i] = 64, all.rows[i] = 16;
        load(all);
    }
    ~Tiles() {
        if (before_.palette) load(before_);
        else _tile_release();
    }
    Tiles(const Tiles &) = delete;

  private:
    struct alignas(64) Config {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    // GCC knows that the instruction reads the first 8 bytes, and would leave the others unwritten.
    static void load(const Config &config) {
        __asm__ volatile("" ::"r"(&config) : "memory");
        _tile_loadconfig(&config);
    }
    Config before_;
};

constexpr int SIDE = 16;  // rows and lanes of a tile

// Rows times lanes in R x N tiles (of at most four sums), `steps` of 32 numbers each.
//     rows: tile r begins r * next bytes on, its rows are `row` bytes apart; the next 32 numbers `step` bytes on
//     lanes: tile n begins 64 n bytes on, the next 16 pairs 64 x 64 bytes
//     out: rows of 64 lanes
template <int R, int N, bool add>
REGARD_INLINE void tile_product(const char *rows, int64_t row, int64_t next, int64_t step, const uint32_t *lanes,
                                int64_t steps, float *out) {
    constexpr int64_t OUT = LANES * 4;
    const auto to = [&](int r, int n) { return out + r * SIDE * LANES + n * SIDE; };
    __asm__ volatile("" ::: "memory");  // GCC does not know that a tile is loaded from memory
    if constexpr (add) {
        _tile_loadd(0, to(0, 0), OUT);
        if constexpr (N > 1) _tile_loadd(1, to(0, 1), OUT);
        if constexpr (R > 1) _tile_loadd(2, to(1, 0), OUT);
        if constexpr (R > 1 && N > 1) _tile_loadd(3, to(1, 1), OUT);
    } else {
        _tile_zero(0);
        if constexpr (N > 1) _tile_zero(1);
        if constexpr (R > 1) _tile_zero(2);
        if constexpr (R > 1 && N > 1) _tile_zero(3);
    }
    for (int64_t i = 0; i < steps; ++i, rows += step, lanes += SIDE * LANES) {
        _tile_loadd(6, lanes, OUT);
        _tile_loadd(4, rows, row);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (N > 1) {
            _tile_loadd(7, lanes + SIDE, OUT);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (R > 1) {
            _tile_loadd(5, rows + next, row);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (N > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, to(0, 0), OUT);
    if constexpr (N > 1) _tile_stored(1, to(0, 1), OUT);
    if constexpr (R > 1) _tile_stored(2, to(1, 0), OUT);
    if constexpr (R > 1 && N > 1) _tile_stored(3, to(1, 1), OUT);
}

// Sums that were made: rows by vectors of lanes.
struct Made {
    int row, rows, first, last;
};
struct Ignored {
    void operator()(const Made &) const {}
};

// The same for `tiles` tiles of rows by the vectors `first` to `last` of lanes. made(sums) is called for all of them, a
// few at a time; but for the last, while the next ones are multiplied.
template <bool add, typename Use = Ignored>
REGARD_INLINE void tile_products(const char *rows, int64_t row, int64_t next, int64_t step, int64_t tiles,
                                 const uint32_t *lanes, int64_t steps, float *out, int first, int last, Ahead *ahead,
                                 Use made = {}) {
    Made before{};
    for (int r = 0; r < tiles; r += 2, rows += 2 * next, out += 2 * SIDE * LANES)
        for (int v = first; v < last; v += 2) {
            if (ahead) ahead->ask<false>();
            const uint32_t *const by = lanes + v * SIDE;
            float *const to = out + v * SIDE;
            const bool high = r + 1 < tiles, wide = v + 1 < last;
            if (high && wide) tile_product<2, 2, add>(rows, row, next, step, by, steps, to);
            else if (high) tile_product<2, 1, add>(rows, row, next, step, by, steps, to);
            else if (wide) tile_product<1, 2, add>(rows, row, next, step, by, steps, to);
            else tile_product<1, 1, add>(rows, row, next, step, by, steps, to);
            if (before.rows) made(before);
            before = {r * SIDE, high ? 2 * SIDE : SIDE, v, wide ? v + 2 : v + 1};
        }
    if (before.rows) made(before);
}

// out[r][lanes] = rows . lanes for `count` rows of `units` pairs, a multiple of 16; made: as above.
template <bool add = false, typename Use = Ignored>
inline void tiles_across(const char *rows, int64_t stride, int64_t count, const uint32_t *lanes, int64_t units,
                         float *out, int first, int last, Ahead *ahead = nullptr, Use made = {}) {
    const int64_t whole = count / SIDE, rest = count % SIDE, steps = units / SIDE;
    tile_products<add>(rows, stride, SIDE * stride, 64, whole, lanes, steps, out, first, last, ahead, made);
    if (!rest) return;
    // the last rows, of a tile that memory does not have
    constexpr int64_t AT_ONCE = 4;  // steps
    rows += whole * SIDE * stride, out += whole * SIDE * LANES;
    alignas(64) float sums[SIDE * LANES];
    if (add)
        for (int64_t i = 0; i < rest * LANES; i += 16) store(sums + i, load(out + i));
    alignas(64) char some[AT_ONCE * SIDE * 64];
    int64_t i = 0;
    do {
        const int64_t now = steps - i < AT_ONCE ? steps - i : AT_ONCE;
        for (int64_t s = 0; s < now; ++s)
            for (int64_t r = 0; r < SIDE; ++r)
                _mm512_store_si512(some + (s * SIDE + r) * 64,
                                   r < rest ? _mm512_loadu_si512(rows + r * stride + (i + s) * 64) : __m512i{});
        const uint32_t *const by = lanes + i * SIDE * LANES;
        if (add || i) tile_products<true>(some, 64, 0, SIDE * 64, 1, by, now, sums, first, last, nullptr);
        else tile_products<false>(some, 64, 0, SIDE * 64, 1, by, now, sums, first, last, nullptr);
        i += now;
    } while (i < steps);
    for (int64_t r = 0; r < rest; ++r)
        for (int v = first; v < last; ++v) store(out + r * LANES + v * SIDE, load(sums + r * LANES + v * SIDE));
    made(Made{int(whole * SIDE), int(rest), first, last});
}

// Does `rounds` rounds of products of four tiles that stay where they are, and returns the FLOPs: what kernels are
// measured by, as in limits.h.
inline double tile_products(int64_t rounds) {
    const Tiles tiles;
    alignas(64) float sums[SIDE * SIDE];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t i = 0; i < rounds; ++i) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, 64);
    volatile float kept = sums[0];
    (void)kept;
    return 4.0 * 2 * SIDE * SIDE * 32 * double(rounds);
}

// ---- tokens, transposed --------------------------------------------------------------------------------------------

constexpr int64_t TURNED = 32;  // tokens that are transposed together
constexpr int64_t sides(int64_t n) { return (n + SIDE - 1) / SIDE; }
// How often `turn` transposes eight dims.
constexpr int64_t turns(int64_t tokens, int64_t dim) { return (tokens + TURNED - 1) / TURNED * sides(dim) * 2; }
inline int64_t turned_bytes(int64_t dim) { return sides(dim) * SIDE * TURNED * 2; }  // of TURNED tokens

// Eight vectors, each of eight words of four rows: word d of rows 8 l + i, from vector i, lane l, to vector d.
REGARD_INLINE void turn_words(__m512i (&x)[8]) {
    __m512i y[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2)
        y[i] = _mm512_unpacklo_epi16(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi16(x[i], x[i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            x[i + 2 * h] = _mm512_unpacklo_epi32(y[i + h], y[i + 2 + h]);
            x[i + 2 * h + 1] = _mm512_unpackhi_epi32(y[i + h], y[i + 2 + h]);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        y[2 * i] = _mm512_unpacklo_epi64(x[i], x[i + 4]);
        y[2 * i + 1] = _mm512_unpackhi_epi64(x[i], x[i + 4]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) x[i] = y[i];
}

// Rows 8 l + i of eight dims in lane l of vector i. Only whole: `count` rows of eight dims are at least 32 rows.
template <bool whole>
REGARD_INLINE void take_words(const char *from, int64_t stride, int64_t count, __mmask8 real, __m512i (&x)[8]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const auto eight = [&](int l) {
            const int64_t row = 8 * l + i;
            const char *const at = from + row * stride;
            if (whole) return _mm_loadu_si128(reinterpret_cast<const __m128i *>(at));
            return _mm_maskz_loadu_epi16(row < count ? real : __mmask8(0), at);
        };
        x[i] = _mm512_castsi128_si512(eight(0));
        x[i] = _mm512_inserti32x4(x[i], eight(1), 1);
        x[i] = _mm512_inserti32x4(x[i], eight(2), 2);
        x[i] = _mm512_inserti32x4(x[i], eight(3), 3);
    }
}

// Up to 32 tokens, `stride` bytes apart, as [tiles of 16 dims][16 dims][32 tokens]; what is missing is 0.
inline void turn(const char *rows, int64_t stride, int64_t count, int64_t dim, char *out, Ahead *ahead) {
    for (int64_t d = 0; d < sides(dim) * SIDE; d += 8, out += 8 * 64) {
        if (ahead) ahead->ask<false>();
        const int64_t dims = dim - d < 8 ? dim - d : 8;
        __m512i x[8];
        if (count >= TURNED && dims == 8) take_words<true>(rows + d * 2, stride, count, 0xff, x);
        else take_words<false>(rows + d * 2, stride, count, dims > 0 ? __mmask8((1 << dims) - 1) : __mmask8(0), x);
        turn_words(x);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) _mm512_store_si512(out + i * 64, x[i]);
    }
}

// out[dim][lanes] += transposed tokens . weights, `groups` of 32 tokens.
template <bool add>
inline void tiles_down(const char *turned, int64_t dim, int64_t groups, const uint32_t *weights, float *out, int first,
                       int last) {
    tile_products<add>(turned, 64, SIDE * 64, turned_bytes(dim), sides(dim), weights, groups, out, first, last,
                       nullptr);
}

}  // namespace REGARD_ISA
}  // namespace regard

#endif

namespace regard {
namespace REGARD_ISA {

// Called now and then between products in tiles, while vectors are computed with: a product that nobody needs, into
// tile 5, which each product of rows loads before it uses it. The unit for tiles goes to sleep when it had nothing to
// do for 1,600 to 2,400 cycles, and waking it takes 1,100 to 1,500. For 280 cycles after a product vectors of 512 bits
// are half as fast. (Intel Xeon: native/MEASUREMENTS.md.)
template <typename K>
REGARD_INLINE void stay_awake() {
#if defined(REGARD_TILES)
    if constexpr (K::tiled) _tile_dpbf16ps(5, 6, 7);
#endif
}

}  // namespace REGARD_ISA
}  // namespace regard
