// A libregard that hands every call to machine.cpp, which runs one for another processor under an emulator.
//
// The environment variable REGARD_MACHINE is the command that starts it. Its instruction sets take the place of this
// machine's, so that the tests of laws, kernels and storage reach the kernels of another processor, while Python and
// torch are as fast as ever. So are the plain loops that kernels must equal: REGARD_PLAIN is a library of this machine,
// which runs them.
#include <dlfcn.h>
#include <spawn.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "message.h"

extern char **environ;

namespace {

constexpr int64_t DEAD = -99;  // a status that no library has: the emulated process has ended

std::mutex one_at_a_time;
int channel = -1;
pid_t owner = 0;
char names[PAGE];
const char *isas[8];

struct Range {
    uint64_t start, end;
};

// The memory of a process, without its stack, which no call touches.
std::vector<Range> memory_of(pid_t process) {
    char line[512];
    snprintf(line, sizeof line, "/proc/%d/maps", int(process));
    std::vector<Range> found;
    FILE *const maps = fopen(line, "r");
    for (Range range; maps && fgets(line, sizeof line, maps);)
        if (sscanf(line, "%" SCNx64 "-%" SCNx64, &range.start, &range.end) == 2 &&
            (!strchr(line, '[') || strstr(line, "[heap]")))
            found.push_back(range);
    if (maps) fclose(maps);
    return found;
}

// Whether memory of the machine lies where the caller's is, or will soon be: the machine would read its own there.
bool lies_in_the_way(pid_t machine) {
    constexpr uint64_t GROWS = uint64_t(16) << 30;
    const std::vector<Range> ours = memory_of(getpid()), theirs = memory_of(machine);
    return std::any_of(ours.begin(), ours.end(), [&](Range own) {
        return std::any_of(theirs.begin(), theirs.end(),
                           [&](Range other) { return other.start < own.end + GROWS && own.start < other.end + GROWS; });
    });
}

// Starts the machine with a channel to it as its input, in a group of its own: Ctrl-C is for Python.
bool start_anywhere(pid_t &child) {
    if (channel >= 0) close(channel);
    channel = -1, owner = getpid();
    const char *command = getenv("REGARD_MACHINE");
    int ends[2];
    if (!command || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) return false;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 0);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    const char *arguments[] = {"sh", "-c", command, nullptr};
    const bool started =
        !posix_spawn(&child, "/bin/sh", &actions, &attributes, const_cast<char *const *>(arguments), environ);
    close(ends[1]);
    static Message hello;
    if (!started || recv(ends[0], &hello, sizeof hello, 0) != sizeof hello) return close(ends[0]), false;
    memcpy(names, hello.content, PAGE);
    channel = ends[0];
    return true;
}

// A machine whose memory is not in the way: where it lies is chosen at random, so some 1 of 15 is.
bool start() {
    pid_t child;
    for (int attempt = 0; attempt < 10; ++attempt) {
        if (!start_anywhere(child)) return false;
        if (!lies_in_the_way(child)) return true;
    }
    fprintf(stderr, "tests/arm/relay.cpp: the emulated library always lies where memory of Python is\n");
    close(channel);
    channel = -1;
    return false;
}

// As many pages as there are; a page that is not there makes `send` refuse, and nothing else happens.
void send_pages(int64_t address) {
    for (int64_t count = COUNT; count; count /= 2)
        if (send(channel, reinterpret_cast<const void *>(address), size_t(count * PAGE), MSG_NOSIGNAL) == count * PAGE)
            return;
    send(channel, "", 1, MSG_NOSIGNAL);
}

// Whether the machine lived to answer; `wrote`: whether it has changed anything.
bool ask(const Message &call, Message &answer, bool &wrote) {
    if (send(channel, &call, HEADER, MSG_NOSIGNAL) != HEADER) return false;
    while (recv(channel, &answer, sizeof answer, 0) >= HEADER) {
        if (answer.kind == DONE) return true;
        if (answer.kind == FETCH) send_pages(answer.which);
        if (answer.kind == STORE) {
            wrote = true;
            memcpy(reinterpret_cast<void *>(answer.which), answer.content, size_t(answer.arguments[0]));
        }
    }
    return false;
}

