// Causal linear attention in chunks of up to 64 tokens: features, products, decays and division in one pass.
//
//     W = (Q K^T) o decay, lower triangle     O = W V + read o (Q S)     S = fade S + (write o K)^T V
//
// Q and K are features here. Columns of values, and keys of W, are in lanes (tile.h), 64 side by side.
//
//     linear_chunk.h   a chunk and its memory          linear_rows.h       rows of the output
//     linear_decay.h   factors of Decay, exponents     linear_state.h      the state, its sums and scan
//     linear_gated.h   gates                           linear_features.h   features read, rows written; linear_favor.h
//     linear_delta.h   triangular systems              linear_products.h   products along features
//     linear_ahead.h   what is asked of memory
//
// A chunk of 64 tokens with 64 features and 64 columns has 112 KiB of operands: each product reads lanes of
// 16 KiB from L1 (32 KiB on Zen 4 and Cascade Lake), and all else waits in L2. Of its vector instructions nine tenths
// are products; the exponentials of Elu1 are most of the rest.
//
// A head is one chain of chunks. Where heads are too few for the threads, chunks are parted, three times for each block
// of them: what each adds to S; the sum before each; the rows of each. The same sums in the same order: the same bits.
#pragma once

#include "kernels.h"
#include "linear_rows.h"

namespace regard {
namespace REGARD_ISA {

template <typename Stored>
class Linear {
    LinearChunk c;

  public:
    Linear(const regard_linear &call, float *scratch) : c(call, scratch) {}

    // All chunks of a head.
    bool run(int64_t head, int64_t first, int64_t count) {
        c.go_to(head, first);
        read_state(c, 0, c.dim);
        for (int64_t n = first; n < first + count; ++n) {
            c.go_to(head, n);
            begin();
            if (c.call.k.data) before_rows();
            if (c.call.q.data) compute_rows<Stored>(c, c.state, [&] { ask_all(head, n + 1); });
            else ask_all(head, n + 1);
            if (c.call.k.data) after_rows();
        }
        write_state(c, 0, c.dim);
        return c.is_finite();
    }

    // What chunk n adds to the state, and its keys. `later`: the distance to the chunk that this thread computes after
    // its run of consecutive chunks (linear_chain.h); 0 if one thread computes all chunks in order.
    bool sums(int64_t head, int64_t n, int64_t later, float *to) {
        c.use(to + LinearChunk::state_of(c.call));
        c.go_to(head, n);
        begin();
        if (later) LinearAhead<Stored>(c, head, n).within_sums().queries(0).share();
        else LinearAhead<Stored>(c, head, n + 1).within_sums().keys().values().share();
        if (c.delta) solve_chunk(c);
        else add_chunk(c, to, false);
        return c.is_finite();
    }

    // The exponents before each chunk, of Favor.
    void raise_all(int64_t head, int64_t first, int64_t count, float *all) {
        for (int64_t n = first; n < first + count; ++n, all += LinearChunk::parted_of(c.call)) {
            c.use(all + LinearChunk::state_of(c.call));
            c.go_to(head, n);
            raise_level(c);
        }
    }

    // In place of what each chunk adds, the state before it: of some of the features.
    void scan(int64_t head, int64_t first, int64_t count, int64_t low, int64_t high, float *all) {
        c.go_to(head, first);
        read_state(c, low, high);
        for (int64_t n = first; n < first + count; ++n, all += LinearChunk::parted_of(c.call)) {
            c.use(all + LinearChunk::state_of(c.call));
            c.go_to(head, n);
            scan_chunk(c, all, low, high);
        }
        write_state(c, low, high);
    }

    // The same of Delta, of columns `low` and on; and in place of what a chunk would write, what it does write.
    void scan_columns(int64_t head, int64_t first, int64_t count, int64_t low, float *all) {
        constexpr int W = LinearChunk::W;
        const int64_t p = low / LANES, dim = c.dim;
        const int from = int(low % LANES / W), last = from + COLUMNS / W,
                  to = last < c.vectors(p) ? last : c.vectors(p);
        c.go_to(head, first);
        read_state(c, 0, dim);
        for (int64_t n = first; n < first + count; ++n, all += LinearChunk::parted_of(c.call)) {
            c.use(all + LinearChunk::state_of(c.call));
            c.go_to(head, n);
            set_fades(c);
            for (int64_t i = p * dim * LANES; i < (p + 1) * dim * LANES; i += LANES)
                for (int l = from * W; l < to * W; l += W) store(all + i + l, load(c.state + i + l));
            correct_written(c, p, from, to);
            replace_state(c, p, from, to);
        }
        for (int64_t f = 0; f < dim; ++f)
            for (int64_t l = low; l < low + COLUMNS && l < c.call.v_dim; ++l)
                state_row(c, f)[l] = c.state[(p * dim + f) * LANES + l % LANES];
    }

    // The rows of chunk n, before which the state is `from`.
    bool rows(int64_t head, int64_t n, int64_t later, float *from) {
        c.go_to(head, n);
        set_ages(c);
        if (c.call.k.data) {
            c.use(from + LinearChunk::state_of(c.call));
            if (c.delta) set_fades(c);
            else read_values<Stored>(c);
        } else read_state(c, 0, c.dim);
        compute_rows<Stored>(c, c.call.k.data ? from : c.state, [&] {
            if (later) return LinearAhead<Stored>(c, head, n + later).within_rows().keys().values().share();
            LinearAhead<Stored> next(c, head, n + 1);
            if (!c.delta) next.values();
            next.within_rows().queries(0).share();
        });
        return c.is_finite();
    }

  private:
    // Keys and values of a chunk, and their factors.
    void begin() {
        set_ages(c);
        if (!c.call.k.data) return;
        read_features<Stored>(c, c.call.k, c.key_head(), 1, c.k, c.tops);
        read_values<Stored>(c);
        if (c.favor) set_end(c);
        if (c.gated) set_gates(c);
        if (c.delta) set_fades(c);
    }

    void ask_all(int64_t head, int64_t n) {
        LinearAhead<Stored>(c, head, n).within_sums().within_rows().keys().values().queries(0).share();
    }

    // Of a head's chain: what rows need beside keys and values.
    void before_rows() {
        if (c.delta) {
            solve_chunk(c);
            for (int64_t p = 0; p < c.panels; ++p) correct_written(c, p, 0, c.vectors(p));
        }
        if (c.favor) {
            add_chunk(c, c.added, false);
            raise_level(c);
        }
    }

    // Of a head's chain: the state after the chunk.
    void after_rows() {
        if (c.favor) return scan_chunk(c, c.added, 0, c.dim);
        if (c.delta) {
            for (int64_t p = 0; p < c.panels; ++p) replace_state(c, p, 0, c.vectors(p));
            return;
        }
        fade_state(c);
        add_chunk(c, c.state, true);
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
