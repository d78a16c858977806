// Float32 matrices of a LoRA adapter as sums of bfloat16 matrices: a value x is hi + lo, where hi is x rounded to
// bfloat16, and lo is the remainder x - hi, also rounded. One thread per value.
#include "device.cuh"

// Sets hi to x rounded, and returns the remainder.
__device__ __forceinline__ float split(float x, bf16& hi) {
    from_float(x, hi);
    return x - to_float(hi);
}

// The matrix [A Bᵀ], of A (rank, width) and B (columns - width, rank), has `columns` columns. out (3 rank, columns) gets
// the rows [hi; lo; hi] of this matrix.
extern "C" __global__ __launch_bounds__(256) void split_factors(const float* a, const float* b, int rank, int width,
                                                                int columns, bf16* out) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, count = (long long)rank * columns;
    if (i >= count) return;
    long long row = i / columns, column = i % columns;
    bf16 hi;
    float lo = split(column < width ? a[row * width + column] : b[(column - width) * rank + row], hi);
    out[i] = hi;
    from_float(lo, out[count + i]);
    out[2 * count + i] = hi;
}

// sums (rows, 2 rank) consists of the matrices [p | q]. With s the scaling and hi the matrix s p rounded, out
// (rows, 3 rank) gets [s p - hi + s q | hi | hi]. count is rows * rank.
extern "C" __global__ __launch_bounds__(256) void split_sums(const float* sums, float scaling, int rank,
                                                             long long count, bf16* out) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long row = i / rank, column = i % rank;
    const float* from = sums + 2 * row * rank + column;
    bf16* to = out + 3 * row * rank + column;
    bf16 hi;
    float lo = split(__fmul_rn(scaling, from[0]), hi);
    from_float(__fadd_rn(lo, __fmul_rn(scaling, from[rank])), to[0]);
    to[rank] = hi;
    to[2 * rank] = hi;
}