// A machine whose own memory lies where the caller's is ends, having changed nothing: another one will lie elsewhere.
Message run(Function function, int64_t a, int64_t b = 0, int64_t c = 0, int64_t d = 0, double number = 0) {
    const std::lock_guard<std::mutex> guard(one_at_a_time);
    const Message call{CALL, function, {a, b, c, d}, number, {}};
    bool wrote = false;
    for (int attempt = 0; attempt < 3 && !wrote; ++attempt) {
        Message answer;
        if ((channel >= 0 && owner == getpid()) || start())
            if (ask(call, answer, wrote)) return answer;
        if (channel >= 0) close(channel);
        channel = -1;
    }
    fprintf(stderr, "tests/arm/relay.cpp: the emulated library has ended within a call\n");
    return {DONE, 0, {DEAD}, double(DEAD), {}};
}

using Run = int64_t(void *);

// The function of this machine's library, for a call of the plain loops; else null.
template <typename Function = Run>
Function *plain(const regard_call *call, const char *name) {
    static void *const library = dlopen(getenv("REGARD_PLAIN") ? getenv("REGARD_PLAIN") : "", RTLD_NOW | RTLD_LOCAL);
    return library && call && call->isa == -1 ? reinterpret_cast<Function *>(dlsym(library, name)) : nullptr;
}

int64_t pointer(const void *p) { return reinterpret_cast<int64_t>(p); }

}  // namespace

int regard_abi_version() {
    const std::lock_guard<std::mutex> guard(one_at_a_time);
    return channel >= 0 || start() ? REGARD_ABI_VERSION : -1;
}

const char *const *regard_isas() {
    if (!*isas) {
        const char **next = isas;
        for (char *name = strtok(names, " "); name; name = strtok(nullptr, " ")) *next++ = name;
    }
    return isas;
}

const char *regard_best_isa() {
    const char *const *last = regard_isas();
    while (last[1]) ++last;
    return *last;
}

int64_t regard_workspace(const regard_call *call) {
    if (Run *here = plain(call, "regard_workspace")) return here(const_cast<regard_call *>(call));
    return run(WORKSPACE, pointer(call)).arguments[0];
}

int64_t regard_forward(regard_call *call) {
    if (Run *here = plain(call, "regard_forward")) return here(call);
    return run(FORWARD, pointer(call)).arguments[0];
}

int64_t regard_attend(const regard_call *form, const regard_operands *operands, int64_t next) {
    if (auto *here = plain<decltype(regard_attend)>(form, "regard_attend")) return here(form, operands, next);
    return run(ATTEND, pointer(form), pointer(operands), next).arguments[0];
}

int64_t regard_attend_workspace(const regard_call *form, const regard_operands *operands) {
    if (auto *here = plain<decltype(regard_attend_workspace)>(form, "regard_attend_workspace"))
        return here(form, operands);
    return run(ATTEND_WORKSPACE, pointer(form), pointer(operands)).arguments[0];
}

int64_t regard_backward(regard_gradient *gradient) {
    if (Run *here = plain(gradient ? &gradient->call : nullptr, "regard_backward")) return here(gradient);
    return run(BACKWARD, pointer(gradient)).arguments[0];
}

int64_t regard_gather(regard_sweep *sweep) {
    if (Run *here = plain(sweep ? &sweep->call : nullptr, "regard_gather")) return here(sweep);
    return run(GATHER, pointer(sweep)).arguments[0];
}

int64_t regard_attend_linear(regard_linear *linear) { return run(LINEAR, pointer(linear)).arguments[0]; }

double regard_products(int64_t isa, int64_t dtype, int64_t threads, double seconds) {
    return run(PRODUCTS, isa, dtype, threads, 0, seconds).number;
}
double regard_stream(int64_t isa, const void *data, int64_t bytes, int64_t threads) {
    return run(STREAM, isa, pointer(data), bytes, threads).number;
}
