// The C interface of libregard: all that Python sees of it, and all that it exports.
//
// C linkage and plain types, so that the library is built without Python.h or torch, and serves every Python and torch.
// Whoever changes the meaning of anything declared here raises REGARD_ABI_VERSION, here and in src/regard/native.py: a
// library left over from another version is then refused instead of misread.
//
// A call is one struct whose every field has 8 bytes, so that Python writes it with one `struct.pack`. Sizes and
// strides count elements, not bytes; the last stride of every tensor with a dim is 1 and is not given. A size of 0 is
// allowed.
#pragma once

#include <cstdint>

#define REGARD_ABI_VERSION 9
#define REGARD_API extern "C" __attribute__((visibility("default")))

enum regard_dtype : int64_t { REGARD_F64 = 0, REGARD_F32 = 1, REGARD_BF16 = 2, REGARD_F16 = 3 };

// How the elements of a part are stored: plain, in a type of regard_dtype, or as codes. An element is then
// float(code) * scale + low, in float32 and so in one rounding, rounded to the dtype of the call; a kernel may leave
// out the rounding to bf16.
enum regard_form : int64_t { REGARD_INT8 = 4, REGARD_INT4 = 5, REGARD_FP8 = 6 };  // -127 to 127; 0 to 15; e4m3

// What a function returns. Above 0 there is more to do: call again with the same struct.
enum regard_status : int64_t {
    REGARD_DONE = 0,
    REGARD_MORE = 1,
    REGARD_BAD_SIZE = -1,       // a size, stride or number makes no sense, or overflows 64 bits
    REGARD_BAD_POINTER = -2,    // a tensor that is needed is a null pointer
    REGARD_BAD_SCHEDULE = -3,   // a tile or pattern outside of the call
    REGARD_BAD_WORKSPACE = -4,  // smaller than regard_workspace says
    REGARD_BAD_ISA = -5,        // an instruction set that this machine lacks
};

// [batch, heads, tokens, dim]; the stride of dim is 1.
struct regard_tensor {
    void *data;
    int64_t batch, head, token;
};

// Consecutive tokens of every batch row, in pages. Token t of the part (from 0 on) is in slot skip + t of the
// row's pages, `page` slots each.
//
//     plain   [pages][heads][page][dim]              step: from token to token
//     rows    [pages][heads][page][bytes]            of codes, a byte each; int4: 32 dims in 16 bytes, byte i of them
//                                                    holds dim i (low bits) and dim 16 + i
//     tiled   [pages][heads][page / 16][units][16]   a byte for each of 16 tokens; a unit is a dim, of int4 two: 2u
//     (low
//                                                    bits), 2u + 1; step: from tile to tile
//
// Scales are bf16, `low` has their layout: of rows [pages][heads][page][dims / group]; of tiles one for each dim
// and `group` tokens, [pages][heads][page / group][dim], or, if per_token, for each token, [pages][heads][page].
struct regard_part {
    int64_t form;         // a regard_dtype or a regard_form
    int64_t end;          // one past its last token, counted in the row from 0 on over all parts
    const int64_t *ends;  // [batch]: the same where rows differ. Null: end
    int64_t skip;
    int64_t page, pages;   // slots of a page; how many pages there are
    const int64_t *table;  // [batch][table_pages], rows table_row apart: the pages of a row. Null: row b is page b
    int64_t table_pages, table_row;
    const void *data;
    int64_t data_page, data_head, data_step;
    int64_t tiled, per_token, group;
    const void *scale, *low;  // null low: nothing is added
    int64_t scale_page, scale_head, scale_step;
};

// The keys k of the query at position p with max(p + left, start) <= k < min(p + right, stop). Edges beyond 2^60 are
// none.
struct regard_interval {
    int64_t left, right, start, stop;
};

// Bytes [maps_batch][maps_head][queries][keys], any strides, 0 where it broadcasts: 0 hides a pair. Null: none.
struct regard_table {
    const uint8_t *data;
    int64_t batch, head, row, key;
};

// Compressed sparse rows, as src/regard/plan/schedule.py has them, with tiles of 64 x 64. A row is a tile of queries;
// rows of all maps follow one another. With intervals or a table, what they keep is listed into the workspace, and then
// the lists here are there: see listing.h.
struct regard_schedule {
    const regard_interval *intervals;  // [maps][interval_count], of each map a union; all heads share a map then. With
                                       // a table: of all maps, [interval_count]
    int64_t interval_count;            // 0: none
    int64_t offset;                    // the position of query 0 to the intervals; key 0 is at position 0
    regard_table table;                // the pairs that are kept, of those in the intervals if there are any
    int64_t rows;                      // tiles of queries in each map
    const int64_t *run_start, *run_tile, *run_length;         // FULL tiles
    const int64_t *patch_start, *patch_tile, *patch_pattern;  // PARTIAL tiles
    const uint64_t *patterns;  // [patterns][64]: for each key of a tile, a bit for each query, least bit first
    int64_t pattern_count;
};

