// Sum of squares of a thread's vectors, and sum over the threads of a block.
//
// The squares of one tile (N vectors of one thread) are added in float32, and the sums of tiles in float64. If a tile's
// float32 sum is not finite, its squares are added again in float64, where squares of finite float32 numbers cannot
// overflow. So a sum is inf or NaN if and only if an element is, without a second pass over memory or a flag.
//
// Macro ELEMENT: float, fp16 or bf16.
#pragma once
#include "device.cuh"

__device__ __noinline__ double exact_squares(uint4 v) {
    float x[Wide<ELEMENT>::count];
    Wide<ELEMENT>::unpack(v, x);
    double sum = 0.0;
    for (int i = 0; i < Wide<ELEMENT>::count; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

template <int N> __device__ __forceinline__ double tile_squares(const uint4* v) {
    float sums[N];
#pragma unroll
    for (int u = 0; u < N; u++) {
        float x[Wide<ELEMENT>::count];
        Wide<ELEMENT>::unpack(v[u], x);
        sums[u] = 0.0f;
#pragma unroll
        for (int i = 0; i < Wide<ELEMENT>::count; i++) sums[u] = fmaf(x[i], x[i], sums[u]);
    }
#pragma unroll
    for (int step = 1; step < N; step *= 2)
#pragma unroll
        for (int u = 0; u < N; u += 2 * step) sums[u] += sums[u + step];
    if (sums[0] < 3.0e38f) return sums[0];  // false for NaN as well
    double exact = 0.0;
#pragma unroll
    for (int u = 0; u < N; u++) exact += exact_squares(v[u]);
    return exact;
}

// Return the sum of `x` over all threads of the block. Only thread 0 gets it. The block has at most 32 warps, all full.
__device__ double block_sum(double x) {
    __shared__ double warp_sums[32];
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0.0;
    if (threadIdx.x == 0)
        for (int w = 0; w < blockDim.x / 32; w++) sum += warp_sums[w];
    return sum;
}
