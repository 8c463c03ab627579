// The row amx: that of avx512bf16, but attention in bf16 is multiplied in tiles (amx.h). Only that is compiled once
// more. For Sapphire Rapids and later, where a thread makes some thirty times as many products in tiles as by
// vdpbf16ps.
//
// Calls with few query rows are computed here too, so that a row has the same bits in a prompt and in decoding: up to
// four rows make the sums of tiles by vectors (chains.h). Few rows over quantised keys or values, and gradients with
// products in float32 (division.h), go to the row avx512bf16.
#include "kernels.h"

#include "gradients.h"
#include "pass.h"

namespace regard {
namespace REGARD_ISA {
namespace {

using Own = ForwardPass<Kind<bf16, Tiled>>;
using FewRows = ForwardPass<Kind<bf16, Chained>, true>;
using OwnGradients = Gradients<Kind<bf16, Tiled>>;

constexpr int64_t CHAINED_ROWS = 4;  // at most; more take less time in tiles

bool has_codes(const Parts &parts) {
    for (int64_t i = 0; i < parts.count; ++i)
        if (parts.all[i].form > REGARD_F16) return true;
    return false;
}

enum class Way { borrowed, chains, tiles };

Way way(const regard_call &c) {
    if (c.dtype != REGARD_BF16 || sweep_of(c)) return Way::borrowed;
    const Cut cut(c);
    if (!cut.rows) return Way::tiles;
    if (has_codes(keys_of(c)) || has_codes(values_of(c))) return Way::borrowed;
    return cut.at_once * c.queries <= CHAINED_ROWS ? Way::chains : Way::tiles;
}

// Gradients of few rows and keys are products of float32.
bool is_own(const regard_gradient &g) { return g.call.dtype == REGARD_BF16 && !Division(g.call).small; }

// own(pass) for a call that is computed here, else borrowed().
template <typename Work, typename Borrowed>
int64_t by_way(const regard_call &c, Work own, Borrowed borrowed) {
    switch (way(c)) {
        case Way::tiles:
            return own(Own(c));
        case Way::chains:
            return own(FewRows(c));
        default:
            return borrowed();
    }
}

int64_t shared(const regard_call &c, const regard_gradient *g) {
    if (g) return is_own(*g) ? OwnGradients::shared_bytes(*g) : avx512bf16.shared(c, g);
    return by_way(c, [](const auto &pass) { return pass.shared(); }, [&] { return avx512bf16.shared(c, g); });
}

int64_t scratch(const regard_call &c, const regard_gradient *g) {
    if (g) return is_own(*g) ? Backward<Kind<bf16, Tiled>>::bytes(*g) : avx512bf16.scratch(c, g);
    return by_way(c, [](const auto &pass) { return pass.scratch(); }, [&] { return avx512bf16.scratch(c, g); });
}

int64_t forward_units(const regard_call &c, int half) {
    return by_way(
        c, [&](const auto &pass) { return pass.units(half); }, [&] { return avx512bf16.forward_units(c, half); });
}

regard_status forward(const regard_call &c, int half, int64_t unit, char *shared, char *scratch) {
    switch (way(c)) {
        case Way::tiles: {
            const Tiles tiles;
            return Own(c).run(half, unit, shared, scratch);
        }
        case Way::chains:
            return FewRows(c).run(half, unit, shared, scratch);
        default:
            return avx512bf16.forward(c, half, unit, shared, scratch);
    }
}

int64_t backward_units(const regard_gradient &g, int half) { return avx512bf16.backward_units(g, half); }

regard_status backward(const regard_gradient &g, int half, int64_t unit, int64_t &done, const Pause &pause,
                       char *shared, char *scratch) {
    if (!is_own(g)) return avx512bf16.backward(g, half, unit, done, pause, shared, scratch);
    const Tiles tiles;
    OwnGradients gradients(g, shared, scratch);
    return half ? gradients.second(unit, done, pause) : gradients.first(unit, done, pause);
}

int64_t sweep_units(const regard_sweep &s, int half) { return avx512bf16.sweep_units(s, half); }

regard_status sweep(const regard_sweep &s, int half, int64_t unit, int64_t &done, const Pause &pause, char *shared,
                    char *scratch) {
    return avx512bf16.sweep(s, half, unit, done, pause, shared, scratch);
}

int64_t linear_state(const regard_linear &c) { return avx512bf16.linear_state(c); }

int64_t linear_scratch(const regard_linear &c) { return avx512bf16.linear_scratch(c); }

bool linear(const regard_linear &c, LinearPass pass, int64_t unit, int64_t first, int64_t count, float *shared,
            float *scratch) {
    return avx512bf16.linear(c, pass, unit, first, count, shared, scratch);
}

double products(int64_t dtype, int64_t rounds) {
    return dtype == REGARD_BF16 ? tile_products(rounds) : avx512bf16.products(dtype, rounds);
}

uint64_t stream(const void *data, int64_t bytes) { return avx512bf16.stream(data, bytes); }

}  // namespace
}  // namespace REGARD_ISA

}  // namespace regard

#include "table.h"
