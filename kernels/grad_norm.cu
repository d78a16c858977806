// Sum of squares of flat gradients, whole or segment by segment, bitwise reproducible: every element has a
// fixed thread, every partial sum a fixed place, and places are added in order.
//
// A tile's squares are added in float32 and the tile sums in float64. Should a tile's float32 sum not be
// finite, the same elements are added again in float64, where no finite float32 can overflow: so a sum is inf
// or NaN if and only if an element is, and no second pass or flag is needed.
//
// Moves 1 read of each element. ELEMENT: float, fp16 or bf16.
#include "device.cuh"

constexpr int UNROLL = 4;  // 16-byte loads in flight a thread

__device__ __noinline__ double exact_squares(uint4 v) {
    float x[Wide<ELEMENT>::count];
    Wide<ELEMENT>::unpack(v, x);
    double sum = 0.0;
    for (int i = 0; i < Wide<ELEMENT>::count; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

__device__ __forceinline__ double tile_squares(const uint4* v) {
    float sums[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        float x[Wide<ELEMENT>::count];
        Wide<ELEMENT>::unpack(v[u], x);
        sums[u] = 0.0f;
#pragma unroll
        for (int i = 0; i < Wide<ELEMENT>::count; i++) sums[u] = fmaf(x[i], x[i], sums[u]);
    }
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (sum < 3.0e38f) return sum;  // false for NaN as well
    double exact = 0.0;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) exact += exact_squares(v[u]);
    return exact;
}

// This thread's part of the sum over x[0..n), shared out over `step` blocks of which this one is number
// `first`.
__device__ double thread_squares(const ELEMENT* x, long long n, long long first, long long step) {
    const int count = Wide<ELEMENT>::count;
    long long head =
        ((16 - ((unsigned long long)x & 15)) & 15) / sizeof(ELEMENT);  // elements before 16-byte alignment
    if (head > n) head = n;
    const uint4* vectors = (const uint4*)(x + head);
    long long vector_count = (n - head) / count, tile = (long long)blockDim.x * UNROLL;
    double sum = 0.0;
    for (long long start = first * tile; start < vector_count; start += step * tile) {
        uint4 v[UNROLL];
        long long at = start + threadIdx.x;
        if (start + tile <= vector_count) {
#pragma unroll
            for (int u = 0; u < UNROLL; u++) v[u] = load_once(vectors + at + u * blockDim.x);
        } else {
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                v[u] = at + u * blockDim.x < vector_count ? load_once(vectors + at + u * blockDim.x)
                                                          : make_uint4(0, 0, 0, 0);
        }
        sum += tile_squares(v);
    }
    if (first == 0) {  // fewer than one vector at each end, one element a thread
        long long tail = head + vector_count * count, i = threadIdx.x;
        long long at = i < head ? i : tail + i - head;
        if (at < n) sum += (double)to_float(x[at]) * (double)to_float(x[at]);
    }
    return sum;
}

// The sum over the block, in thread 0. Blocks are whole warps, at most 32.
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

extern "C" __global__ __launch_bounds__(256) void squared_norm_partials(const ELEMENT* x, long long n,
                                                                        double* partials) {
    double sum = block_sum(thread_squares(x, n, blockIdx.x, gridDim.x));
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// out[0] += the sum of the partials; out[1] becomes 1 if it is not finite. One block.
extern "C" __global__ __launch_bounds__(256) void add_squared_norm(const double* partials, int count,
                                                                   double* out) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        out[0] += sum;
        if (!(fabs(sum) < 1.0e300)) out[1] = 1.0;
    }
}

// One block a piece; piece i is x[begins[i] .. begins[i] + lengths[i]).
extern "C" __global__ __launch_bounds__(256) void piece_squares(const ELEMENT* x, const long long* begins,
                                                                const int* lengths, double* partials) {
    double sum = block_sum(thread_squares(x + begins[blockIdx.x], lengths[blockIdx.x], 0, 1));
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// One warp a segment: out[s] = the sum of partials[firsts[s] .. firsts[s + 1]).
extern "C" __global__ __launch_bounds__(256) void segment_squares(const double* partials,
                                                                  const long long* firsts, int segments,
                                                                  double* out) {
    int segment = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (segment >= segments) return;  // the whole warp
    double sum = 0.0;
    for (long long i = firsts[segment] + lane; i < firsts[segment + 1]; i += 32) sum += partials[i];
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) out[segment] = sum;
}
