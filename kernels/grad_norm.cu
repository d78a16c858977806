// Sum of squares of a flat gradient, or of each of its segments. The result is bitwise reproducible: each element
// belongs to a fixed thread, and partial sums are added in a fixed order.
//
// Every element is read once. Macro ELEMENT: float, fp16 or bf16.
#include "squares.cuh"

constexpr int UNROLL = 4;  // pending 16-byte loads per thread

// Return this thread's part of the sum of squares of x[0 .. n). The work is divided among `step` blocks, of which this
// is number `first`.
__device__ double thread_squares(const ELEMENT* x, long long n, long long first, long long step) {
    const int count = Wide<ELEMENT>::count;
    long long head =
        ((16 - ((unsigned long long)x & 15)) & 15) / sizeof(ELEMENT);  // elements before the first 16-byte boundary
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
        sum += tile_squares<UNROLL>(v);
    }
    if (first == 0) {  // the elements before the first and after the last full vector, one per thread
        long long tail = head + vector_count * count, i = threadIdx.x;
        long long at = i < head ? i : tail + i - head;
        if (at < n) sum += (double)to_float(x[at]) * (double)to_float(x[at]);
    }
    return sum;
}

extern "C" __global__ __launch_bounds__(256) void squared_norm_partials(const ELEMENT* x, long long n,
                                                                        double* partials) {
    double sum = block_sum(thread_squares(x, n, blockIdx.x, gridDim.x));
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// Add the sum of the partials to out[0], and set out[1] to 1 if the sum is not finite. Launch a single block.
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

// Write the sum of squares of each piece of x to partials, one block per piece. Piece i is x[begins[i] .. begins[i] +
// lengths[i]).
extern "C" __global__ __launch_bounds__(256) void piece_squares(const ELEMENT* x, const long long* begins,
                                                                const int* lengths, double* partials) {
    double sum = block_sum(thread_squares(x + begins[blockIdx.x], lengths[blockIdx.x], 0, 1));
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// Write the sum of partials[firsts[s] .. firsts[s + 1]) to out[s] for each segment s, one block per segment.
extern "C" __global__ __launch_bounds__(256) void segment_squares(const double* partials,
                                                                  const long long* firsts, double* out) {
    const long long end = firsts[blockIdx.x + 1];
    double sum = 0.0;
#pragma unroll 8
    for (long long i = firsts[blockIdx.x] + threadIdx.x; i < end; i += blockDim.x) sum += partials[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
