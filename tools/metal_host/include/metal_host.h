// What runs a threadgroup on the CPU: one fiber per thread, collectives as yields, memory that is checked.
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <type_traits>

namespace mh {

constexpr int kLanes = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kThreadgroupBytes = 32768;
constexpr size_t kStackBytes = 256 * 1024;

// Who touched a byte last, and when: enough to tell whether a barrier stood between two touches.
struct Touch {
    uint32_t group = 0;  // threadgroup, counted from 1; 0: never
    uint32_t epoch = 0;  // barriers of the threadgroup that ordered this memory
    uint32_t simd_epoch = 0;  // the same of the simdgroup
    int32_t thread = 0;  // index in the threadgroup; -1: several
};

struct Region {
    const char* name = "";
    unsigned char* data = nullptr;
    size_t bytes = 0;
    bool written = false;  // an output or threadgroup memory: its touches are followed
    bool shared = false;  // threadgroup memory
    Touch* writes = nullptr;
    Touch* reads = nullptr;
    uint8_t* defined = nullptr;  // per byte; nullptr: everything is defined
};

enum Wait : int { kReady, kDone, kThreadgroup, kSimd };

struct Fiber {
    ucontext_t context;
    jmp_buf resume;
    bool started = false;
    Wait wait = kReady;
    int kind = 0;  // which collective
    const char* what = "";
    int index = 0, lane = 0, simd = 0;
    uint32_t calls = 0;  // simd collectives so far: the parity chooses the exchange buffer
};

struct Dim3 { uint32_t x, y, z; };

struct Machine {
    Fiber fibers[kMaxThreads];
    unsigned char exchange[2][kMaxThreads][16];
    jmp_buf scheduler;
    Fiber* current = nullptr;
    int threads = 0;
    Dim3 group, threads_per_group, groups, grid;  // position, sizes in threads, in threadgroups, in threads
    uint32_t group_number = 0;
    uint32_t epoch[2] = {0, 0};  // per memory: device, threadgroup
    uint32_t simd_epoch[2][kMaxThreads / kLanes] = {};
    Region inputs[64];
    Region arena[64];  // threadgroup arrays, by declaration
    size_t arena_bytes = 0;
    unsigned char* arena_memory = nullptr;
    char* stacks = nullptr;
    bool check_races = true;
    uint64_t random = 1;
    char error[512] = "";
};

inline Machine machine;

[[noreturn]] inline void fail(const char* format, ...) {
    char text[400];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    Fiber* f = machine.current;
    Dim3 g = machine.group;
    snprintf(machine.error, sizeof machine.error, "%s (thread %d of threadgroup %u,%u,%u)", text, f ? f->index : -1,
             g.x, g.y, g.z);
    _longjmp(machine.scheduler, 2);
}

// --- collectives

inline void yield_for(Wait wait, int kind, const char* what) {
    Fiber* f = machine.current;
    f->wait = wait;
    f->kind = kind;
    f->what = what;
    if (_setjmp(f->resume) == 0) _longjmp(machine.scheduler, 1);
}

// Give 16 bytes at most to the other lanes; returns the buffer of the whole simdgroup.
template <typename T>
inline unsigned char (*exchange(const T& value, int kind, const char* what))[16] {
    static_assert(sizeof(T) <= 16, "one lane gives at most 16 bytes");
    Fiber* f = machine.current;
    unsigned char(*buffer)[16] = machine.exchange[f->calls++ & 1] + f->simd * kLanes;
    memcpy(buffer[f->lane], &value, sizeof(T));
    yield_for(kSimd, kind * 32 + int(sizeof(T)), what);
    return buffer;
}

template <typename T>
inline T lane_of(unsigned char (*buffer)[16], int lane) {
    T value;
    memcpy(&value, buffer[lane], sizeof(T));
    return value;
}

// --- memory

inline void follow(Region& r, size_t at, size_t bytes, bool write) {
    Machine& m = machine;
    if (!write && r.defined)
        for (size_t i = at; i < at + bytes; i++)
            if (!r.defined[i]) fail("uninitialized read of %s at byte %zu", r.name, i);
    if (write && r.defined) memset(r.defined + at, 1, bytes);
    if (!m.check_races || !r.writes) return;
    Fiber* f = m.current;
    const int memory = r.shared ? 1 : 0;
    const Touch now{m.group_number, m.epoch[memory], m.simd_epoch[memory][f->simd], f->index};
    auto clash = [&](const Touch& t) {
        if (t.group == 0 || (t.thread == now.thread && t.group == now.group)) return false;
        if (t.group != now.group) return !r.shared;  // threadgroups of one dispatch have no order
        if (t.epoch != now.epoch) return false;
        return t.thread < 0 || t.thread / kLanes != f->simd || t.simd_epoch == now.simd_epoch;
    };
    for (size_t i = at; i < at + bytes; i++) {
        if (clash(r.writes[i]))
            fail("race on %s at byte %zu: thread %d wrote it, no barrier before this %s", r.name, i,
                 r.writes[i].thread, write ? "write" : "read");
        if (write) {
            if (clash(r.reads[i]))
                fail("race on %s at byte %zu: thread %d read it, no barrier before this write", r.name, i,
                     r.reads[i].thread);
            r.writes[i] = now;
        } else {
            Touch& t = r.reads[i];
            const bool together = t.group == now.group && t.epoch == now.epoch && t.simd_epoch == now.simd_epoch;
            const int thread = together && t.thread != now.thread ? -1 : now.thread;
            t = now;
            t.thread = thread;
        }
    }
}

enum Space { kDevice, kConstant, kShared };

template <Space S, typename T>
struct Pointer;

// One element of checked memory: a read or a write is followed where it happens.
template <Space S, typename T>
struct Reference {
    Region* region;
    unsigned char* at;
    using V = std::remove_const_t<T>;

