// Measures the machine: the loops of limits.h on several threads, against the clock.
#include <atomic>
#include <chrono>

#include "abi.h"
#include "kernels.h"
#include "threads.h"

namespace regard {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Products {
    const Kernels &kernels;
    int64_t dtype;
    double until;
    std::atomic<int64_t> flops{0};

    static void work(void *self, int64_t) {
        Products &p = *static_cast<Products *>(self);
        double done = 0;
        do done += p.kernels.products(p.dtype, 20000);  // 60 to 250 us
        while (now() < p.until);
        p.flops += int64_t(done);
    }
};

struct Stream {
    const Kernels &kernels;
    const char *data;
    int64_t slice;
    std::atomic<int64_t> threads{0};  // threads that ran: a pool may have fewer than requested
    std::atomic<uint64_t> kept{0};    // so that what is read must be read

    static void work(void *self, int64_t thread) {
        Stream &s = *static_cast<Stream *>(self);
        s.kept += s.kernels.stream(s.data + thread * s.slice, s.slice);
        ++s.threads;
    }
};

}  // namespace
}  // namespace regard

double regard_products(int64_t isa, int64_t dtype, int64_t threads, double seconds) {
    const regard::Kernels *kernels = regard::kernels_of(isa);
    if (!kernels || !kernels->products) return REGARD_BAD_ISA;
    if (dtype < REGARD_F64 || dtype > REGARD_F16 || threads < 1 || !(seconds >= 0 && seconds < 10))
        return REGARD_BAD_SIZE;
    const double start = regard::now();
    regard::Products measured{*kernels, dtype, start + seconds};
    regard::parallel(threads, regard::Products::work, &measured);
    return double(measured.flops) / (regard::now() - start);
}

double regard_stream(int64_t isa, const void *data, int64_t bytes, int64_t threads) {
    const regard::Kernels *kernels = regard::kernels_of(isa);
    if (!kernels || !kernels->stream) return REGARD_BAD_ISA;
    if (!data) return REGARD_BAD_POINTER;
    if (bytes < 0 || threads < 1) return REGARD_BAD_SIZE;
    regard::Stream measured{*kernels, static_cast<const char *>(data), bytes / threads / 64 * 64};
    const double start = regard::now();
    regard::parallel(threads, regard::Stream::work, &measured);
    return double(measured.threads * measured.slice) / (regard::now() - start);
}