struct regard_call {
    int64_t bytes;    // sizeof(regard_call), sizeof(regard_gradient) or sizeof(regard_sweep): which of them this is
    int64_t isa;      // an index into regard_isas(); -1: the plain loops that every kernel must equal
    int64_t dtype;    // of q, k, v, out and their gradients
    int64_t threads;  // at most

    int64_t batch, heads, kv_heads, queries, keys, qk_dim, v_dim;

    double scale;
    double softcap;  // 0: none
    double dropout;  // 0: none
    uint64_t seed;   // of the dropout

    regard_tensor q, k, v;
    regard_tensor out;
    const regard_part *k_parts, *v_parts;  // in place of k and v: one after another they hold the keys; forward only.
    int64_t k_count, v_count;              // 0: k, v. Keys of a row beyond its parts read as 0
    // "wide" is float64 for float64, else float32.
    void *lse;         // wide [batch, heads, queries], without the sink
    const void *sink;  // wide [heads], or null: its column is folded into out, not into lse
    const void
        *distance;  // wide: added to the score of row i and key j is distance[h * distance_head + keys - 1 + i - j],
    int64_t distance_head;  // a head has queries + keys - 1 values; 0: all heads share them. Null: none
    const void *bias;       // added to the score: any dtype, any strides, 0 where it broadcasts. Null: none
    int64_t bias_dtype;
    int64_t bias_batch, bias_head, bias_row, bias_key;

    int64_t maps_batch, maps_head;  // (1 or batch, 1 or heads)
    regard_schedule by_query;

    void *
        workspace;  // 64-byte aligned; regard_workspace says how many bytes; its content is kept between calls for MORE
    int64_t workspace_bytes;
    double seconds;  // return MORE after about so long; 0: never
    int64_t next;    // 0 at first; the first unit of work that is still to do
};

// What differs from call to call where all else is alike: the fields of a regard_call that have these names.
struct regard_operands {
    regard_tensor q, k, v, out;
    void *lse;  // null: not wanted
    int64_t threads, queries, keys;
    const regard_interval *intervals;
    int64_t interval_count;  // 0: the schedule is that of the call
    int64_t offset, maps_batch;
    void *workspace;
    int64_t workspace_bytes;
};

// The gradients of a call: by recomputation from lse. `call.out` and `call.lse` are what the forward pass gave.
struct regard_gradient {
    regard_call call;
    regard_tensor dout;
    const void *dlse;          // wide [batch, heads, queries]; null: none flows
    regard_tensor dq, dk, dv;  // of the dtype of the call; written whole
    void *delta;               // wide [batch, heads, queries]: written; sum(dout * out) of each row, out not rounded
    void *ddistance;           // wide, laid out like distance; zeros beforehand. Null: not wanted
    void *dbias;               // wide [bias batch, bias heads, bias rows, bias keys], contiguous, zeros beforehand; an
                               // axis whose stride in `bias` is 0 has size 1. Null: not wanted
    int64_t bias_sizes[4];     // of dbias
};

// The number of bins of distances: bin 0 is distance 0, bin b is 2^(b-1) and more, below 2^b; the last has no
// end.
constexpr int64_t REGARD_BINS = 24;

// What all weights of a call say, gathered in one pass over them. A weight is A[i][j] = exp(score - total), total the
// log of what the row was divided by: lse, and the sink where there is one. Of the call, q, k, lse, the sink, what
// scores are made of and the schedule are read. Its v_dim is 0: no v, no out, no parts, no dropout. All that is written
// is wide, and written whole; a row that sees no key has 0 everywhere.
struct regard_sweep {
    regard_call call;
    int64_t offset;       // the position of query 0, where key 0 has position 0
    void *entropy;        // [batch, heads, queries]: -sum A ln A, nats; the sink's share is an outcome like any key's
    void *squares;        // the same: sum A^2, with the sink's
    void *mass;           // the same: sum A, without
    void *top;            // the same: the largest A
    int64_t *top_key;     // the same: the first key that has it
    void *bins;           // [batch, heads, queries, REGARD_BINS]: the mass by |offset + i - j|
    void *columns;        // [batch, heads, keys]: sum A over all rows
    const void *vectors;  // wide, finite [1 or batch, keys, vector_count], batch rows vector_batch apart
    int64_t vector_count, vector_batch;
    void *along;           // [batch, heads, queries, vector_count]: sum_j A vector[j]
    void *mean, *largest;  // [batch, heads, queries / cell, keys / cell], rounded up: the mean A of the pairs that a
                           // cell has, and the largest. Null: not wanted
    int64_t cell;          // pairs per side of a cell
};

