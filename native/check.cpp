// See check.h.
#include "check.h"

#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "listing.h"

namespace regard {
namespace {

constexpr int64_t LONGEST =
    int64_t(1) << 40;  // of any axis: so far workspaces, which are some KiB per token, fit 64 bits

// Products and sums of sizes, and whether they all fitted 64 bits.
struct Sizes {
    bool fit = true;

    int64_t times(int64_t a, int64_t b) {
        int64_t product = 0;
        fit &= !__builtin_mul_overflow(a, b, &product);
        return product;
    }
    int64_t plus(int64_t a, int64_t b) {
        int64_t sum = 0;
        fit &= !__builtin_add_overflow(a, b, &sum);
        return sum;
    }
    // One past the last element that the axes reach; 0 if an axis is empty.
    template <int n>
    int64_t reach(const int64_t (&sizes)[n], const int64_t (&strides)[n]) {
        int64_t last = 0;
        for (int i = 0; i < n; ++i) {
            if (sizes[i] == 0) return 0;
            fit &= strides[i] >= 0;
            last = plus(last, times(sizes[i] - 1, strides[i]));
        }
        return plus(last, 1);
    }
};

int64_t bytes_of(int64_t dtype) { return dtype == REGARD_F64 ? 8 : dtype == REGARD_F32 ? 4 : 2; }

bool is_dtype(int64_t dtype) { return dtype >= REGARD_F64 && dtype <= REGARD_F16; }

bool is_axis(int64_t size) { return size >= 0 && size <= LONGEST; }

regard_status tensor(const regard_tensor &t, int64_t dtype, int64_t batch, int64_t heads, int64_t tokens, int64_t dim) {
    Sizes s;
    const int64_t elements = s.reach<4>({batch, heads, tokens, dim}, {t.batch, t.head, t.token, 1});
    s.times(elements, bytes_of(dtype));
    if (!s.fit) return REGARD_BAD_SIZE;
    return elements && !t.data ? REGARD_BAD_POINTER : REGARD_DONE;
}

bool is_code(int64_t form) { return form >= REGARD_INT8 && form <= REGARD_FP8; }

// Codes of `dim` elements: their sizes, and the addresses of codes and scales.
regard_status codes(const regard_part &p, int64_t heads, int64_t dim) {
    const bool nibbles = p.form == REGARD_INT4, shared = p.tiled && !p.per_token;  // scales, among tokens
    if (p.group < 1 || !is_axis(p.group)) return REGARD_BAD_SIZE;
    if (p.tiled && p.page % 16) return REGARD_BAD_SIZE;
    if (shared && (p.group % 16 || p.page % p.group)) return REGARD_BAD_SIZE;
    const int64_t bytes = !nibbles ? dim : p.tiled ? (dim + 1) / 2 : (dim + 31) / 32 * 16;
    Sizes s;
    const int64_t steps = p.tiled ? p.page / 16 : p.page;
    const int64_t read = s.reach<5>({p.pages, heads, steps, bytes, p.tiled ? 16 : 1},
                                    {p.data_page, p.data_head, p.data_step, p.tiled ? 16 : 1, 1});
    const int64_t scaled = p.tiled && p.per_token ? 1 : shared ? p.page / p.group : p.page;
    const int64_t across = p.tiled && p.per_token ? p.page : shared ? dim : (dim + p.group - 1) / p.group;
    const int64_t scales = s.reach<4>({p.pages, heads, scaled, across}, {p.scale_page, p.scale_head, p.scale_step, 1});
    s.times(scales, 2);
    if (!s.fit) return REGARD_BAD_SIZE;
    return (read && !p.data) || (scales && !p.scale) ? REGARD_BAD_POINTER : REGARD_DONE;
}

regard_status plain_numbers(const regard_part &p, int64_t heads, int64_t dim) {
    if (p.tiled) return REGARD_BAD_SIZE;
    Sizes s;
    const int64_t elements = s.reach<4>({p.pages, heads, p.page, dim}, {p.data_page, p.data_head, p.data_step, 1});
    s.times(elements, bytes_of(p.form));
    if (!s.fit) return REGARD_BAD_SIZE;
    return elements && !p.data ? REGARD_BAD_POINTER : REGARD_DONE;
}

// Whether the tokens from `begin` to `end` of a batch row are in slots of existing pages.
bool has_pages(const regard_part &p, int64_t row, int64_t begin, int64_t end) {
    if (begin >= end) return true;
    const int64_t last = (p.skip + end - begin - 1) / p.page;
    if (!p.table) return last == 0 && row < p.pages;
    if (last >= p.table_pages) return false;
    for (int64_t i = p.skip / p.page; i <= last; ++i) {
        const int64_t page = p.table[row * p.table_row + i];
        if (page < 0 || page >= p.pages) return false;
    }
    return true;
}

// The parts of the keys or values: each by itself, and then how far each goes in each batch row.
regard_status parts(const regard_call &c, const regard_part *all, int64_t count, int64_t dim) {
    if (!count) return REGARD_DONE;
    if (!is_axis(count)) return REGARD_BAD_SIZE;
    if (!all) return REGARD_BAD_POINTER;
    for (const regard_part *p = all; p != all + count; ++p) {
        if (!is_dtype(p->form) && !is_code(p->form)) return REGARD_BAD_SIZE;
        if (!is_axis(p->skip) || !is_axis(p->pages) || !is_axis(p->page) || !p->page) return REGARD_BAD_SIZE;
        if (p->table && (!is_axis(p->table_pages) || p->table_row < p->table_pages)) return REGARD_BAD_SIZE;
        Sizes s;
        s.times(s.times(c.batch, p->table_row), 8);
        if (!s.fit) return REGARD_BAD_SIZE;
        if (regard_status wrong = is_code(p->form) ? codes(*p, c.kv_heads, dim) : plain_numbers(*p, c.kv_heads, dim))
            return wrong;
    }
    for (int64_t row = 0; row < c.batch; ++row) {
        int64_t begin = 0;
        for (const regard_part *p = all; p != all + count; ++p) {
            const int64_t end = p->ends ? p->ends[row] : p->end;
            if (end < begin || end > c.keys || !has_pages(*p, row, begin, end)) return REGARD_BAD_SIZE;
            begin = end;
        }
    }
    return REGARD_DONE;
}

// Keys or values: their parts, or the tensor.
regard_status stored(const regard_call &c, const regard_tensor &t, const regard_part *all, int64_t count, int64_t dim) {
    return count ? parts(c, all, count, dim) : tensor(t, c.dtype, c.batch, c.kv_heads, c.keys, dim);
}

regard_status sizes(const regard_call &c) {
    for (int64_t size : {c.batch, c.heads, c.kv_heads, c.queries, c.keys, c.qk_dim, c.v_dim})
        if (!is_axis(size)) return REGARD_BAD_SIZE;
    if (c.heads && (!c.kv_heads || c.heads % c.kv_heads)) return REGARD_BAD_SIZE;
    if (!is_dtype(c.dtype) || c.threads < 1) return REGARD_BAD_SIZE;
    Sizes s;
    s.times(s.times(s.times(c.batch, c.heads), c.queries), 8);  // of lse
    return s.fit ? REGARD_DONE : REGARD_BAD_SIZE;
}

regard_status numbers(const regard_call &c) {
    for (double number : {c.scale, c.softcap, c.dropout, c.seconds})
        if (!std::isfinite(number)) return REGARD_BAD_SIZE;
    if (c.softcap < 0 || c.dropout < 0 || c.dropout >= 1 || c.seconds < 0 || c.next < 0) return REGARD_BAD_SIZE;
    return REGARD_DONE;
}

regard_status biases(const regard_call &c) {
    Sizes s;
    if (c.distance) {
        if (c.distance_head != 0 && c.distance_head < c.queries + c.keys - 1) return REGARD_BAD_SIZE;
        s.times(s.plus(s.times(c.heads, c.distance_head), c.queries + c.keys), 8);
    }
    if (c.bias) {
        if (!is_dtype(c.bias_dtype)) return REGARD_BAD_SIZE;
        s.times(s.reach<4>({c.batch, c.heads, c.queries, c.keys}, {c.bias_batch, c.bias_head, c.bias_row, c.bias_key}),
                8);
    }
    return s.fit ? REGARD_DONE : REGARD_BAD_SIZE;
}

// Whether the runs and patches of a row are within the lists, and their tiles within the call, in ascending order.
bool ascends(const regard_schedule &s, int64_t row, int64_t runs, int64_t patches, int64_t across) {
    int64_t run = s.run_start[row], patch = s.patch_start[row], from = 0;
    const int64_t last_run = s.run_start[row + 1], last_patch = s.patch_start[row + 1];
    if (run > last_run || last_run > runs || patch > last_patch || last_patch > patches) return false;
    while (run < last_run || patch < last_patch) {
        const bool full = patch == last_patch || (run < last_run && s.run_tile[run] < s.patch_tile[patch]);
        const int64_t tile = full ? s.run_tile[run] : s.patch_tile[patch], length = full ? s.run_length[run] : 1;
        if (tile < from || length < 1 || tile > across - length) return false;
        if (!full && (s.patch_pattern[patch] < 0 || s.patch_pattern[patch] >= s.pattern_count)) return false;
        from = tile + length;
        ++(full ? run : patch);
    }
    return true;
}

// Of few intervals and rows, as they are listed on one thread.
regard_status intervals(const regard_call &c, const regard_schedule &s, int64_t rows) {
    if (s.interval_count < 0 || s.interval_count > INTERVALS || rows > LISTED_ROWS) return REGARD_BAD_SCHEDULE;
    if (c.maps_head != 1 && !s.table.data) return REGARD_BAD_SCHEDULE;
    if (s.offset > LONGEST || s.offset < -LONGEST) return REGARD_BAD_SIZE;
    return s.intervals || !s.interval_count ? REGARD_DONE : REGARD_BAD_POINTER;
}

// Each of its tiles may take what listing.cpp writes of one, less than a KiB.
regard_status table(const regard_call &c, const regard_table &t, int64_t rows) {
    Sizes s;
    s.reach<4>({c.maps_batch, c.maps_head, c.queries, c.keys}, {t.batch, t.head, t.row, t.key});
    s.times(s.times(rows, (c.keys + 63) / 64), 1024);
    return s.fit ? REGARD_DONE : REGARD_BAD_SIZE;
}

// `tokens` of the axis whose tiles are the rows, `others` of the other one.
regard_status schedule(const regard_call &c, const regard_schedule &s, int64_t tokens, int64_t others) {
    if (s.rows != (tokens + 63) / 64 || s.pattern_count < 0) return REGARD_BAD_SCHEDULE;
    if ((c.maps_batch != 1 && c.maps_batch != c.batch) || (c.maps_head != 1 && c.maps_head != c.heads))
        return REGARD_BAD_SCHEDULE;
    Sizes sizes;
    const int64_t rows = sizes.times(sizes.times(c.maps_batch, c.maps_head), s.rows);
    if (!sizes.fit) return REGARD_BAD_SIZE;
    if (!rows) return REGARD_DONE;
    if (s.table.data)
        if (regard_status wrong = table(c, s.table, rows)) return wrong;
    if (s.interval_count || s.table.data) return intervals(c, s, rows);
    if (!s.run_start || !s.patch_start) return REGARD_BAD_POINTER;
    const int64_t runs = s.run_start[rows], patches = s.patch_start[rows];
    if (s.run_start[0] != 0 || s.patch_start[0] != 0 || runs < 0 || patches < 0) return REGARD_BAD_SCHEDULE;
    if (runs && (!s.run_tile || !s.run_length)) return REGARD_BAD_POINTER;
    if (patches && (!s.patch_tile || !s.patch_pattern || !s.patterns)) return REGARD_BAD_POINTER;
    const int64_t across = (others + 63) / 64;
    for (int64_t row = 0; row < rows; ++row)
        if (!ascends(s, row, runs, patches, across)) return REGARD_BAD_SCHEDULE;
    return REGARD_DONE;
}

// The first that is not REGARD_DONE.
template <typename... Status>
regard_status first(Status... all) {
    for (regard_status status : {all...})
        if (status != REGARD_DONE) return status;
    return REGARD_DONE;
}

regard_status shared(const regard_call &c) {
    if (regard_status wrong = first(sizes(c), numbers(c))) return wrong;
    if (c.batch && c.heads && c.queries && !c.lse) return REGARD_BAD_POINTER;
    return first(tensor(c.q, c.dtype, c.batch, c.heads, c.queries, c.qk_dim),
                 stored(c, c.k, c.k_parts, c.k_count, c.qk_dim), stored(c, c.v, c.v_parts, c.v_count, c.v_dim),
                 tensor(c.out, c.dtype, c.batch, c.heads, c.queries, c.v_dim), biases(c),
                 schedule(c, c.by_query, c.queries, c.keys));
}

regard_status bias_gradients(const regard_gradient &g) {
    const regard_call &c = g.call;
    if ((g.ddistance && !c.distance) || (g.dbias && !c.bias)) return REGARD_BAD_POINTER;
    if (!g.dbias) return REGARD_DONE;
    const int64_t axes[] = {c.batch, c.heads, c.queries, c.keys};
    const int64_t strides[] = {c.bias_batch, c.bias_head, c.bias_row, c.bias_key};
    Sizes s;
    int64_t elements = 8;
    for (int i = 0; i < 4; ++i) {
        if (g.bias_sizes[i] != (strides[i] ? axes[i] : 1)) return REGARD_BAD_SIZE;
        elements = s.times(elements, g.bias_sizes[i]);
    }
    return s.fit ? REGARD_DONE : REGARD_BAD_SIZE;
}

}  // namespace

regard_status check(const regard_call &c) { return c.bytes == sizeof(regard_call) ? shared(c) : REGARD_BAD_SIZE; }

regard_status check(const regard_gradient &g) {
    const regard_call &c = g.call;
    if (c.bytes != sizeof(regard_gradient) || c.k_count || c.v_count) return REGARD_BAD_SIZE;
    if (regard_status wrong = shared(c)) return wrong;
    if (c.batch && c.heads && c.queries && !g.delta) return REGARD_BAD_POINTER;
    return first(tensor(g.dout, c.dtype, c.batch, c.heads, c.queries, c.v_dim),
                 tensor(g.dq, c.dtype, c.batch, c.heads, c.queries, c.qk_dim),
                 tensor(g.dk, c.dtype, c.batch, c.kv_heads, c.keys, c.qk_dim),
                 tensor(g.dv, c.dtype, c.batch, c.kv_heads, c.keys, c.v_dim), bias_gradients(g));
}

regard_status check(const regard_sweep &w) {
    const regard_call &c = w.call;
    if (c.bytes != sizeof(regard_sweep) || c.k_count || c.v_count || c.v_dim || c.dropout != 0) return REGARD_BAD_SIZE;
    if (regard_status wrong = shared(c)) return wrong;
    if (c.keys > INT32_MAX || w.offset > LONGEST || w.offset < -LONGEST) return REGARD_BAD_SIZE;
    if (!is_axis(w.vector_count) || w.vector_batch < 0 || (w.cell && !is_axis(w.cell))) return REGARD_BAD_SIZE;
    if ((w.mean || w.largest) && !w.cell) return REGARD_BAD_SIZE;
    const int64_t down = w.cell ? (c.queries + w.cell - 1) / w.cell : 0,
                  across = w.cell ? (c.keys + w.cell - 1) / w.cell : 0;
    Sizes s;
    const int64_t heads = s.times(s.times(c.batch, c.heads), 8), rows = s.times(heads, c.queries);
    s.times(rows, REGARD_BINS);
    s.times(rows, w.vector_count);
    s.times(s.times(heads, down), across);
    s.times(s.plus(heads, 1024), s.times(s.plus(c.keys, 64), 5));  // more than the units share (SweepCut)
    s.times(s.reach<3>({c.batch, c.keys, w.vector_count}, {w.vector_batch, w.vector_count, 1}), 8);
    if (!s.fit) return REGARD_BAD_SIZE;
    const bool whole = w.entropy && w.squares && w.mass && w.top && w.top_key && w.bins;
    if ((rows && !whole) || (heads && c.keys && !w.columns)) return REGARD_BAD_POINTER;
    if (w.vector_count && ((rows && !w.along) || (c.batch && c.keys && !w.vectors))) return REGARD_BAD_POINTER;
    return !w.mean == !w.largest ? REGARD_DONE : REGARD_BAD_POINTER;
}

regard_status check(const regard_linear &c) {
    if (c.bytes != int64_t(sizeof(regard_linear)) || c.dtype <= REGARD_F64 || c.dtype > REGARD_F16)
        return REGARD_BAD_SIZE;
    for (int64_t size : {c.batch, c.heads, c.kv_heads, c.tokens, c.threads})
        if (!is_axis(size)) return REGARD_BAD_SIZE;
    for (int64_t dim : {c.qk_dim, c.v_dim, c.features})
        if (dim < 1 || dim > 1 << 20) return REGARD_BAD_SIZE;
    const bool favor = c.feature == REGARD_FAVOR;
    if (favor ? !c.normalise || !(c.scale > 0) : c.features != c.qk_dim) return REGARD_BAD_SIZE;
    if (c.heads && (!c.kv_heads || c.heads % c.kv_heads)) return REGARD_BAD_SIZE;
    if (c.chunk < 1 || c.chunk > 64 || c.feature < REGARD_IDENTITY || c.feature > REGARD_FAVOR) return REGARD_BAD_SIZE;
    if (c.normalise < 0 || c.normalise > 1 || c.log_decay_head < 0) return REGARD_BAD_SIZE;
    Sizes s;
    const int64_t heads = s.times(c.batch, c.kv_heads);
    const int64_t floats = s.times(s.times(heads, c.features), s.plus(c.qk_dim, c.v_dim));
    s.times(s.times(s.plus(floats, 64), s.plus(c.threads, c.tokens)), 4 * 1024);  // more than the workspace has
    if (!s.fit) return REGARD_BAD_SIZE;
    for (const regard_tensor *t : {&c.q, &c.out})
        if (c.q.data)
            if (regard_status wrong = tensor(*t, c.dtype, c.batch, c.heads, c.tokens, t == &c.q ? c.qk_dim : c.v_dim))
                return wrong;
    if (!c.k.data && (c.log_decay || c.log_gate.data || c.beta.data)) return REGARD_BAD_SIZE;
    if (c.beta.data ? favor || c.log_decay || c.log_gate.data || c.normalise : c.log_fade.data != nullptr)
        return REGARD_BAD_SIZE;
    for (const regard_tensor *t : {&c.beta, &c.log_fade})
        if (t->data)
            if (regard_status wrong = tensor(*t, REGARD_F32, c.batch, c.kv_heads, c.tokens, 1)) return wrong;
    if (c.log_gate.data && (favor || c.log_decay || c.log_gate_feature < 0 || c.log_gate_feature > 1))
        return REGARD_BAD_SIZE;
    if (c.log_gate.data)
        if (regard_status wrong =
                tensor(c.log_gate, REGARD_F32, c.batch, c.kv_heads, c.tokens, c.log_gate_feature ? c.features : 1))
            return wrong;
    for (const regard_tensor *t : {&c.k, &c.v})
        if (c.k.data)
            if (regard_status wrong =
                    tensor(*t, c.dtype, c.batch, c.kv_heads, c.tokens, t == &c.k ? c.qk_dim : c.v_dim))
                return wrong;
    if (favor && (!c.vectors || (heads && !c.top))) return REGARD_BAD_POINTER;
    return floats && !c.state ? REGARD_BAD_POINTER : REGARD_DONE;
}

}  // namespace regard
