// Float32 matrices of a LoRA adapter as sums of bfloat16 matrices: a value x is hi + lo, where hi is x rounded to
// bfloat16, and lo is the remainder x - hi, also rounded. One thread per value.
#include "device.cuh"

__device__ __forceinline__ void split(float x, bf16& hi, bf16& lo) {
    from_float(x, hi);
    from_float(x - to_float(hi), lo);
}

// The matrix [A Bᵀ], of A (rank, width) and B (columns - width, rank), has `columns` columns. out (4 rank, columns) gets
// the rows [hi; lo; hi; hi] of this matrix.
extern "C" __global__ __launch_bounds__(256) void split_factors(const float* a, const float* b, int rank, int width,
                                                                int columns, bf16* out) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, count = (long long)rank * columns;
    if (i >= count) return;
    long long row = i / columns, column = i % columns;
    bf16 hi, lo;
    split(column < width ? a[row * width + column] : b[(column - width) * rank + row], hi, lo);
    out[i] = hi;
    out[count + i] = lo;
    out[2 * count + i] = hi;
    out[3 * count + i] = hi;
}

// sums (rows, 2 rank) consists of the matrices [p | q]. out (rows, 4 rank) gets [lo of p | hi of p | hi of q | hi of p].
// count is rows * rank.
extern "C" __global__ __launch_bounds__(256) void split_sums(const float* sums, int rank, long long count, bf16* out) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long row = i / rank, column = i % rank;
    const float* from = sums + 2 * row * rank + column;
    bf16* to = out + 4 * row * rank + column;
    bf16 hi, lo;
    split(from[0], hi, lo);
    to[0] = lo;
    to[rank] = hi;
    from_float(from[rank], to[2 * rank]);
    to[3 * rank] = hi;
}
