// The plain loops that every kernel must equal: attention pair by pair, as the formula says it.
//
// All is computed in double, whatever the type, and rounded where it is stored: so a difference is the kernel's.
// Nothing here is fast, and nothing is clever: scores are recomputed wherever they are needed.
#define REGARD_ISA plain_loops

#include <cmath>

#include "dropout.h"
#include "kernels.h"
#include "parts.h"

namespace regard {
namespace {

using namespace plain_loops;

constexpr double NEVER = -__builtin_inf();

double get(const void *data, int64_t dtype, int64_t at) {
    switch (dtype) {
        case REGARD_F64:
            return static_cast<const double *>(data)[at];
        case REGARD_F32:
            return static_cast<const float *>(data)[at];
        case REGARD_BF16:
            return widen(static_cast<const bf16 *>(data)[at]);
        default:
            return widen(static_cast<const f16 *>(data)[at]);
    }
}

void put(void *data, int64_t dtype, int64_t at, double x) {
    switch (dtype) {
        case REGARD_F64:
            static_cast<double *>(data)[at] = x;
            break;
        case REGARD_F32:
            static_cast<float *>(data)[at] = float(x);
            break;
        case REGARD_BF16:
            static_cast<bf16 *>(data)[at] = narrow<bf16>(x);
            break;
        default:
            static_cast<f16 *>(data)[at] = narrow<f16>(x);
    }
}

int64_t wide(const regard_call &c) { return c.dtype == REGARD_F64 ? REGARD_F64 : REGARD_F32; }

int64_t up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Where a token of a head begins.
int64_t place(const regard_tensor &t, int64_t b, int64_t h, int64_t token) {
    return b * t.batch + h * t.head + token * t.token;
}

// As a tensor of the call's type would hold it.
double rounded(int64_t dtype, double x) {
    double kept = 0;
    put(&kept, dtype, 0, x);
    return get(&kept, dtype, 0);
}

// Number d of a key or value: of the tensor, or of the parts.
double number(const regard_call &c, const regard_tensor &t, const Parts &parts, int64_t b, int64_t h, int64_t token,
              int64_t d) {
    if (!parts) return get(t.data, c.dtype, place(t, b, h, token) + d);
    Run run;
    Runs(parts, b, token, token + 1).next(run);
    if (!run.part) return 0;
    const regard_part &p = *run.part;
    if (p.form > REGARD_F16) return rounded(c.dtype, coded_number(p, run.page, h, run.slot, d));
    const int64_t at = run.page * p.data_page + h * p.data_head + run.slot * p.data_step + d;
    return rounded(c.dtype, get(p.data, p.form, at));
}

// visit(key) for every key that row i sees, ascending. Keys `keys` and beyond are never visited.
template <typename Visit>
void each_kept(const regard_call &c, int64_t b, int64_t h, int64_t i, Visit visit) {
    const regard_schedule &s = c.by_query;
    const int64_t map = (c.maps_batch > 1 ? b : 0) * c.maps_head + (c.maps_head > 1 ? h : 0);
    const int64_t row = map * s.rows + i / 64, lane = i % 64;
    int64_t run = s.run_start[row], patch = s.patch_start[row];
    const int64_t last_run = s.run_start[row + 1], last_patch = s.patch_start[row + 1];
    while (run < last_run || patch < last_patch) {
        const bool full = patch == last_patch || (run < last_run && s.run_tile[run] < s.patch_tile[patch]);
        const int64_t tile = full ? s.run_tile[run] : s.patch_tile[patch], length = full ? s.run_length[run] : 1;
        const uint64_t *bits = full ? nullptr : s.patterns + 64 * s.patch_pattern[patch];
        for (int64_t j = tile * 64; j < (tile + length) * 64 && j < c.keys; ++j)
            if (full || (bits[j % 64] >> lane & 1)) visit(j);
        ++(full ? run : patch);
    }
}

struct Score {
    double value;
    double slope;  // of the softcap, here
};

Score score(const regard_call &c, int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t q = place(c.q, b, h, i), kv = h / (c.heads / c.kv_heads);
    double s = 0;
    for (int64_t d = 0; d < c.qk_dim; ++d) s += get(c.q.data, c.dtype, q + d) * number(c, c.k, keys_of(c), b, kv, j, d);
    s *= c.scale;
    double slope = 1;
    if (c.softcap > 0) {
        const double t = std::tanh(s / c.softcap);
        s = c.softcap * t;
        slope = 1 - t * t;
    }
    if (c.distance) s += get(c.distance, wide(c), h * c.distance_head + c.keys - 1 + i - j);
    if (c.bias) s += get(c.bias, c.bias_dtype, b * c.bias_batch + h * c.bias_head + i * c.bias_row + j * c.bias_key);
    return {s, slope};
}

// What dropout leaves of 1: 0 or 1 / (1 - dropout).
double share(const regard_call &c, int64_t b, int64_t h, int64_t i, int64_t j) {
    if (c.dropout == 0) return 1;
    const uint32_t row = dropout_row(c.seed, uint32_t(b * c.heads + h), uint32_t(i));
    return dropout_bits(row, dropout_column(uint32_t(j))) < dropout_threshold(c.dropout) ? 0 : 1 / (1 - c.dropout);
}

int64_t forward_units(const regard_call &c, int half) { return half ? 0 : c.batch * c.heads * c.by_query.rows; }

void attend_row(const regard_call &c, int64_t b, int64_t h, int64_t i, double *out) {
    double top = NEVER;
    bool sees = false;
    each_kept(c, b, h, i, [&](int64_t j) {
        const double s = score(c, b, h, i, j).value;
        if (s == NEVER) return;
        sees = true;
        if (s > top) top = s;
    });
    double total = 0;
    for (int64_t d = 0; d < c.v_dim; ++d) out[d] = 0;
    each_kept(c, b, h, i, [&](int64_t j) {
        const double s = score(c, b, h, i, j).value;
        if (s == NEVER) return;
        const double weight = std::exp(s - top), left = share(c, b, h, i, j);
        total += weight;
        if (left == 0) return;
        const int64_t kv = h / (c.heads / c.kv_heads);
        for (int64_t d = 0; d < c.v_dim; ++d) out[d] += weight * left * number(c, c.v, values_of(c), b, kv, j, d);
    });
    put(c.lse, wide(c), (b * c.heads + h) * c.queries + i, sees ? top + std::log(total) : NEVER);
    if (sees && c.sink) total += std::exp(get(c.sink, wide(c), h) - top);
    for (int64_t d = 0; d < c.v_dim; ++d)
        put(c.out.data, c.dtype, place(c.out, b, h, i) + d, sees ? out[d] / total : 0);
}

// A tile of queries.
regard_status forward(const regard_call &c, int, int64_t unit, char *, char *scratch) {
    const int64_t tile = unit % c.by_query.rows, map = unit / c.by_query.rows;
    for (int64_t i = tile * 64; i < (tile + 1) * 64 && i < c.queries; ++i)
        attend_row(c, map / c.heads, map % c.heads, i, reinterpret_cast<double *>(scratch));
    return REGARD_DONE;
}

// log(exp(a) + exp(b)), of infinite ones too.
double log_sum(double a, double b) {
    const double most = a > b ? a : b;
    return std::isinf(most) ? most : most + std::log(std::exp(a - most) + std::exp(b - most));
}

// The gradients that one row adds. dq is written; dk [keys][qk_dim] and dv [keys][v_dim] are added to.
void row_gradients(const regard_gradient &g, int64_t b, int64_t h, int64_t i, double *dq, double *dk, double *dv) {
    const regard_call &c = g.call;
    const int64_t row = (b * c.heads + h) * c.queries + i, kv = h / (c.heads / c.kv_heads);
    const int64_t q = place(c.q, b, h, i), dout = place(g.dout, b, h, i);
    const double lse = get(c.lse, wide(c), row);
    double total = lse;  // with the sink
    if (c.sink && lse != NEVER) total = log_sum(lse, get(c.sink, wide(c), h));
    // what dropout leaves of a weight, with the weight, slope and dp that go with it
    const auto each_pair = [&](auto visit) {
        each_kept(c, b, h, i, [&](int64_t j) {
            const Score s = score(c, b, h, i, j);
            if (s.value == NEVER || lse == NEVER) return;
            const double left = share(c, b, h, i, j);
            double dp = 0;
            for (int64_t d = 0; d < c.v_dim && left != 0; ++d)
                dp += left * get(g.dout.data, c.dtype, dout + d) * get(c.v.data, c.dtype, place(c.v, b, kv, j) + d);
            visit(j, std::exp(s.value - total), left, s.slope, dp);
        });
    };
    double delta = 0;  // sum(dout * out), but for the rounding of out
    each_pair([&](int64_t, double p, double, double, double dp) { delta += p * dp; });
    put(g.delta, wide(c), row, delta);
    const double down = delta - (g.dlse ? get(g.dlse, wide(c), row) * std::exp(total - lse) : 0);
    for (int64_t d = 0; d < c.qk_dim; ++d) dq[d] = 0;
    each_pair([&](int64_t j, double p, double left, double slope, double dp) {
        const int64_t k = place(c.k, b, kv, j);
        for (int64_t d = 0; d < c.v_dim && left != 0; ++d)
            dv[j * c.v_dim + d] += p * left * get(g.dout.data, c.dtype, dout + d);
        const double ds = p * (dp - down), dproduct = ds * slope * c.scale;
        for (int64_t d = 0; d < c.qk_dim; ++d) {
            dq[d] += dproduct * get(c.k.data, c.dtype, k + d);
            dk[j * c.qk_dim + d] += dproduct * get(c.q.data, c.dtype, q + d);
        }
        if (g.ddistance) {
            const int64_t at = h * c.distance_head + c.keys - 1 + i - j;
            put(g.ddistance, wide(c), at, get(g.ddistance, wide(c), at) + ds);
        }
        if (g.dbias) {
            const int64_t *n = g.bias_sizes;
            const int64_t at = (((n[0] > 1 ? b : 0) * n[1] + (n[1] > 1 ? h : 0)) * n[2] + (n[2] > 1 ? i : 0)) * n[3] +
                               (n[3] > 1 ? j : 0);
            put(g.dbias, wide(c), at, get(g.dbias, wide(c), at) + ds);
        }
    });
}

// All gradients, one pair after another, on one thread: several heads add to the same bias.
int64_t backward_units(const regard_gradient &, int half) { return half ? 0 : 1; }

regard_status backward(const regard_gradient &g, int, int64_t, int64_t &, const Pause &, char *shared, char *scratch) {
    const regard_call &c = g.call;
    const int64_t group = c.kv_heads ? c.heads / c.kv_heads : 0;
    double *dq = reinterpret_cast<double *>(scratch), *dk = reinterpret_cast<double *>(shared),
           *dv = dk + c.keys * c.qk_dim;
    for (int64_t unit = 0; unit < c.batch * c.kv_heads; ++unit) {
        const int64_t b = unit / c.kv_heads, kv = unit % c.kv_heads;
        for (int64_t at = 0; at < c.keys * (c.qk_dim + c.v_dim); ++at) dk[at] = 0;
        for (int64_t h = kv * group; h < (kv + 1) * group; ++h)
            for (int64_t i = 0; i < c.queries; ++i) {
                row_gradients(g, b, h, i, dq, dk, dv);
                for (int64_t d = 0; d < c.qk_dim; ++d) put(g.dq.data, c.dtype, place(g.dq, b, h, i) + d, dq[d]);
            }
        for (int64_t j = 0; j < c.keys; ++j) {
            for (int64_t d = 0; d < c.qk_dim; ++d)
                put(g.dk.data, c.dtype, place(g.dk, b, kv, j) + d, dk[j * c.qk_dim + d]);
            for (int64_t d = 0; d < c.v_dim; ++d)
                put(g.dv.data, c.dtype, place(g.dv, b, kv, j) + d, dv[j * c.v_dim + d]);
        }
    }
    return REGARD_DONE;
}

// What a sweep gathers of one head, in doubles until it is whole.
struct Gathered {
    const regard_sweep &s;
    const regard_call &c;
    int64_t down, across;           // of a picture
    double *columns, *mean, *bins;  // [keys], [down][across], [REGARD_BINS]
    double *along;                  // [vector_count]

