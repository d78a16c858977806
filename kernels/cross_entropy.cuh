// Cross-entropy of a row of logits: the formula, and how a row is divided into 16-byte vectors.
//
//     z = cap * tanh(x / cap), or x                      lse = log sum_j exp(z_j)
//     loss = (1 - s) w_t (lse - z_t) + s / V * sum_j w_j (lse - z_j) + z_loss * lse^2
//     dloss/dz_j = p_j A - (1 - s) w_t [j = t] - s / V * w_j,   A = (1 - s) w_t + s W / V + 2 z_loss lse
//
// where x are the logits, t is the target, V the number of classes, p = exp(z - lse), s the label smoothing, w the
// class weights and W their sum. The target's term is subtracted in float32, before the gradient is rounded.
//
// A row may start at any address. It is covered by aligned 16-byte vectors; the first and the last may contain elements
// of the neighbouring rows, so these two are written element by element.
//
// Macros: ELEMENT: float, fp16 or bf16. GENERAL: 1 with label smoothing, class weights or a cap, else 0. WEIGHT: float;
// none without class weights.
#pragma once
#include "device.cuh"

constexpr int COUNT = Wide<ELEMENT>::count;
constexpr int GROUP = 4;  // vectors that a thread loads at a time
constexpr float LOG2E = 1.44269504088896341f;

__device__ __forceinline__ float class_weight_of(const float* weight, int j) { return weight[j]; }
__device__ __forceinline__ float class_weight_of(const none*, int) { return 1.0f; }
__device__ __forceinline__ float class_weight_sum(const float* sum, int) { return *sum; }
__device__ __forceinline__ float class_weight_sum(const none*, int classes) { return classes; }

struct Formula {  // the options of the loss, and terms of the formula above
    float smoothing, z_loss, cap;
    int classes;
    const WEIGHT* weight;
    const WEIGHT* weight_sum;

    __device__ __forceinline__ float tanh_over(float x) const {  // tanh(x / cap)
        return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(x * (2.0f * LOG2E / cap)));
    }
    __device__ __forceinline__ float capped(float x) const {
        return GENERAL && cap > 0.0f ? cap * tanh_over(x) : x;
    }
    __device__ __forceinline__ float smooth() const { return GENERAL ? smoothing / classes : 0.0f; }
    __device__ __forceinline__ float hit(int target) const {
        return GENERAL ? (1.0f - smoothing) * class_weight_of(weight, target) : 1.0f;
    }
    __device__ __forceinline__ float all(int target, float lse) const {  // A in the formula above
        return hit(target) + smooth() * class_weight_sum(weight_sum, classes) + 2.0f * z_loss * lse;
    }
};

struct Row {  // one row, covered by aligned 16-byte vectors
    ELEMENT* logits;
    uint4* vectors;
    int lead, count;  // lead: elements of vector 0 before the row's start; count: the number of vectors

    __device__ __forceinline__ Row(ELEMENT* start, int classes) : logits(start) {
        unsigned long long address = (unsigned long long)start;
        lead = (int)(address & 15) / (int)sizeof(ELEMENT);
        vectors = (uint4*)(address & ~15ull);
        count = (lead + classes + COUNT - 1) / COUNT;
    }
    __device__ __forceinline__ bool edge(int v) const { return v == 0 || v == count - 1; }
    __device__ __forceinline__ void store(int v, const float* g, int classes) const {
        if (!edge(v)) {
            vectors[v] = Wide<ELEMENT>::pack(g);
            return;
        }
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            int j = v * COUNT - lead + k;
            if (j >= 0 && j < classes) from_float(g[k], logits[j]);
        }
    }
};

struct Slope {  // dloss/dz_j = exp2(z_j * LOG2E + offset) * all - smooth * w_j, minus hit if j is the target
    float offset, all, smooth, hit;
};

// Compute the gradient of the logits `raw`, which are vector v of a row, and write it to vector v of `row`.
__device__ __forceinline__ void write_vector(const Slope& s, const Formula& f, const Row& row, int v,
                                             uint4 raw, int target) {
    float g[COUNT], slope[COUNT];
    Wide<ELEMENT>::unpack(raw, g);
    int first = v * COUNT - row.lead;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        slope[k] = 1.0f;
        if (GENERAL && f.cap > 0.0f) {
            float t = f.tanh_over(g[k]);
            slope[k] = 1.0f - t * t;
            g[k] = f.cap * t;
        }
        g[k] = exp2_approx(fmaf(g[k], LOG2E, s.offset)) * s.all;
        if (GENERAL && s.smooth != 0.0f && first + k >= 0 && first + k < f.classes)
            g[k] -= s.smooth * class_weight_of(f.weight, first + k);
    }
    if (target >= first && target < first + COUNT) {
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (first + k == target) g[k] -= s.hit;
    }
    if (GENERAL && f.cap > 0.0f) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) g[k] *= slope[k];
    }
    row.store(v, g, f.classes);
}

__device__ __forceinline__ void write_zeros(const Row& row, int begin, int end, int classes) {
    float zeros[COUNT] = {};
    for (int v = begin + threadIdx.x; v < end; v += blockDim.x) row.store(v, zeros, classes);
}
