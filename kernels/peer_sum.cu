// The mean over ranks of one part of a gradient, of which every rank's values lie in a row of memory. Added in
// float32 in the order of ranks, divided once, rounded once: the same bits on every run.
//
// Moves 1 read of each row and 1 write; with a running sum, that is read and written besides.
// ELEMENT: float, fp16 or bf16. TOTAL: float, or none where there is no running sum.
#include "device.cuh"

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

// Row r is rows[r n .. (r + 1) n). The first `vectors` 16-byte vectors of every row and array are aligned, one a
// thread; the rest goes element by element. `total` may be `out` itself where both are float.
extern "C" __global__ __launch_bounds__(256) void peer_mean(const ELEMENT* rows, int size, ELEMENT* out,
                                                            TOTAL* total, long long n, long long vectors) {
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float ranks = (float)size;
    if (thread < vectors) {
        float sum[COUNT], x[COUNT];
        Wide<ELEMENT>::unpack(load_once((const uint4*)rows + thread), sum);
#pragma unroll 2
        for (int r = 1; r < size; r++) {
            Wide<ELEMENT>::unpack(load_once((const uint4*)(rows + r * n) + thread), x);
#pragma unroll
            for (int k = 0; k < COUNT; k++) sum[k] += x[k];
        }
#pragma unroll
        for (int k = 0; k < COUNT; k++) sum[k] /= ranks;
#pragma unroll
        for (int k = 0; k < COUNT; k += 4) add_total4(total, thread * (COUNT / 4) + k / 4, sum + k);
        store_once((uint4*)out + thread, Wide<ELEMENT>::pack(sum));
    }
    long long threads = (long long)gridDim.x * blockDim.x;
    for (long long i = vectors * COUNT + thread; i < n; i += threads) {
        float sum = to_float(rows[i]);
        for (int r = 1; r < size; r++) sum += to_float(rows[r * n + i]);
        from_float(add_total(total, i, sum / ranks), out[i]);
    }
}
