// AdamW over a flat range. All numbers that change from step to step are read from device memory.
//
//     g = grad / grad_scale + l2 master          unscale and clip; L2 regularization
//     w = master * (1 - lr wd)                   decoupled weight decay
//     m = b1 m + (1 - b1) g
//     v = b2 v + (1 - b2) g g
//     master = w - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//     weight = master rounded to 16 bits
//
// (Loshchilov and Hutter 2019, algorithm 2; eps is added outside the square root.)
//
// Macros:
//   GRAD: float, fp16 or bf16.
//   EXP_AVG: float or bf16.
//   WEIGHT: fp16 or bf16; none if the master is the parameter itself.
//   COUPLED: true to add l2 times the master to the gradient; false to omit this term.
//   MASTER: float; or short, with a bf16 weight, if the master is stored as a residual: the number of float32 values
//     from the weight to the master (see engine/ops/residual.py).
//
// Memory traffic per element, with a 16-bit gradient and weight: with a float master, 14 bytes are read and 14 written;
// with a residual, 14 are read (including the weight) and 12 written. With a bf16 exp_avg, 2 less are read and written.
#include "adam.cuh"

// Write a Record (the numbers of this step) for each run (a range of elements with the same hyper-parameters), one
// thread per run. hyper: for each run [lr, beta1, beta2, eps, weight_decay, hold_steps, l2]. Gradients will be divided
// by grad_scale[0]. If found_inf[0] != 0, the step is skipped and not counted. In the first hold_steps steps the
// learning rate is 0: they update the moments but not the master.
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

// Round x stochastically: to one of the two adjacent bf16 numbers, at random, so that the expected result is x. inf
// stays inf, and NaN stays NaN.
__device__ __forceinline__ void round_stochastic(float x, unsigned random, bf16& y) {
    unsigned u = __float_as_uint(x);
    if ((u & 0x7f800000u) != 0x7f800000u)
        u += random >> 16;
    else if (u & 0x007fffffu)
        u |= 0x00400000u;
    y.bits = u >> 16;
}

__device__ __forceinline__ void update(const Record& r, float g, float& p, float& m, float& v) {
    average(r, g, p, m, v);
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

// Make one step on n elements. Elements head .. head + 4 * quads, which are aligned to four elements in every array,
// are updated four per thread; the elements before and after them are distributed over all threads of the grid.
// index_base: the position of element 0 among all elements of the optimizer, for the random bits.
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