    Gathered(const regard_sweep &sweep, char *scratch) : s(sweep), c(sweep.call) {
        down = s.mean ? (c.queries + s.cell - 1) / s.cell : 0, across = s.mean ? (c.keys + s.cell - 1) / s.cell : 0;
        columns = reinterpret_cast<double *>(scratch), mean = columns + c.keys;
        bins = mean + down * across, along = bins + REGARD_BINS;
    }
    int64_t numbers() const { return c.keys + down * across + REGARD_BINS + s.vector_count; }
};

double largest_of(const regard_sweep &s, int64_t at) { return get(s.largest, wide(s.call), at); }

void sweep_row(const Gathered &g, int64_t b, int64_t h, int64_t i) {
    const regard_sweep &s = g.s;
    const regard_call &c = g.c;
    const int64_t head = b * c.heads + h, row = head * c.queries + i;
    const double lse = get(c.lse, wide(c), row), sink = c.sink ? get(c.sink, wide(c), h) : NEVER;
    const double total = log_sum(lse, sink);
    const double share = sink == NEVER ? 0 : sink == total ? 1 : std::exp(sink - total);
    double entropy = share > 0 && share < 1 ? -share * (sink - total) : 0, squares = share * share, mass = 0, top = 0;
    int64_t top_key = 0;
    for (int64_t n = 0; n < REGARD_BINS; ++n) g.bins[n] = 0;
    for (int64_t n = 0; n < s.vector_count; ++n) g.along[n] = 0;
    each_kept(c, b, h, i, [&](int64_t j) {
        const double x = lse == NEVER ? NEVER : score(c, b, h, i, j).value - total, a = std::exp(x);
        if (a == 0) return;
        mass += a, squares += a * a, entropy -= a * x;
        if (a > top) top = a, top_key = j;
        int64_t bin = 0;
        for (int64_t d = s.offset + i > j ? s.offset + i - j : j - s.offset - i; d; d /= 2) ++bin;
        g.bins[bin < REGARD_BINS ? bin : REGARD_BINS - 1] += a;
        g.columns[j] += a;
        for (int64_t n = 0; n < s.vector_count; ++n)
            g.along[n] += a * get(s.vectors, wide(c), b * s.vector_batch + j * s.vector_count + n);
        if (!s.mean) return;
        const int64_t cell = i / s.cell * g.across + j / s.cell, at = head * g.down * g.across + cell;
        g.mean[cell] += a;
        if (a > largest_of(s, at)) put(s.largest, wide(c), at, a);
    });
    put(s.entropy, wide(c), row, entropy), put(s.squares, wide(c), row, squares), put(s.mass, wide(c), row, mass);
    put(s.top, wide(c), row, top), s.top_key[row] = top_key;
    for (int64_t n = 0; n < REGARD_BINS; ++n) put(s.bins, wide(c), row * REGARD_BINS + n, g.bins[n]);
    for (int64_t n = 0; n < s.vector_count; ++n) put(s.along, wide(c), row * s.vector_count + n, g.along[n]);
}

int64_t sweep_units(const regard_sweep &s, int half) { return half ? 0 : s.call.batch * s.call.heads; }

// All rows of a head.
regard_status sweep(const regard_sweep &s, int, int64_t head, int64_t &, const Pause &, char *, char *scratch) {
    const regard_call &c = s.call;
    const Gathered g(s, scratch);
    const int64_t cells = g.down * g.across;
    for (int64_t n = 0; n < g.numbers(); ++n) g.columns[n] = 0;
    for (int64_t n = 0; n < cells; ++n) put(s.largest, wide(c), head * cells + n, 0);
    for (int64_t i = 0; i < c.queries; ++i) sweep_row(g, head / c.heads, head % c.heads, i);
    for (int64_t j = 0; j < c.keys; ++j) put(s.columns, wide(c), head * c.keys + j, g.columns[j]);
    for (int64_t n = 0; n < cells; ++n) {
        const int64_t i = n / g.across * s.cell, j = n % g.across * s.cell;
        const int64_t rows = c.queries - i < s.cell ? c.queries - i : s.cell;
        const int64_t columns = c.keys - j < s.cell ? c.keys - j : s.cell;
        put(s.mean, wide(c), head * cells + n, g.mean[n] / double(rows) / double(columns));
    }
    return REGARD_DONE;
}

int64_t shared(const regard_call &c, const regard_gradient *gradient) {
    return gradient ? up(c.keys * (c.qk_dim + c.v_dim) * 8) : 0;
}

int64_t scratch(const regard_call &c, const regard_gradient *gradient) {
    if (const regard_sweep *s = sweep_of(c)) return up(Gathered(*s, nullptr).numbers() * 8);
    return up((gradient ? c.qk_dim : c.v_dim) * 8);
}

// ---- linear attention, token by token -----------------------------------------------------------------------------

double feature(const regard_linear &c, double x) {
    if (c.feature == REGARD_ELU1) return x > 0 ? x + 1 : std::exp(x);
    return c.feature == REGARD_RELU ? (x > 0 ? x : 0) + c.epsilon : x;
}

// All features of a vector, and the exponent that they are stored without.
double features(const regard_linear &c, const double *x, double *found) {
    if (c.feature != REGARD_FAVOR) {
        for (int64_t f = 0; f < c.features; ++f) found[f] = feature(c, x[f]);
        return 0;
    }
    const float *vectors = static_cast<const float *>(c.vectors);
    double most = -HUGE_VAL, squares = 0;
    for (int64_t f = 0; f < c.features; ++f) {
        found[f] = 0;
        for (int64_t i = 0; i < c.qk_dim; ++i)
            found[f] += std::sqrt(c.scale) * x[i] * vectors[(f / 64 * c.qk_dim + i) * 64 + f % 64];
        most = std::fmax(most, found[f]);
    }
    for (int64_t f = 0; f < c.features; ++f) found[f] = std::exp(std::fmax(found[f] - most, -40.0));
    for (int64_t i = 0; i < c.qk_dim; ++i) squares += c.scale * x[i] * x[i];
    return most - squares / 2 - std::log(double(c.features)) / 2;
}

int64_t linear_state(const regard_linear &) { return 0; }  // heads are never parted
int64_t linear_scratch(const regard_linear &c) { return 2 * (c.features * (c.v_dim + 3) + c.qk_dim + c.v_dim); }

bool linear(const regard_linear &c, LinearPass, int64_t unit, int64_t, int64_t, float *, float *scratch) {
    const int64_t b = unit / c.kv_heads, h = unit % c.kv_heads, group = c.heads / c.kv_heads;
    const int64_t columns = c.v_dim + c.normalise;
    float *kept = static_cast<float *>(c.state) + unit * c.features * columns;
    float *top = c.feature == REGARD_FAVOR ? static_cast<float *>(c.top) + unit : nullptr;
    double *state = reinterpret_cast<double *>(scratch), *keys = state + c.features * columns;
    double *queries = keys + c.features, *x = queries + c.features;
    double *has = x + c.qk_dim;
    for (int64_t i = 0; i < c.v_dim; ++i) has[i] = 0;
    for (int64_t i = 0; i < c.features * columns; ++i) state[i] = kept[i];
    const double log = c.log_decay ? get(c.log_decay, REGARD_F32, h * c.log_decay_head) : 0;
    double high = top ? *top : 0;
    bool finite = true;
    const auto read = [&](const regard_tensor &t, int64_t head, int64_t token, int64_t i) {
        const double found = get(t.data, c.dtype, place(t, b, head, token) + i);
        finite &= std::isfinite(found);
        return found;
    };
    const auto map = [&](const regard_tensor &t, int64_t head, int64_t token, double *found) {
        for (int64_t i = 0; i < c.qk_dim; ++i) x[i] = read(t, head, token, i);
        return features(c, x, found);
    };
    for (int64_t token = 0; token < c.tokens; ++token) {
        if (c.k.data) {
            const double one = map(c.k, h, token, keys), next = top ? std::fmax(high + log, one) : 0;
            double decay = std::exp(high + log - next), share = std::exp(one - next);
            if (c.log_fade.data) {
                const double fade = get(c.log_fade.data, REGARD_F32, place(c.log_fade, b, h, token));
                finite &= !std::isnan(fade);
                decay = std::exp(fade);
            }
            if (c.beta.data) {  // values less what the state has for the key
                share = get(c.beta.data, REGARD_F32, place(c.beta, b, h, token));
                finite &= std::isfinite(share);
                for (int64_t i = 0; i < c.v_dim; ++i) {
                    has[i] = 0;
                    for (int64_t f = 0; f < c.features; ++f) has[i] += decay * keys[f] * state[f * columns + i];
                }
            }
            for (int64_t i = 0; i < c.features * columns; ++i) {
                const int64_t f = i / columns * c.log_gate_feature;
                const double gate =
                    c.log_gate.data ? get(c.log_gate.data, REGARD_F32, place(c.log_gate, b, h, token) + f) : 0;
                finite &= !std::isnan(gate);
                const double value = i % columns < c.v_dim ? read(c.v, h, token, i % columns) - has[i % columns] : 1;
                state[i] = decay * std::exp(gate) * state[i] + share * keys[i / columns] * value;
            }
            high = next;
        }
        for (int64_t head = h * group; c.q.data && head < (h + 1) * group; ++head) {
            map(c.q, head, token, queries);
            const auto row = [&](int64_t i) {
                double sum = 0;
                for (int64_t f = 0; f < c.features; ++f) sum += queries[f] * state[f * columns + i];
                return c.feature == REGARD_IDENTITY ? c.scale * sum : sum;
            };
            const double weights = c.normalise ? row(c.v_dim) : 1;
            for (int64_t i = 0; i < c.v_dim; ++i)
                put(c.out.data, c.dtype, place(c.out, b, head, token) + i, row(i) / (weights == 0 ? 1 : weights));
        }
    }
    if (top) *top = float(high);
    for (int64_t i = 0; i < c.features * columns; ++i)
        kept[i] = float(state[i] * (top && high > -HUGE_VAL ? std::exp(high - *top) : 1));
    return finite;
}

}  // namespace

const Kernels plain = {shared, scratch,      forward_units,  forward, backward_units, backward, sweep_units,
                       sweep,  linear_state, linear_scratch, linear,  nullptr,        nullptr};

}  // namespace regard