    V load() const {
        follow(*region, at - region->data, sizeof(T), false);
        V value;
        memcpy(&value, at, sizeof(T));
        return value;
    }
    operator V() const { return load(); }
    template <typename U>
    explicit operator U() const { return U(load()); }
    Reference& operator=(V value) {
        static_assert(!std::is_const_v<T>, "a write through a pointer to const");
        follow(*region, at - region->data, sizeof(T), true);
        memcpy(at, &value, sizeof(T));
        return *this;
    }
    Reference& operator=(const Reference& other) { return *this = other.load(); }
    Reference& operator+=(V v) { return *this = V(load() + v); }
    Reference& operator-=(V v) { return *this = V(load() - v); }
    Reference& operator*=(V v) { return *this = V(load() * v); }
    Reference& operator|=(V v) { return *this = V(load() | v); }
    Reference(Region* r, unsigned char* p) : region(r), at(p) {}
    Reference(const Reference&) = default;
};

// A pointer into an address space. Address spaces are types of their own: one never converts to another.
template <Space S, typename T>
struct Pointer {
    Region* region = nullptr;
    unsigned char* at = nullptr;

    Pointer() = default;
    Pointer(Region* r, unsigned char* p) : region(r), at(p) {}
    operator Pointer<S, const T>() const { return {region, at}; }
    template <typename U>
    explicit Pointer(Pointer<S, U> other) : region(other.region), at(other.at) {
        static_assert(!std::is_const_v<U> || std::is_const_v<T>, "a cast takes const away");
    }
    Reference<S, T> operator[](int64_t i) const {
        unsigned char* p = at + i * int64_t(sizeof(T));
        const int64_t offset = p - region->data;
        if (offset < 0 || offset + int64_t(sizeof(T)) > int64_t(region->bytes))
            fail("out of bounds: byte %lld of %s, which has %zu", (long long)offset, region->name, region->bytes);
        if (offset % int64_t(alignof(T))) fail("misaligned: byte %lld of %s", (long long)offset, region->name);
        return {region, p};
    }
    Reference<S, T> operator*() const { return (*this)[0]; }
    Pointer operator+(int64_t i) const { return {region, at + i * int64_t(sizeof(T))}; }
    Pointer operator-(int64_t i) const { return {region, at - i * int64_t(sizeof(T))}; }
    Pointer& operator+=(int64_t i) { return *this = *this + i; }
    Pointer& operator-=(int64_t i) { return *this = *this - i; }
    Pointer& operator++() { return *this += 1; }
    bool operator==(const Pointer& o) const { return at == o.at; }
    bool operator!=(const Pointer& o) const { return at != o.at; }
};

// The buffer of the kernel with this index, as the pointer type P.
template <typename P>
inline P argument(int index) {
    return P(&machine.inputs[index], machine.inputs[index].data);
}

template <typename T>
inline Pointer<kShared, T> threadgroup_array(int declaration, size_t count, const char* name) {
    Machine& m = machine;
    Region& r = m.arena[declaration];
    if (!r.data) {
        const size_t bytes = (count * sizeof(T) + 15) / 16 * 16;
        if (m.arena_bytes + bytes > kThreadgroupBytes)
            fail("threadgroup memory: %s brings it to %zu bytes, a device has %zu", name, m.arena_bytes + bytes,
                 kThreadgroupBytes);
        const size_t at = m.arena_bytes;
        static Touch* writes = (Touch*)calloc(kThreadgroupBytes, sizeof(Touch));
        static Touch* reads = (Touch*)calloc(kThreadgroupBytes, sizeof(Touch));
        static uint8_t* defined = (uint8_t*)calloc(kThreadgroupBytes, 1);
        memset(defined + at, 0, bytes);
        memset(m.arena_memory + at, 0xFF, bytes);
        memset((void*)(writes + at), 0, bytes * sizeof(Touch));
        memset((void*)(reads + at), 0, bytes * sizeof(Touch));
        r = {name, m.arena_memory + at, count * sizeof(T), true, true, writes + at, reads + at, defined + at};
        m.arena_bytes += bytes;
    }
    return {&r, r.data};
}

// --- the scheduler

void call_kernel();  // written by the driver: the kernel with its arguments

inline void enter() {
    call_kernel();
    machine.current->wait = kDone;
    _longjmp(machine.scheduler, 1);
}

inline uint64_t next_random() {
    uint64_t x = machine.random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return machine.random = x;
}

inline bool resolve() {
    Machine& m = machine;
    bool progress = false;
    int barrier = 0;
    for (int first = 0; first < m.threads; first += kLanes) {
        const int stop = first + kLanes < m.threads ? first + kLanes : m.threads;
        int same = 0;
        for (int i = first; i < stop; i++) {
            same += m.fibers[i].wait == kSimd && m.fibers[i].kind == m.fibers[first].kind;
            barrier += m.fibers[i].wait == kThreadgroup;
        }
        if (same == stop - first) {
            const int bits = m.fibers[first].kind / 32;
            if (bits >= 1000) {  // a simdgroup barrier: the memories it orders are in its kind
                m.simd_epoch[0][first / kLanes] += (bits - 1000) & 1;
                m.simd_epoch[1][first / kLanes] += ((bits - 1000) >> 1) & 1;
            }
            for (int i = first; i < stop; i++) m.fibers[i].wait = kReady;
            progress = true;
        }
    }
    if (!progress && barrier == m.threads) {
        const int flags = m.fibers[0].kind;
        for (int i = 0; i < m.threads; i++) {
            if (m.fibers[i].kind != flags) return false;
            m.fibers[i].wait = kReady;
        }
        m.epoch[0] += flags & 1;
        m.epoch[1] += (flags >> 1) & 1;
        progress = true;
    }
    return progress;
}

inline void deadlock() {
    Machine& m = machine;
    const Fiber *one = nullptr, *other = nullptr;
    for (int i = 0; i < m.threads; i++) {
        const Fiber* f = &m.fibers[i];
        if (f->wait == kDone && one) continue;
        if (!one && f->wait != kDone) one = f;
    }
    for (int i = 0; one && i < m.threads; i++) {
        const Fiber* f = &m.fibers[i];
        if (f->wait != one->wait || f->kind != one->kind) { other = f; break; }
    }
    snprintf(m.error, sizeof m.error,
             "deadlock: thread %d waits at %s, thread %d %s%s (threadgroup %u,%u,%u): a collective in divergent code",
             one ? one->index : -1, one ? one->what : "?", other ? other->index : -1,
             other && other->wait == kDone ? "has ended" : "waits at ", other && other->wait != kDone ? other->what : "",
             m.group.x, m.group.y, m.group.z);
}

// Runs one threadgroup; schedule 0: forward, 1: reverse, 2: random at every turn. False: machine.error says why.
inline bool run_group(int schedule) {
    Machine& m = machine;
    m.group_number++;
    m.epoch[0] = m.epoch[1] = 0;
    memset(m.simd_epoch, 0, sizeof m.simd_epoch);
    for (Region& r : m.arena) r.data = nullptr;
    m.arena_bytes = 0;
    static int order[kMaxThreads];
    for (int i = 0; i < m.threads; i++) {
        Fiber& f = m.fibers[i];
        f.index = i;
        f.lane = i % kLanes;
        f.simd = i / kLanes;
        f.calls = 0;
        f.wait = kReady;
        f.started = false;
        order[i] = schedule == 1 ? m.threads - 1 - i : i;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = m.stacks + i * kStackBytes;
        f.context.uc_stack.ss_size = kStackBytes;
        f.context.uc_link = nullptr;
        makecontext(&f.context, enter, 0);
    }
    for (;;) {
        if (schedule == 2)
            for (int i = m.threads - 1; i > 0; i--) {
                const int j = int(next_random() % uint64_t(i + 1)), k = order[i];
                order[i] = order[j];
                order[j] = k;
            }
        for (volatile int i = 0; i < m.threads; i = i + 1) {
            Fiber* f = &m.fibers[order[i]];
            if (f->wait != kReady) continue;
            m.current = f;
            const int back = _setjmp(m.scheduler);
            if (back == 2) {
                m.current = nullptr;
                return false;
            }
            if (back == 0) {
                if (f->started) _longjmp(f->resume, 1);
                f->started = true;
                setcontext(&f->context);
            }
        }
        m.current = nullptr;
        int done = 0;
        for (int i = 0; i < m.threads; i++) done += m.fibers[i].wait == kDone;
        if (done == m.threads) return true;
        if (!resolve()) {
            deadlock();
            return false;
        }
    }
}

struct Buffer {
    const char* name;
    void* data;
    uint64_t bytes;
    int32_t written;
    uint8_t* defined;  // per byte whether it may be read; nullptr: all may
};

inline int run(const Buffer* buffers, int count, Dim3 grid, Dim3 threads, int schedule, uint64_t seed, int races,
               char* error, int error_bytes) {
    Machine& m = machine;
    m.error[0] = 0;
    m.current = nullptr;
    m.random = seed * 2654435769u + 1;
    m.check_races = races != 0;
    m.group_number = 0;
    if (!m.arena_memory)
        m.arena_memory = (unsigned char*)aligned_alloc(64, kThreadgroupBytes);
    for (int i = 0; i < count; i++) {
        Region r;
        r.name = buffers[i].name;
        r.data = (unsigned char*)buffers[i].data;
        r.bytes = buffers[i].bytes;
        r.written = buffers[i].written != 0;
        r.defined = buffers[i].defined;
        if (r.written && races) {
            r.writes = (Touch*)calloc(r.bytes + 1, sizeof(Touch));
            r.reads = (Touch*)calloc(r.bytes + 1, sizeof(Touch));
        }
        m.inputs[i] = r;
    }
    m.grid = grid;
    m.threads_per_group = threads;
    m.threads = int(threads.x * threads.y * threads.z);
    m.groups = {(grid.x + threads.x - 1) / threads.x, (grid.y + threads.y - 1) / threads.y,
                (grid.z + threads.z - 1) / threads.z};
    const uint64_t total = uint64_t(m.groups.x) * m.groups.y * m.groups.z;
    const size_t stack_bytes = size_t(m.threads) * kStackBytes;
    m.stacks = (char*)mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m.stacks == MAP_FAILED) {
        snprintf(error, size_t(error_bytes), "no memory for %d stacks", m.threads);
        return 1;
    }
    bool good = true;
    for (uint64_t n = 0; good && n < total; n++) {
        const uint64_t at = schedule == 1 ? total - 1 - n : n;
        m.group = {uint32_t(at % m.groups.x), uint32_t(at / m.groups.x % m.groups.y),
                   uint32_t(at / m.groups.x / m.groups.y)};
        good = run_group(schedule);
    }
    munmap(m.stacks, stack_bytes);
    for (int i = 0; i < count; i++) {
        free(m.inputs[i].writes);
        free(m.inputs[i].reads);
    }
    snprintf(error, size_t(error_bytes), "%s", m.error);
    return good ? 0 : 1;
}

}  // namespace mh

// Compiled with -fsanitize=bounds,shift: these are its handlers, so that no library is needed.
extern "C" {
inline void __attribute__((used)) mh_thread_array_bounds() { mh::fail("out of bounds: an index of a thread's own array"); }
__attribute__((used, visibility("hidden"))) void __ubsan_handle_out_of_bounds(void*, void*) { mh_thread_array_bounds(); }
__attribute__((used, visibility("hidden"))) void __ubsan_handle_out_of_bounds_abort(void*, void*) { mh_thread_array_bounds(); }
__attribute__((used, visibility("hidden"))) void __ubsan_handle_shift_out_of_bounds(void*, void*, void*) {
    mh::fail("a shift by 32 or more, or by a negative number");
}
__attribute__((used, visibility("hidden"))) void __ubsan_handle_shift_out_of_bounds_abort(void*, void*, void*) {
    mh::fail("a shift by 32 or more, or by a negative number");
}
}
