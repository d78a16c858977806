// AdamW over a flat range. All numbers that change from step to step are read from device memory.
//
//     g = grad * grad_scale + l2 master          unscale and clip; coupled decay
//     w = master * (1 - lr wd)                   decoupled decay
//     m = b1 m + (1 - b1) g
//     v = b2 v + (1 - b2) g g
//     master = w - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//     weight = master rounded to 16 bits
//
// (Loshchilov and Hutter 2019, algorithm 2; eps outside the root.)
//
// Macros:
//   GRAD: float, fp16 or bf16.
//   EXP_AVG: float or bf16.
//   WEIGHT: fp16 or bf16; none if the master is the parameter itself.
//   COUPLED: 1 to add the weight decay to the gradient (L2), 0 to decay the weight.
//   MASTER: float; or short, with a bf16 weight, for the residual of engine/ops/residual.py: the number of float32
//     values from the weight up to the master.
//
// Bytes per element, with a 16-bit gradient and weight: 14 read and 14 written with a float master; 14 read (the
// weight too) and 12 written with a residual. A bf16 exp_avg takes 2 less each way.
#include "device.cuh"

struct Record {  // the numbers of one run for this step, in the order of RECORD in engine/ops/adam.py
    float skip, grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root,
        eps;
    unsigned seed;
    float l2;
};

// Write the Record of each run, one thread per run. hyper: for each run [lr, beta1, beta2, eps, weight_decay,
// hold_steps, l2]. Gradients will be divided by grad_scale[0]. If found_inf[0] != 0, the step is skipped and not
// counted. The first hold_steps steps have learning rate 0: they update the moments but not the master.
extern "C" __global__ void adam_prepare(const float* grad_scale, const float* found_inf, const double* hyper,
                                        int runs, float* steps, float* records) {
    int run = blockIdx.x * blockDim.x + threadIdx.x;
    if (run >= runs) return;
    bool skip = found_inf[0] != 0.0f;
    const double* h = hyper + 7 * run;
    float step = steps[run] + (skip ? 0.0f : 1.0f);
    steps[run] = step;
    double lr = step > h[5] ? h[0] : 0.0;
    Record r;
    r.skip = skip;
    r.grad_scale = (float)(1.0 / grad_scale[0]);
    r.decay = (float)(1.0 - lr * h[4]);
    r.beta1 = (float)h[1], r.one_minus_beta1 = (float)(1.0 - h[1]);
    r.beta2 = (float)h[2], r.one_minus_beta2 = (float)(1.0 - h[2]);
    r.step_size = (float)(lr / (1.0 - pow(h[1], (double)step)));
    r.inverse_root = (float)(1.0 / sqrt(1.0 - pow(h[2], (double)step)));
    r.eps = (float)h[3];
    r.seed = (unsigned)step;
    r.l2 = (float)(h[6] * grad_scale[0]);
    ((Record*)records)[run] = r;
}

// 32 pseudo-random bits that depend only on the element and the step: the finalizer of MurmurHash3 (Appleby), twice.
__device__ __forceinline__ unsigned mix(unsigned h) {
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u;
    return h ^ h >> 16;
}
__device__ __forceinline__ unsigned random_bits(long long element, unsigned seed) {
    return mix(mix((unsigned)element ^ seed * 0x9e3779b9u) + (unsigned)(element >> 32));
}

// Round to bf16 stochastically: up with a probability equal to the fraction that is cut off. inf and NaN stay.
__device__ __forceinline__ void round_stochastic(float x, unsigned random, bf16& y) {
    unsigned u = __float_as_uint(x);
    if ((u & 0x7f800000u) != 0x7f800000u)
        u += random >> 16;
    else if (u & 0x007fffffu)
        u |= 0x00400000u;
    y.bits = u >> 16;
}

__device__ __forceinline__ void update(const Record& r, float g, float& p, float& m, float& v) {
    if (COUPLED) g = fmaf(r.l2, p, g);  // before the scaling: r.l2 is premultiplied by 1 / r.grad_scale
    g *= r.grad_scale;
    m = fmaf(r.one_minus_beta1, g - m, m);
    v = fmaf(r.beta2, v, r.one_minus_beta2 * g * g);
    p = p * r.decay - r.step_size * m / fmaf(sqrtf(v), r.inverse_root, r.eps);
}

__device__ __forceinline__ void store_exp_avg4(float* p, long long i, const float* m, long long, unsigned) {
    store4(p, i, m);
}
__device__ __forceinline__ void store_exp_avg4(bf16* p, long long i, const float* m, long long element,
                                               unsigned seed) {
    bf16 y[4];
#pragma unroll
    for (int k = 0; k < 4; k++) round_stochastic(m[k], random_bits(element + k, seed), y[k]);
    store_once((uint2*)p + i,
               make_uint2(y[0].bits | (unsigned)y[1].bits << 16, y[2].bits | (unsigned)y[3].bits << 16));
}
__device__ __forceinline__ void store_exp_avg(float* p, float m, long long, unsigned) { *p = m; }
__device__ __forceinline__ void store_exp_avg(bf16* p, float m, long long element, unsigned seed) {
    round_stochastic(m, random_bits(element, seed), *p);
}

// Restore a master from a weight, its 16-bit residual and v; and the reverse. There are 65537 possible residuals,
// -32768 to 32768: the last one (a tie that was rounded down) is stored as the first, with the sign bit of v set.
// If the master does not round to the weight, the weight was written by someone else since: it is the new master.
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

// Load or store four masters and their weights, elements 4i .. 4i+3 of arrays that are aligned to four elements.
// load_master and store_master do it for a single element.
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

// Update n elements. Elements head .. head + 4 * quads, which are aligned to four elements in every array, are updated
// four per thread; the elements before and after them one at a time, by all threads of the grid. index_base: the number
// of element 0 in the whole model, for the random bits.
extern "C" __global__ __launch_bounds__(256) void adam_update(
    const GRAD* __restrict__ grad, MASTER* __restrict__ master, EXP_AVG* __restrict__ exp_avg,
    float* __restrict__ exp_avg_sq, WEIGHT* __restrict__ weight, long long n, long long head, long long quads,
    long long index_base, const float* __restrict__ record) {
    const Record r = *(const Record*)record;
    if (r.skip != 0.0f) return;
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (thread < quads) {
        float g[4], p[4], m[4], v[4];
        load4(grad + head, thread, g);
        load4(exp_avg + head, thread, m);
        load4(exp_avg_sq + head, thread, v);
        load_master4(master + head, weight + head, thread, p, v);
#pragma unroll
        for (int k = 0; k < 4; k++) update(r, g[k], p[k], m[k], v[k]);
        store_master4(master + head, weight + head, thread, p, v);
        store_exp_avg4(exp_avg + head, thread, m, index_base + head + 4 * thread, r.seed);
        store4(exp_avg_sq + head, thread, v);
    }
    long long threads = (long long)gridDim.x * blockDim.x, body = 4 * quads;
    for (long long i = thread; i < n - body; i += threads) {
        long long at = i < head ? i : i + body;
        float m = to_float(exp_avg[at]), v = exp_avg_sq[at], p = load_master(master + at, weight + at, v);
        update(r, to_float(grad[at]), p, m, v);
        store_master(master + at, weight + at, p, v);
        store_exp_avg(exp_avg + at, m, index_base + at, r.seed);
        exp_avg_sq[at] = v;
    }
}
