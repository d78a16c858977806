// Device functions shared by all kernels, without CUDA headers: 16-bit formats, 16-byte accesses, approximate 2^x, root
// and reciprocal, asynchronous copies into shared memory, thread-block clusters. Functions that need a newer
// architecture have a fallback for older ones, or are called only on newer ones.
#pragma once

struct fp16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};
struct e4m3 {
    unsigned char bits;
};
struct none {
};  // type of an array parameter that this variant of a kernel does not use; the launcher passes None for it

// ---- 16-bit formats --------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float to_float(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Round to nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ void from_float(float x, float& y) { y = x; }
__device__ __forceinline__ void from_float(float x, fp16& y) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
}
__device__ __forceinline__ void from_float(float x, bf16& y) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    unsigned u = __float_as_uint(x);
    y.bits = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
#endif
}

template <typename T> __device__ __forceinline__ unsigned pack2(float low, float high) {
    T a, b;
    from_float(low, a);
    from_float(high, b);
    return (unsigned)a.bits | (unsigned)b.bits << 16;
}
#if __CUDA_ARCH__ >= 800
template <> __device__ __forceinline__ unsigned pack2<bf16>(float low, float high) {
    unsigned y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
template <> __device__ __forceinline__ unsigned pack2<fp16>(float low, float high) {
    unsigned y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#endif

__device__ __forceinline__ void unpack2(unsigned pair, float* y, bf16) {
    y[0] = __uint_as_float(pair << 16);
    y[1] = __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ void unpack2(unsigned pair, float* y, fp16) {
    y[0] = to_float(fp16{(unsigned short)pair});
    y[1] = to_float(fp16{(unsigned short)(pair >> 16)});
}

// ---- 16 bytes, and 4 elements, at a time -----------------------------------------------------------------

template <typename T> struct Wide {  // the conversion between 16 bytes of a 16-bit type and floats
    static constexpr int count = 8;
    static __device__ __forceinline__ void unpack(uint4 v, float* y) {
        unpack2(v.x, y, T()), unpack2(v.y, y + 2, T()), unpack2(v.z, y + 4, T()), unpack2(v.w, y + 6, T());
    }
    static __device__ __forceinline__ uint4 pack(const float* x) {
        return make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]),
                          pack2<T>(x[6], x[7]));
    }
};
template <> struct Wide<float> {
    static constexpr int count = 4;
    static __device__ __forceinline__ void unpack(uint4 v, float* y) {
        y[0] = __uint_as_float(v.x), y[1] = __uint_as_float(v.y);
        y[2] = __uint_as_float(v.z), y[3] = __uint_as_float(v.w);
    }
    static __device__ __forceinline__ uint4 pack(const float* x) {
        return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                          __float_as_uint(x[3]));
    }
};

// Access memory with the cache hint `.cs` (evict first), for data that is used once per step.
__device__ __forceinline__ uint4 load_once(const uint4* p) { return __ldcs(p); }
__device__ __forceinline__ uint2 load_once(const uint2* p) { return __ldcs(p); }
__device__ __forceinline__ unsigned load_once(const unsigned* p) { return __ldcs(p); }
__device__ __forceinline__ void store_once(uint4* p, uint4 v) { __stcs(p, v); }
__device__ __forceinline__ void store_once(uint2* p, uint2 v) { __stcs(p, v); }
__device__ __forceinline__ void store_once(unsigned* p, unsigned v) { __stcs(p, v); }
// Load without letting the compiler move the load to where its value is used, as it does with other loads. So a thread
// starts all such loads before it waits for the first. once: whether to use the cache hint of load_once. Pass false if
// a thread loads the same 32 bytes with two loads: the hint of the first would mark these bytes for eviction.
__device__ __forceinline__ uint4 load_now(const uint4* p, bool once) {
    const auto from = __cvta_generic_to_global(p);
    uint4 v;
    if (once)
        asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from));
    else
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from));
    return v;
}
__device__ __forceinline__ uint2 load_now(const uint2* p) {
    uint2 v;
    asm volatile("ld.global.cs.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(__cvta_generic_to_global(p)));
    return v;
}
__device__ __forceinline__ unsigned load_now(const unsigned char* p) {
    unsigned v;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(p)));
    return v;
}
// Access memory without a cache hint, for data that is used again soon.
template <typename V> __device__ __forceinline__ V load_cached(const V* p) { return *p; }
template <typename V> __device__ __forceinline__ void store_cached(V* p, V v) { *p = v; }

// Load or store elements 4i .. 4i+3 of an array whose start is aligned to four elements.
__device__ __forceinline__ void load4(const float* p, long long i, float* y) {
    Wide<float>::unpack(load_once((const uint4*)p + i), y);
}
template <typename T> __device__ __forceinline__ void load4(const T* p, long long i, float* y) {
    uint2 v = load_once((const uint2*)p + i);
    unpack2(v.x, y, T()), unpack2(v.y, y + 2, T());
}
__device__ __forceinline__ void store4(float* p, long long i, const float* x) {
    store_once((uint4*)p + i, Wide<float>::pack(x));
}
template <typename T> __device__ __forceinline__ void store4(T* p, long long i, const float* x) {
    store_once((uint2*)p + i, make_uint2(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3])));
}

// ---- arithmetic ------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approx(float x) {  // 2^x with an error of 2 ulp; 2^-inf = 0, NaN stays NaN
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float sqrt_approx(float x) {  // relative error 2^-23; 0 for x below 2^-126
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {  // error 1 ulp; inf for x below 2^-126, 0 above 2^126
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- shared memory, asynchronous copies, clusters --------------------------------------------------------

__device__ __forceinline__ uint4* shared_memory() {
    extern __shared__ uint4 dynamic_shared[];
    return dynamic_shared;
}

// copy_async copies 16 bytes per thread, and commit_copies closes a group of a thread's copies. wait_copies<N> waits
// until at most N of the thread's last groups are pending. The thread may then read what its earlier groups copied.
__device__ __forceinline__ void copy_async(uint4* shared, const uint4* global) {
#if __CUDA_ARCH__ >= 800
    unsigned address = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
    *shared = load_once(global);
#endif
}
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING> __device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// A barrier of the blocks of a cluster, in two parts. The writes of a block before `cluster_arrive` are visible to the
// other blocks after their `cluster_wait`. Between the two calls a block may do other work.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
// Store `value` in the shared memory of block `rank` of this cluster, at the place that `local` is in this block's own
// shared memory.
__device__ __forceinline__ void store_remote(float* local, int rank, float value) {
#if __CUDA_ARCH__ >= 900
    unsigned address = (unsigned)__cvta_generic_to_shared(local), remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
#endif
}
