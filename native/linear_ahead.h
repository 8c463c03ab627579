// Rows of memory that a thread reads or writes next, asked for while it multiplies: `LinearChunk::ahead`.
//
// Each element is read once or twice in a call, so that a row that is not asked for is waited for. On Zen 5, 16,384
// tokens in one head of 64 dims: time by that without it, one and two threads, 0.81 to 0.86 and 0.83 to 0.89
// (native/MEASUREMENTS.md).
#pragma once

#include "linear_features.h"

namespace regard {
namespace REGARD_ISA {

template <typename Stored>
class LinearAhead {
    LinearChunk &c;
    const int64_t batch, key_head, token, rows;
    int64_t stops = 0;

  public:
    // Rows of chunk n of a head, if there is one.
    LinearAhead(LinearChunk &chunk, int64_t head, int64_t n)
        : c(chunk),
          batch(head / c.call.kv_heads),
          key_head(head % c.call.kv_heads),
          token(n * c.call.chunk),
          rows(LinearChunk::tokens_of(c.call, n)) {
        c.ahead = Ahead{};
    }

    // A product asks once for each eight steps of six rows. For 64 rows and 64 steps these are the numbers of times: of
    // K^T V, and of Q S and W V.
    LinearAhead &within_sums() { return stops += 80, *this; }
    LinearAhead &within_rows() { return stops += 140, *this; }

    LinearAhead &keys() {
        add<Stored>(c.call.k, key_head, c.call.qk_dim);
        if (c.call.log_gate_feature) add<float>(c.call.log_gate, key_head, c.dim);
        return *this;
    }
    LinearAhead &values() {
        add<Stored>(c.call.v, key_head, c.call.v_dim);
        return *this;
    }
    // Of a head that shares the keys; of the output also, which would be read before it is written.
    LinearAhead &queries(int64_t g) {
        add<Stored>(c.call.q, key_head * c.group + g, c.call.qk_dim);
        add<Stored>(c.call.out, key_head * c.group + g, c.call.v_dim);
        return *this;
    }
    void share() { c.ahead.share(stops * c.panels * c.blocks); }

  private:
    template <typename Element>
    void add(const regard_tensor &t, int64_t head, int64_t size) {
        if (!t.data || rows <= 0) return;
        const int64_t bytes = int64_t(sizeof(Element));
        const Element *row = linear_row<Element>(t, batch, head, token);
        c.ahead.add({reinterpret_cast<const char *>(row), t.token * bytes, size * bytes, rows});
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
