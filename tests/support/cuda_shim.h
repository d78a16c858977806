// Stands in for kernels/device.cuh so that a C++ compiler for the CPU takes the kernels' sources as they are.
//
// Every CUDA thread is a fiber; the threads of a cluster run in turns, each until it waits for others. It
// shows: the arithmetic, the indices, who writes what, wide accesses to addresses that are not aligned and
// barriers not reached by all (the launch returns an error), reads of asynchronous copies that were not
// waited for, reads of shared memory never written (it is poisoned with NaN). It cannot show: races between
// real warps, memory ordering, inline PTX, registers, launch limits, speed.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __CUDA_ARCH__ 900

struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;
using std::max;
using std::min;

inline float __uint_as_float(unsigned u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
inline unsigned __float_as_uint(float f) {
    unsigned u;
    std::memcpy(&u, &f, 4);
    return u;
}
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned result = 0;
    for (int k = 0; k < 4; k++) {
        unsigned byte = selector >> 4 * k & 7;
        result |= ((byte < 4 ? a >> 8 * byte : b >> 8 * (byte - 4)) & 255u) << 8 * k;
    }
    return result;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) { return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16; }
inline float __fmul_rn(float a, float b) { return a * b; }  // this compiler fuses nothing: no -mfma
inline float __fadd_rn(float a, float b) { return a + b; }
inline int atomicMax(int* p, int x) {  // a fiber gives way only where it waits
    int before = *p;
    *p = max(before, x);
    return before;
}

// ---- fibers ----------------------------------------------------------------------------------------------

struct Barrier {
    unsigned waiting = 0, passed = 0;
};
struct Copy {
    uint4* to;
    const uint4* from;
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 << 10);
    unsigned thread, block, arrived_at = 0;
    bool done = false;
    std::vector<std::vector<Copy>> groups = {{}};
};
struct Block {
    std::vector<uint4> shared;
    Barrier threads;
    std::vector<Barrier> warps;
    std::vector<double> lanes;
    unsigned alive;
};
struct Cluster {
    ucontext_t scheduler;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Block> blocks;
    Barrier barrier;
    unsigned first_block;
    bool progress;
    const std::function<void()>* body;
};
static Cluster* cluster;
static Fiber* fiber;
static bool misaligned;

template <typename T> T* aligned(T* p, size_t bytes) {
    misaligned |= (uintptr_t)p % bytes != 0;
    return p;
}
inline void yield() { swapcontext(&fiber->context, &cluster->scheduler); }
inline Block& block() { return cluster->blocks[fiber->block]; }
inline void arrive(Barrier& b, unsigned expected) {
    cluster->progress = true;
    if (++b.waiting == expected) b.waiting = 0, b.passed++;
}
inline void wait(Barrier& b, unsigned seen) {
    while (b.passed == seen) yield();
}

inline void __syncthreads() {
    unsigned seen = block().threads.passed;
    arrive(block().threads, block().alive);
    wait(block().threads, seen);
}
template <typename T> T __shfl_xor_sync(unsigned, T value, int offset) {
    unsigned warp = fiber->thread / 32;
    double* lanes = block().lanes.data() + warp * 32;
    T result;
    for (int phase = 0; phase < 2; phase++) {
        if (phase == 0)
            std::memcpy(lanes + fiber->thread % 32, &value, sizeof(T));
        else
            std::memcpy(&result, lanes + (fiber->thread % 32 ^ offset), sizeof(T));
        unsigned seen = block().warps[warp].passed;
        arrive(block().warps[warp], 32);
        wait(block().warps[warp], seen);
    }
    return result;
}

static void run_fiber() {
    (*cluster->body)();
    fiber->done = cluster->progress = true;
    block().alive--;
    if (block().threads.waiting && block().threads.waiting == block().alive)
        block().threads.waiting = 0, block().threads.passed++;
    yield();
}