// The map from an element of a query or key to a feature.
enum regard_feature : int64_t {
    REGARD_IDENTITY = 0,
    REGARD_ELU1 = 1,
    REGARD_RELU = 2,
    REGARD_FAVOR = 3
};  // x; elu(x) + 1; max(x, 0) + epsilon; exp(w . x) of random w (linear_favor.h)

// Causal linear attention: a query for each key, which sees the state and the keys up to its own. The dtype is not
// REGARD_F64.
struct regard_linear {
    int64_t bytes;    // sizeof(regard_linear)
    int64_t isa;      // as in regard_call
    int64_t dtype;    // of q, k, v and out
    int64_t threads;  // at most

    int64_t batch, heads, kv_heads, tokens, qk_dim, v_dim;
    int64_t chunk;        // tokens of a chunk, 1 to 64
    int64_t feature;      // a regard_feature, of queries and keys
    int64_t features;     // qk_dim, but for REGARD_FAVOR
    int64_t normalise;    // 1: a row is divided by the sum of its weights, unless that is 0; always of REGARD_FAVOR
    double scale;         // factor of queries, of REGARD_IDENTITY; of q . k, of REGARD_FAVOR; else 1
    double epsilon;       // of REGARD_RELU
    const void *vectors;  // of REGARD_FAVOR, float32 [features / 64, upwards][qk_dim][64], zeros after the last
    void *top;            // of REGARD_FAVOR, float32 [batch, kv_heads]: the state is stored times exp(-top); as `state`

    regard_tensor q, k, v, out;  // null q: no rows, and no out. Null k: no v, rows see the state alone; no decay then
    const void *log_decay;       // float32 [kv_heads], of each token; null: none
    int64_t log_decay_head;
    regard_tensor log_gate;    // float32 [batch, kv_heads, tokens, features or 1]; null: none, as with a null k
    int64_t log_gate_feature;  // 1; 0 if all features have the same
    regard_tensor beta;        // of Delta, float32 [batch, kv_heads, tokens, 1]; null: another rule, as with a null k
    regard_tensor log_fade;    // its decay, float32 of the same shape; null: none
    void *state;  // float32 [batch, kv_heads, features, v_dim + normalise], contiguous: before, then after all tokens
    int64_t spoilt;  // set to 1 if q, k, v or beta is not finite somewhere, or a gate NaN: then nothing else is of use

    void *workspace;
    int64_t workspace_bytes;
};

// The version of this interface that the library was built with.
REGARD_API int regard_abi_version();

// The instruction sets that this library has kernels for and this machine runs, plainest first, ended by a null
// pointer:
// {"portable", "avx2", nullptr}.
REGARD_API const char *const *regard_isas();

// The best instruction set of this machine; not among regard_isas() where it was not compiled.
REGARD_API const char *regard_best_isa();

// The bytes of workspace that the call needs; a regard_status below 0 if the call makes no sense.
REGARD_API int64_t regard_workspace(const regard_call *call);

// Attention: out and lse. Nothing is read or written before all sizes are checked.
REGARD_API int64_t regard_forward(regard_call *call);

// The same of `form` with the operands in it, which leaves both as they are. `next` is 0 at first; a result above 0 is
// the next one to call again with. Too small a workspace gives REGARD_BAD_WORKSPACE, and nothing was done.
REGARD_API int64_t regard_attend(const regard_call *form, const regard_operands *operands, int64_t next);

// The bytes of workspace that regard_attend needs.
REGARD_API int64_t regard_attend_workspace(const regard_call *form, const regard_operands *operands);

// Its gradients: dq, dk, dv, delta, ddistance, dbias.
REGARD_API int64_t regard_backward(regard_gradient *gradient);

// All that a regard_sweep asks for.
REGARD_API int64_t regard_gather(regard_sweep *sweep);

// Linear attention: out and state. regard_workspace takes its struct as well.
REGARD_API int64_t regard_attend_linear(regard_linear *linear);

// FLOP/s of products of that dtype that never leave the registers, measured for about `seconds` seconds on `threads`
// threads: what no kernel of that instruction set can exceed. A regard_status below 0 if the question makes no sense.
REGARD_API double regard_products(int64_t isa, int64_t dtype, int64_t threads, double seconds);

// Bytes/s of one read of the data, shared between the threads. It must have been written before: memory that never was
// is read much faster, since it is not there.
REGARD_API double regard_stream(int64_t isa, const void *data, int64_t bytes, int64_t threads);
