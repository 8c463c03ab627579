// Runs a libregard that was compiled for another processor, in a process of its own under an emulator, for relay.cpp.
//
//     qemu-aarch64 -L ROOT machine LIBRARY        its standard input is the socket to the relay
//
// Addresses mean the same in both processes. A page that the library touches and that is not here yet is fetched from
// the process that called, in the handler of SIGSEGV; a page is kept read-only until it is written. When the function
// has returned, the words that it changed are sent back, and all pages are dropped. So nothing here knows what a call
// consists of, and a page that the caller does not have ends this process, as it would end the caller's.
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "message.h"

// That of glibc clears memory by an instruction, DC ZVA, that QEMU does not repeat rightly after a fault.
extern "C" void *memset(void *to, int value, size_t bytes) {
    volatile char *at = static_cast<char *>(to), *const end = at + bytes;
    while (at < end && reinterpret_cast<uint64_t>(at) % 8) *at++ = char(value);
    for (; end - at >= 8; at += 8) *reinterpret_cast<volatile uint64_t *>(at) = 0x0101010101010101u * uint8_t(value);
    while (at < end) *at++ = char(value);
    return to;
}

namespace {

constexpr int64_t MOST = 1 << 19;  // pages of a call: 2 GiB

struct Page {
    char *at;
    bool written;
};

Page pages[MOST];    // by hash of the address
int64_t used[MOST];  // which of them, in order
int64_t count = 0;
char *before;  // what the page was: [MOST][PAGE]
std::atomic_flag busy = ATOMIC_FLAG_INIT;

[[noreturn]] void fail(const char *why) {
    fprintf(stderr, "tests/arm/machine.cpp: %s\n", why);
    _exit(1);
}

void say(const Message &message, int64_t bytes) {
    if (send(0, &message, size_t(bytes), MSG_NOSIGNAL) != bytes) fail("cannot write to the caller");
}

// Where the page is, or belongs.
Page &slot(const char *at) {
    uint64_t i = uint64_t(at) / PAGE * 0x9e3779b97f4a7c15u >> 45;
    while (pages[i].at && pages[i].at != at) i = (i + 1) % MOST;
    return pages[i];
}

void *memory(void *at, int64_t bytes, int protection) {
    return mmap(at, size_t(bytes), protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// The caller's page, where it is in the caller: in one step, for other threads may be looking at it.
void place(char *at, const char *content) {
    if (count == MOST / 2) fail("a call touches too many pages");
    if (memory(at, PAGE, PROT_NONE) != at) fail("an address of the caller is in use");
    void *fresh = memory(nullptr, PAGE, PROT_READ | PROT_WRITE);
    if (fresh == MAP_FAILED) fail("cannot map a page");
    memcpy(fresh, content, PAGE);
    mprotect(fresh, PAGE, PROT_READ);
    if (mremap(fresh, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, at) != at) fail("cannot move a page");
    Page &page = slot(at);
    page = {at, false};
    used[count++] = &page - pages;
}

void on_fault(int, siginfo_t *info, void *) {
    static char content[COUNT * PAGE];
    while (busy.test_and_set(std::memory_order_acquire)) sched_yield();
    char *const at = reinterpret_cast<char *>(reinterpret_cast<int64_t>(info->si_addr) / PAGE * PAGE);
    if (Page &page = slot(at); page.at) {
        if (!page.written) {  // else another thread was faster
            memcpy(before + (&page - pages) * PAGE, at, PAGE);
            page.written = true;
            mprotect(at, PAGE, PROT_READ | PROT_WRITE);
        }
    } else {
        say({FETCH, reinterpret_cast<int64_t>(at), {}, 0, {}}, HEADER);
        const int64_t got = recv(0, content, sizeof content, 0) / PAGE;
        if (got < 1) fail("the library reads or writes where its caller has no memory");
        for (int64_t i = 0; i < got && !slot(at + i * PAGE).at; ++i) place(at + i * PAGE, content + i * PAGE);
    }
    busy.clear(std::memory_order_release);
}

// The words that differ, in runs.
void give_back(const Page &page, const char *was) {
    static Message message;
    for (int64_t from = 0, to; from < PAGE; from = to) {
        to = from + 8;
        if (!memcmp(page.at + from, was + from, 8)) continue;
        while (to < PAGE && memcmp(page.at + to, was + to, 8)) to += 8;
        message.kind = STORE, message.which = reinterpret_cast<int64_t>(page.at + from);
        message.arguments[0] = to - from;
        memcpy(message.content, page.at + from, size_t(to - from));
        say(message, HEADER + to - from);
    }
}

void drop_pages() {
    for (int64_t i = 0; i < count; ++i) {
        Page &page = pages[used[i]];
        if (page.written) give_back(page, before + used[i] * PAGE);
        munmap(page.at, PAGE);
        page = {};
    }
    count = 0;
}

template <typename F>
F *named(void *library, const char *name, F *) {
    void *found = dlsym(library, name);
    if (!found) fail(name);
    return reinterpret_cast<F *>(found);
}
#define NAMED(function) named(library, #function, function)

}  // namespace

int main(int argc, char **argv) {
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (!library) fail(argc == 2 ? dlerror() : "it takes one argument, the library");
    before = static_cast<char *>(memory(nullptr, MOST * PAGE, PROT_READ | PROT_WRITE));
    if (before == MAP_FAILED) fail("cannot reserve memory");
    struct sigaction action = {};
    action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);

    Message message = {};
    if (NAMED(regard_abi_version)() != REGARD_ABI_VERSION) fail("the library has another version of native/abi.h");
    for (const char *const *name = NAMED(regard_isas)(); *name; ++name)
        strcat(strcat(message.content, *name), name[1] ? " " : "");
    say(message, sizeof message);

    while (recv(0, &message, sizeof message, 0) == HEADER) {
        const int64_t *given = message.arguments;
        void *call = reinterpret_cast<void *>(given[0]);
        Message answer{DONE, 0, {}, 0, {}};
        int64_t &status = answer.arguments[0];
        switch (message.which) {
            case WORKSPACE:
                status = NAMED(regard_workspace)(static_cast<const regard_call *>(call));
                break;
            case FORWARD:
                status = NAMED(regard_forward)(static_cast<regard_call *>(call));
                break;
            case ATTEND:
                status = NAMED(regard_attend)(static_cast<const regard_call *>(call),
                                              reinterpret_cast<const regard_operands *>(given[1]), given[2]);
                break;
            case ATTEND_WORKSPACE:
                status = NAMED(regard_attend_workspace)(static_cast<const regard_call *>(call),
                                                        reinterpret_cast<const regard_operands *>(given[1]));
                break;
            case BACKWARD:
                status = NAMED(regard_backward)(static_cast<regard_gradient *>(call));
                break;
            case GATHER:
                status = NAMED(regard_gather)(static_cast<regard_sweep *>(call));
                break;
            case LINEAR:
                status = NAMED(regard_attend_linear)(static_cast<regard_linear *>(call));
                break;
            case PRODUCTS:
                answer.number = NAMED(regard_products)(given[0], given[1], given[2], message.number);
                break;
            case STREAM:
                answer.number = NAMED(regard_stream)(given[0], reinterpret_cast<void *>(given[1]), given[2], given[3]);
                break;
        }
        drop_pages();
        say(answer, HEADER);
    }
}