// 0; 1 when threads wait for each other for ever; 2 after an access that is not aligned.
inline int launch(unsigned grid, unsigned threads, unsigned cluster_size, unsigned shared,
                  const std::function<void()>& body) {
    gridDim.x = grid, blockDim.x = threads, misaligned = false;
    for (unsigned first = 0; first < grid; first += cluster_size) {
        Cluster c;
        cluster = &c, c.first_block = first, c.body = &body;
        c.blocks.resize(cluster_size);
        for (unsigned b = 0; b < cluster_size; b++) {
            c.blocks[b].shared.assign(shared / 16 + 1, {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu});
            c.blocks[b].warps.resize(threads / 32), c.blocks[b].lanes.resize(threads),
                c.blocks[b].alive = threads;
            for (unsigned t = 0; t < threads; t++) {
                c.fibers.push_back(std::make_unique<Fiber>());
                Fiber& f = *c.fibers.back();
                f.thread = t, f.block = b;
                getcontext(&f.context);
                f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
                makecontext(&f.context, run_fiber, 0);
            }
        }
        for (bool running = true; running;) {
            running = c.progress = false;
            for (auto& f : c.fibers) {
                if (f->done) continue;
                running = true, fiber = f.get(), threadIdx.x = f->thread, blockIdx.x = first + f->block;
                swapcontext(&c.scheduler, &f->context);
            }
            if (running && !c.progress) return 1;
        }
    }
    return misaligned ? 2 : 0;
}

// ---- what device.cuh offers ------------------------------------------------------------------------------

struct fp16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};
struct e4m3 {
    unsigned char bits;
};
struct none {};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
inline float to_float(fp16 x) {
    _Float16 h;
    std::memcpy(&h, &x, 2);
    return (float)h;
}
inline void from_float(float x, float& y) { y = x; }
inline void from_float(float x, fp16& y) {
    _Float16 h = (_Float16)x;
    std::memcpy(&y, &h, 2);
}
inline void from_float(float x, bf16& y) {
    unsigned u = __float_as_uint(x);
    y.bits = std::isnan(x) ? 0x7fff : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

template <typename T> struct Wide {
    static constexpr int count = 16 / sizeof(T);
    static void unpack(uint4 v, float* y) {
        T x[count];
        std::memcpy(x, &v, 16);
        for (int i = 0; i < count; i++) y[i] = to_float(x[i]);
    }
    static uint4 pack(const float* x) {
        T y[count];
        uint4 v;
        for (int i = 0; i < count; i++) from_float(x[i], y[i]);
        std::memcpy(&v, y, 16);
        return v;
    }
};
inline uint4 load_once(const uint4* p) { return *aligned(p, 16); }
inline void store_once(uint4* p, uint4 v) { *aligned(p, 16) = v; }
inline uint2 load_once(const uint2* p) { return *aligned(p, 8); }
inline void store_once(uint2* p, uint2 v) { *aligned(p, 8) = v; }
inline unsigned load_once(const unsigned* p) { return *aligned(p, 4); }
inline void store_once(unsigned* p, unsigned v) { *aligned(p, 4) = v; }
inline uint4 load_now(const uint4* p, bool) { return *aligned(p, 16); }
inline uint2 load_now(const uint2* p) { return *aligned(p, 8); }
inline unsigned load_now(const unsigned char* p) { return *p; }
template <typename V> V load_cached(const V* p) { return *aligned(p, sizeof(V)); }
template <typename V> void store_cached(V* p, V v) { *aligned(p, sizeof(V)) = v; }
template <typename T> void load4(const T* p, long long i, float* y) {
    for (int k = 0; k < 4; k++) y[k] = to_float(aligned(p, 4 * sizeof(T))[4 * i + k]);
}
template <typename T> void store4(T* p, long long i, const float* x) {
    for (int k = 0; k < 4; k++) from_float(x[k], aligned(p, 4 * sizeof(T))[4 * i + k]);
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline float sqrt_approx(float x) { return x < 0x1p-126f ? 0.0f : std::sqrt(x); }
inline float reciprocal_approx(float x) { return 1 / x; }

inline uint4* shared_memory() { return block().shared.data(); }
inline void copy_async(uint4* shared, const uint4* global) {
    fiber->groups.back().push_back({aligned(shared, 16), aligned(global, 16)});
}
inline void commit_copies() { fiber->groups.push_back({}); }
template <int PENDING> void wait_copies() {
    auto& groups = fiber->groups;
    while (groups.size() > PENDING + 1) {
        for (Copy copy : groups.front()) *copy.to = *copy.from;
        groups.erase(groups.begin());
    }
}
inline void cluster_arrive() {
    fiber->arrived_at = cluster->barrier.passed;
    arrive(cluster->barrier, cluster->fibers.size());
}
inline void cluster_wait() { wait(cluster->barrier, fiber->arrived_at); }
inline void store_remote(float* local, int rank, float value) {
    auto offset = (char*)local - (char*)block().shared.data();
    *(float*)((char*)cluster->blocks[rank].shared.data() + offset) = value;
}
