// Device functions that the AdamW kernels share: the factors of a step, random bits, moments, masters and residuals.
#pragma once
#include "device.cuh"

struct alignas(16) Record {  // the factors of one run in this step, in the order of RECORD in engine/ops/adam.py
    float skip, grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root,
        eps;
    unsigned seed;
    float l2;
};

// `random_bits` returns 32 pseudo-random bits that depend only on the element and the step. It calls `mix`, the
// finalizer of MurmurHash3 (Appleby), twice.
__device__ __forceinline__ unsigned mix(unsigned h) {
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u;
    return h ^ h >> 16;
}
__device__ __forceinline__ unsigned random_bits(long long element, unsigned seed) {
    return mix(mix((unsigned)element ^ seed * 0x9e3779b9u) + (unsigned)(element >> 32));
}

// Update the moments m and v of one element. g: its gradient, before the division by grad_scale. p: its master, for L2
// regularization.
__device__ __forceinline__ void average(const Record& r, float g, float p, float& m, float& v) {
    if (COUPLED) g = fmaf(r.l2, p, g);  // r.l2 contains a factor 1 / r.grad_scale, which the next line cancels
    g *= r.grad_scale;
    m = fmaf(r.one_minus_beta1, g - m, m);
    v = fmaf(r.beta2, v, r.one_minus_beta2 * g * g);
}

// `join` restores a master from its weight, its 16-bit residual and v; `split` does the reverse. There are 65537
// possible residuals, -32768 to 32768. A residual of 32768 (of a master halfway between two weights that was rounded
// down) does not fit in 16 bits. It is stored as -32768, with the sign bit of v set. If the restored master does not
// round to the weight, the weight was changed after `split`, and becomes the new master.
__device__ __forceinline__ float join(bf16 weight, short residual, float& v) {
    unsigned bits = __float_as_uint(v), tie = bits >> 31;
    v = __uint_as_float(bits & 0x7fffffffu);
    float p = __uint_as_float(((unsigned)weight.bits << 16) + (unsigned)(int)residual + (tie << 16));
    bf16 rounded;
    from_float(p, rounded);
    return rounded.bits == weight.bits ? p : to_float(weight);
}
__device__ __forceinline__ void split(float p, bf16& weight, short& residual, float& v) {
    from_float(p, weight);
    unsigned distance = p == p ? __float_as_uint(p) - ((unsigned)weight.bits << 16) : 0u;
    residual = (short)distance;
    v = __uint_as_float((__float_as_uint(v) & 0x7fffffffu) | (distance == 0x8000u) << 31);
}
__device__ __forceinline__ bf16 as_bf16(unsigned bits) { return bf16{(unsigned short)bits}; }

// Load or store four masters and their weights: elements 4i .. 4i+3 of arrays that are aligned to four elements.
// load_master and store_master do the same for a single element.
template <typename W>
__device__ __forceinline__ void load_master4(const float* p, const W*, long long i, float* y, float*) {
    load4(p, i, y);
}
__device__ __forceinline__ void load_master4(const short* p, const bf16* weight, long long i, float* y,
                                             float* v) {
    uint2 r = load_once((const uint2*)p + i), w = load_once((const uint2*)weight + i);
    y[0] = join(as_bf16(w.x), (short)r.x, v[0]), y[1] = join(as_bf16(w.x >> 16), (short)(r.x >> 16), v[1]);
    y[2] = join(as_bf16(w.y), (short)r.y, v[2]), y[3] = join(as_bf16(w.y >> 16), (short)(r.y >> 16), v[3]);
}
template <typename W>
__device__ __forceinline__ void store_master4(float* p, W* weight, long long i, const float* x, float*) {
    store4(p, i, x);
    store4(weight, i, x);
}
template <>
__device__ __forceinline__ void store_master4(float* p, none*, long long i, const float* x, float*) {
    store4(p, i, x);
}
__device__ __forceinline__ void store_master4(short* p, bf16* weight, long long i, const float* x, float* v) {
    bf16 w[4];
    short r[4];
#pragma unroll
    for (int k = 0; k < 4; k++) split(x[k], w[k], r[k], v[k]);
    store_once((uint2*)p + i, make_uint2((unsigned short)r[0] | (unsigned)(unsigned short)r[1] << 16,
                                         (unsigned short)r[2] | (unsigned)(unsigned short)r[3] << 16));
    store_once((uint2*)weight + i,
               make_uint2(w[0].bits | (unsigned)w[1].bits << 16, w[2].bits | (unsigned)w[3].bits << 16));
}
template <typename W> __device__ __forceinline__ float load_master(const float* p, const W*, float&) {
    return *p;
}
__device__ __forceinline__ float load_master(const short* p, const bf16* weight, float& v) {
    return join(*weight, *p, v);
}
template <typename W> __device__ __forceinline__ void store_master(float* p, W* weight, float x, float&) {
    *p = x;
    from_float(x, *weight);
}
template <> __device__ __forceinline__ void store_master(float* p, none*, float x, float&) { *p = x; }
__device__ __forceinline__ void store_master(short* p, bf16* weight, float x, float& v) {
    split(x, *weight, *p, v);
}
