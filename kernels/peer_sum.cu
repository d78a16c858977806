// The mean over ranks of this rank's part of a gradient. The other ranks have written their values into rows of this
// GPU's memory; this rank's own values are read directly from autograd's gradient. Values are added in float32 in the
// order of ranks, divided once and rounded once, so the result has the same bits in every run.
//
// Every row is read once and the mean is written once. A running sum of accumulated gradients is read and written too.
// The kernel also returns the sum of squares of the written elements, for the gradient norm and to find inf and NaN.
//
// Macros: ELEMENT: float, fp16 or bf16. TOTAL: float; none if there is no running sum.
#include "squares.cuh"

constexpr int COUNT = Wide<ELEMENT>::count;

__device__ __forceinline__ void add_total4(float* total, long long i, float* mean) {
    float t[4];
    load4(total, i, t);
#pragma unroll
    for (int k = 0; k < 4; k++) mean[k] += t[k];
    store4(total, i, mean);
}
__device__ __forceinline__ void add_total4(none*, long long, float*) {}
__device__ __forceinline__ float add_total(float* total, long long i, float mean) { return total[i] += mean; }
__device__ __forceinline__ float add_total(none*, long long, float mean) { return mean; }

// Return the values of rank r: `mine` if r is this rank's index, `own`; otherwise one of `rows`. The rows contain the
// values of the other ranks in rank order, and are `stride` elements apart.
__device__ __forceinline__ const ELEMENT* values(const ELEMENT* rows, long long stride, const ELEMENT* mine, int own,
                                                 int r) {
    return r == own ? mine : rows + (r - (r > own)) * stride;
}

// Write the mean to `out`. With a running sum `total`, instead add the mean to it and write the new sum to `out`.
// The first `vectors` 16-byte vectors, aligned in every array, are processed one per thread, the remaining elements one
// by one. squares: for each block of threads, the sum of squares of what it has written. `total` and `out` may be the
// same array if both are float.
extern "C" __global__ __launch_bounds__(256, 4) void peer_mean(const ELEMENT* rows, long long stride,
                                                               const ELEMENT* mine, int own, int size, ELEMENT* out,
                                                               TOTAL* total, long long n, long long vectors,
                                                               double* squares) {
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float ranks = (float)size;
    double square = 0.0;
    if (thread < vectors) {
        float sum[COUNT], x[COUNT];
        Wide<ELEMENT>::unpack(load_once((const uint4*)values(rows, stride, mine, own, 0) + thread), sum);
#pragma unroll 2
        for (int r = 1; r < size; r++) {
            Wide<ELEMENT>::unpack(load_once((const uint4*)values(rows, stride, mine, own, r) + thread), x);
#pragma unroll
            for (int k = 0; k < COUNT; k++) sum[k] += x[k];
        }
#pragma unroll
        for (int k = 0; k < COUNT; k++) sum[k] /= ranks;
#pragma unroll
        for (int k = 0; k < COUNT; k += 4) add_total4(total, thread * (COUNT / 4) + k / 4, sum + k);
        uint4 written = Wide<ELEMENT>::pack(sum);
        store_once((uint4*)out + thread, written);
        square = tile_squares<1>(&written);
    }
    long long threads = (long long)gridDim.x * blockDim.x;
    for (long long i = vectors * COUNT + thread; i < n; i += threads) {
        float sum = to_float(values(rows, stride, mine, own, 0)[i]);
        for (int r = 1; r < size; r++) sum += to_float(values(rows, stride, mine, own, r)[i]);
        from_float(add_total(total, i, sum / ranks), out[i]);
        square += (double)to_float(out[i]) * (double)to_float(out[i]);
    }
    square = block_sum(square);
    if (threadIdx.x == 0) squares[blockIdx.x] = square;
}
