// Values of a key head as products read them down (Tokens::down), made once where many tiles of queries use them.
//
// Each block of 128 tokens is made by the thread that first needs it, so that it is in that thread's caches; a thread
// that needs it meanwhile makes one for itself, and none waits. Where threads are too many for that, all blocks are
// made beforehand.
#pragma once

#include "source.h"

namespace regard {
namespace REGARD_ISA {

template <typename K>
class PairedValues {
    static constexpr int64_t UNIT = Tokens<K>::together;
    enum State : uint8_t { missing, begun, made };

  public:
    static int64_t blocks(int64_t keys) { return (keys + BLOCK - 1) / BLOCK; }
    static int64_t head_bytes(const regard_call &c) {
        return blocks(c.keys) * (BLOCK / UNIT) * Tokens<K>::unit_bytes(c.v_dim);
    }
    // Of all heads: their values, then the states of their blocks.
    static int64_t bytes(const regard_call &c) {
        const int64_t heads = c.batch * c.kv_heads;
        return heads * head_bytes(c) + up(heads * blocks(c.keys), 64);
    }
    static void forget(const regard_call &c, char *memory) {
        const int64_t heads = c.batch * c.kv_heads;
        memset(memory + heads * head_bytes(c), missing, size_t(heads * blocks(c.keys)));
    }

    PairedValues() = default;
    // Those of a key head, counted through the batch.
    PairedValues(const regard_call &c, char *memory, int64_t head)
        : rows_(memory + head * head_bytes(c)),
          states_(reinterpret_cast<uint8_t *>(memory + c.batch * c.kv_heads * head_bytes(c)) + head * blocks(c.keys)),
          keys_(c.keys),
          unit_bytes_(Tokens<K>::unit_bytes(c.v_dim)) {}

    explicit operator bool() const { return rows_; }

    // From a token on, a multiple of UNIT.
    Rows at(int64_t token) const { return {rows_ + token / UNIT * unit_bytes_, unit_bytes_}; }

    // Whether the block that starts at `first` can be read.
    bool has(int64_t first) const { return __atomic_load_n(state(first), __ATOMIC_ACQUIRE) == made; }

    // The same, after it was made, unless another thread is about to.
    bool get(const Source<K> &v, int64_t first, char *row_memory) const {
        if (has(first)) return true;
        uint8_t expected = missing;
        if (!__atomic_compare_exchange_n(state(first), &expected, begun, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return expected == made && has(first);
        make(v, first, row_memory);
        return true;
    }

    void make(const Source<K> &v, int64_t first, char *row_memory) const {
        const int64_t count = least(BLOCK, keys_ - first);
        v.some(first, count, row_memory).down(first, count, rows_ + first / UNIT * unit_bytes_);
        __atomic_store_n(state(first), made, __ATOMIC_RELEASE);
    }

  private:
    uint8_t *state(int64_t first) const { return states_ + first / BLOCK; }

    char *rows_ = nullptr;
    uint8_t *states_ = nullptr;
    int64_t keys_ = 0, unit_bytes_ = 0;
};

}  // namespace REGARD_ISA
}  // namespace regard
