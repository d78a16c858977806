// Round matrices to e4m3; hf_bmtrain/features/float8/arithmetic.py defines scales and shapes. First the largest
// magnitude of each row, of each column or of the matrix is found, where NaN counts as larger than inf; then elements
// are rounded.
//
// Memory accesses for each element of x:
//     quantize_rows                                       1 read, 1 byte written
//     absmax_both, round_both                             2 reads, 2 bytes written
//     absmax_whole, round_whole or round_transposed       2 reads, 1 byte written
//     absmax_pieces, round_pieces                         the same, for ranges (pieces) of several matrices
//     transpose_codes                                     1 byte read, 1 byte written
// quantize_rows keeps a row in the registers of a block; elements that do not fit are read a second time, from the
// caches. round_both, round_whole and round_transposed start with the elements that the absmax kernel has read last,
// because these are still in the L2 cache.
//
// Macros: ELEMENT: float, fp16 or bf16. ALIGNED: 1 if x is aligned to 16 bytes, and all rows (or pieces) of x and of
// the results begin and end at multiples of 16 elements; else 0, and elements are accessed one by one.
#include "device.cuh"

// A part is 16 bytes of x. COUNT: its elements. WORDS: the 4-byte words that its codes take.
constexpr int COUNT = Wide<ELEMENT>::count, WORDS = COUNT / 4;
constexpr int KEPT = 4;                  // parts that a thread keeps in registers
constexpr int THREADS = 256, SIDE = 64;  // SIDE: rows of a tile
constexpr float MOST = 448.0f, LEAST = 1e-30f;

// ---- elements --------------------------------------------------------------------------------------------

// Load elements p[0 .. COUNT) into y. Only the first `left` of them exist; the rest of y is set to 0.
__device__ __forceinline__ void load_part(const ELEMENT* p, long long left, float* y) {
    if constexpr (ALIGNED) {
        Wide<ELEMENT>::unpack(left > 0 ? load_cached((const uint4*)p) : make_uint4(0, 0, 0, 0), y);
    } else {
#pragma unroll
        for (int k = 0; k < COUNT; k++) y[k] = k < left ? to_float(p[k]) : 0.0f;
    }
}

// Store 4 N codes, four per word of `codes`, to p. At most `left` codes are written, because p ends there.
template <int N> __device__ __forceinline__ void store_codes(e4m3* p, long long left, const unsigned* codes) {
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int k = 0; k < 4 * N; k++)
            if (k < left) p[k].bits = codes[k / 4] >> 8 * (k % 4);
    } else if (left > 0) {
        if constexpr (N == 1) store_cached((unsigned*)p, codes[0]);
        if constexpr (N == 2) store_cached((uint2*)p, make_uint2(codes[0], codes[1]));
        if constexpr (N == 4) store_cached((uint4*)p, make_uint4(codes[0], codes[1], codes[2], codes[3]));
    }
}

// ---- rounding --------------------------------------------------------------------------------------------

// Return the bits of |x|. Magnitudes are compared as these integers, so that NaN counts as larger than inf.
__device__ __forceinline__ int magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ int warp_max(int x) {
    for (int offset = 16; offset > 0; offset >>= 1) x = max(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}
__device__ __forceinline__ int block_max(int x) {  // the result is valid in thread 0
    __shared__ int warps[THREADS / 32];
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 1; w < blockDim.x / 32; w++) x = max(x, warps[w]);
    return x;
}

struct Scale {
    float scale, factor;
    __device__ __forceinline__ explicit Scale(int most) {
        float absmax = __uint_as_float((unsigned)most);
        if (absmax < LEAST) absmax = LEAST;  // the comparison is false for NaN, so a NaN is kept
        scale = absmax / MOST, factor = MOST / absmax;
    }
};

// Return the e4m3 code of x, rounded to nearest even. x must be NaN, or round to a magnitude of at most 448.
__device__ __forceinline__ unsigned code(float x) {
    unsigned u = __float_as_uint(x), sign = u >> 24 & 0x80u, bits = u & 0x7fffffffu;
    if (bits > 0x7f800000u) return 0x7fu;
    // Below 2^-6, e4m3 numbers are 2^-9 apart, as float32 numbers from 2^14 are. So adding 2^14 in float32 rounds.
    if (bits < 0x3c800000u)
        return sign | (__float_as_uint(__fadd_rn(__uint_as_float(bits), 16384.0f)) - 0x46800000u);
    return sign | ((bits + 0x7ffffu + (bits >> 20 & 1u) >> 20) - (127 - 7 << 3));
}
__device__ __forceinline__ unsigned codes4(float a, float b, float c, float d) {
#if defined(__CUDACC_RTC__) && __CUDA_ARCH__ >= 890
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | (unsigned)high << 16;
#else
    return code(a) | code(b) << 8 | code(c) << 16 | code(d) << 24;
#endif
}
__device__ __forceinline__ void store_part(e4m3* p, long long left, const float* y, float factor) {
    unsigned codes[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; w++)
        codes[w] = codes4(__fmul_rn(y[4 * w], factor), __fmul_rn(y[4 * w + 1], factor),
                          __fmul_rn(y[4 * w + 2], factor), __fmul_rn(y[4 * w + 3], factor));
    store_codes<WORDS>(p, left, codes);
}

// ---- rows ------------------------------------------------------------------------------------------------

__device__ __forceinline__ int part_max(const float* y, int most) {
#pragma unroll
    for (int k = 0; k < COUNT; k++) most = max(most, magnitude(y[k]));
    return most;
}

// Round each row of x with its own scale, one block per row.
extern "C" __global__ __launch_bounds__(256) void quantize_rows(const ELEMENT* x, int width, e4m3* values,
                                                                float* scales) {
    x += (long long)blockIdx.x * width, values += (long long)blockIdx.x * width;
    int first = threadIdx.x * COUNT, step = blockDim.x * COUNT, most = 0;
    float kept[KEPT][COUNT], y[COUNT];
#pragma unroll
    for (int u = 0; u < KEPT; u++) load_part(x + first + u * step, width - first - u * step, kept[u]);
#pragma unroll
    for (int u = 0; u < KEPT; u++) most = part_max(kept[u], most);
    for (int at = first + KEPT * step; at < width; at += step) {
        load_part(x + at, width - at, y);
        most = part_max(y, most);
    }
    __shared__ float factor;
    most = block_max(most);
    if (threadIdx.x == 0) {
        Scale row(most);
        scales[blockIdx.x] = row.scale, factor = row.factor;
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < KEPT; u++) store_part(values + first + u * step, width - first - u * step, kept[u], factor);
    for (int at = first + KEPT * step; at < width; at += step) {
        load_part(x + at, width - at, y);
        store_part(values + at, width - at, y, factor);
    }
}

// ---- in two passes: columns, or one scale ------------------------------------------------------------------

// A block processes KEPT * THREADS * COUNT elements of a flat x. A thread has KEPT parts of COUNT elements: the first
// part begins at `first`, and the others follow at distances of THREADS * COUNT. Elements from `stop` on do not exist.
__device__ __forceinline__ void load_span(const ELEMENT* x, long long first, long long stop, float (&y)[KEPT][COUNT]) {
#pragma unroll
    for (int u = 0; u < KEPT; u++) load_part(x + first + u * THREADS * COUNT, stop - first - u * THREADS * COUNT, y[u]);
}
__device__ __forceinline__ void find_most(const ELEMENT* x, long long first, long long stop, int* most) {
    float y[KEPT][COUNT];
    int found = 0;
    load_span(x, first, stop, y);
#pragma unroll
    for (int u = 0; u < KEPT; u++) found = part_max(y[u], found);
    found = block_max(found);
    if (threadIdx.x == 0) atomicMax(most, found);
}

// Set most[0], which must be 0 before, to the bits of the largest magnitude of x.
extern "C" __global__ __launch_bounds__(256) void absmax_whole(const ELEMENT* x, long long n, int* most) {
    find_most(x, ((long long)blockIdx.x * KEPT * THREADS + threadIdx.x) * COUNT, n, most);
}

// The piece of x that this block of threads processes. Piece p consists of elements pieces[p] .. pieces[count + p]. Its
// first block is number pieces[2 * count + p], and its last one precedes the first block of piece p + 1. An empty piece
// has no blocks.
struct Piece {
    int number;
    long long first, stop;  // the first of this thread's elements, and the end of the piece
    __device__ __forceinline__ Piece(const long long* pieces, int count) {
        const long long* blocks = pieces + 2 * count;
        number = 0;
        for (int above = count; above - number > 1;) {
            int middle = (number + above) / 2;
            if (blocks[middle] <= (long long)blockIdx.x) number = middle;
            else above = middle;
        }
        long long block = blockIdx.x - blocks[number];
        first = pieces[number] + (block * KEPT * THREADS + threadIdx.x) * COUNT, stop = pieces[count + number];
    }
};

// Set each most[p], which must be 0 before, to the bits of the largest magnitude of piece p.
extern "C" __global__ __launch_bounds__(256) void absmax_pieces(const ELEMENT* x, const long long* pieces, int count,
                                                                int* most) {
    Piece piece(pieces, count);
    find_most(x, piece.first, piece.stop, most + piece.number);
}

// Round the elements of each piece p with the scale that follows from most[p], the bits of its largest magnitude.
extern "C" __global__ __launch_bounds__(256) void round_pieces(const ELEMENT* x, const long long* pieces, int count,
                                                               const int* most, e4m3* values) {
    Piece piece(pieces, count);
    float y[KEPT][COUNT], factor = Scale(most[piece.number]).factor;
    load_span(x, piece.first, piece.stop, y);
#pragma unroll
    for (int u = 0; u < KEPT; u++)
        store_part(values + piece.first + u * THREADS * COUNT, piece.stop - piece.first - u * THREADS * COUNT, y[u],
                   factor);
}

// Set rows and columns, which must be 0 before, to the bits of the largest magnitude of each row and of each column.
// A block processes a tile of SIDE rows and 32 * COUNT columns; each warp reads full rows of the tile.
extern "C" __global__ __launch_bounds__(256) void absmax_both(const ELEMENT* x, int height, int width, int* rows,
                                                              int* columns) {
    constexpr int ACROSS = 32 * COUNT, WARPS = THREADS / 32, STRIDE = 36;  // STRIDE avoids bank conflicts
    __shared__ int found[WARPS][COUNT * STRIDE];
    int tiles = (width + ACROSS - 1) / ACROSS, left = blockIdx.x % tiles * ACROSS, top = blockIdx.x / tiles * SIDE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = left + lane * COUNT, most[COUNT] = {};
    int in_rows[SIDE / WARPS];
#pragma unroll
    for (int u = 0; u < SIDE / WARPS; u++) {
        int row = top + u * WARPS + warp;
        float y[COUNT];
        load_part(x + (long long)row * width + column, row < height ? width - column : 0, y);
        in_rows[u] = part_max(y, 0);
#pragma unroll
        for (int k = 0; k < COUNT; k++) most[k] = max(most[k], magnitude(y[k]));
    }
#pragma unroll
    for (int u = 0; u < SIDE / WARPS; u++) {
        int row = top + u * WARPS + warp, in_row = warp_max(in_rows[u]);
        if (lane == 0 && row < height) atomicMax(rows + row, in_row);
    }
#pragma unroll
    for (int k = 0; k < COUNT; k++) found[warp][k * STRIDE + lane] = most[k];
    __syncthreads();
    if (threadIdx.x < ACROSS && left + threadIdx.x < width) {
        int in_column = 0;
        for (int w = 0; w < WARPS; w++)
            in_column = max(in_column, found[w][threadIdx.x % COUNT * STRIDE + threadIdx.x / COUNT]);
        atomicMax(columns + left + threadIdx.x, in_column);
    }
}

// Set factors[i], i < N, to the factor with which row (or column) number first + i is multiplied before it is rounded.
// With STEP 0, all have the factor of most[0]. Write the scales to global memory too, unless `scales` is null.
template <int N, int STEP>
__device__ __forceinline__ void find_factors(const int* most, int first, int count, float* factors, float* scales) {
    int i = threadIdx.x, at = first + i;
    if (i >= N || at >= count) return;
    Scale found(most[at * STEP]);
    factors[i] = found.factor;
    if (scales) scales[at] = found.scale;
}

// The second pass: round a tile of SIDE rows and 16 * COUNT columns. Block 0 has the last tile, because the first pass
// has read it last, so it is still in the L2 cache. A thread has one part (16 bytes) of each of four rows, so that it
// can write words of four codes both to `rows` and to the transpose `columns`. A row of the transpose has `stride`
// codes; those beyond `height` are zeros.
template <bool ROWS, bool COLUMNS, int STEP>
__device__ __forceinline__ void round_tile(const ELEMENT* x, int height, int width, const int* row_most, e4m3* rows,
                                           float* row_scales, const int* column_most, e4m3* columns,
                                           float* column_scales, int stride) {
    constexpr int ACROSS = 16 * COUNT, STRIDE = SIDE / 4 + 1;
    __shared__ float row_factors[SIDE], column_factors[ACROSS];
    __shared__ unsigned transposed[ACROSS * STRIDE];
    int tiles = (width + ACROSS - 1) / ACROSS, tile = gridDim.x - 1 - blockIdx.x;
    int top = tile / tiles * SIDE, left = tile % tiles * ACROSS, vector = threadIdx.x % 16, group = threadIdx.x / 16;
    int row = top + 4 * group, column = left + COUNT * vector;
    float y[4][COUNT];
#pragma unroll
    for (int r = 0; r < 4; r++)
        load_part(x + (long long)(row + r) * width + column, row + r < height ? width - column : 0, y[r]);
    if constexpr (ROWS) find_factors<SIDE, STEP>(row_most, top, height, row_factors, left ? nullptr : row_scales);
    if constexpr (COLUMNS)
        find_factors<ACROSS, STEP>(column_most, left, width, column_factors, top ? nullptr : column_scales);
    __syncthreads();
    if constexpr (ROWS) {
#pragma unroll
        for (int r = 0; r < 4; r++)
            store_part(rows + (long long)(row + r) * width + column, row + r < height ? width - column : 0, y[r],
                       row_factors[4 * group + r]);
    }
    if constexpr (COLUMNS) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            float f = column_factors[vector * COUNT + k];
            transposed[(k * 16 + vector) * STRIDE + group] =
                codes4(__fmul_rn(y[0][k], f), __fmul_rn(y[1][k], f), __fmul_rn(y[2][k], f), __fmul_rn(y[3][k], f));
        }
        __syncthreads();
        int from = top + threadIdx.x % 4 * 16;  // each thread writes the codes of 16 rows of one column
        for (int slot = threadIdx.x / 4; slot < ACROSS; slot += THREADS / 4) {
            int at = left + slot % 16 * COUNT + slot / 16;
            if (at < width)
                store_codes<4>(columns + (long long)at * stride + from, stride - from,
                               transposed + slot * STRIDE + threadIdx.x % 4 * 4);
        }
    }
}

extern "C" __global__ __launch_bounds__(256) void round_both(const ELEMENT* x, int height, int width,
                                                             const int* row_most, const int* column_most, e4m3* rows,
                                                             float* row_scales, e4m3* columns, float* column_scales,
                                                             int stride) {
    round_tile<true, true, 1>(x, height, width, row_most, rows, row_scales, column_most, columns, column_scales,
                              stride);
}
extern "C" __global__ __launch_bounds__(256) void round_whole(const ELEMENT* x, int height, int width, const int* most,
                                                              e4m3* values, float* scales) {
    round_tile<true, false, 0>(x, height, width, most, values, scales, nullptr, nullptr, nullptr, 0);
}
extern "C" __global__ __launch_bounds__(256) void round_transposed(const ELEMENT* x, int height, int width,
                                                                   const int* most, e4m3* values, float* scales) {
    round_tile<false, true, 0>(x, height, width, nullptr, nullptr, nullptr, most, values, scales, height);
}

// ---- codes -----------------------------------------------------------------------------------------------

// Write the transpose y (width, height) of the codes x (height, width); both sizes are multiples of 16. A block
// processes SIDE rows and 256 columns. A thread reads 16 columns of four rows, so that it has words of four codes of y.
// This kernel does not depend on ELEMENT.
extern "C" __global__ __launch_bounds__(256) void transpose_codes(const e4m3* x, int height, int width, e4m3* y) {
    constexpr int ACROSS = 256, STRIDE = SIDE / 4 + 1;
    __shared__ unsigned words[ACROSS * STRIDE];
    int tiles = (width + ACROSS - 1) / ACROSS, top = blockIdx.x / tiles * SIDE, left = blockIdx.x % tiles * ACROSS;
    int vector = threadIdx.x % 16, group = threadIdx.x / 16, row = top + 4 * group, column = left + 16 * vector;
    bool inside = row < height && column < width;
    uint4 parts[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const e4m3* p = x + (long long)(row + r) * width + column;
        parts[r] = inside ? load_cached((const uint4*)p) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < 16; k++) {
        unsigned word = 0;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            unsigned four = k < 4 ? parts[r].x : k < 8 ? parts[r].y : k < 12 ? parts[r].z : parts[r].w;
            word |= (four >> 8 * (k % 4) & 0xffu) << 8 * r;
        }
        words[(k * 16 + vector) * STRIDE + group] = word;
    }
    __syncthreads();
    int part = threadIdx.x % 4, from = top + 16 * part;  // each thread writes the codes of 16 rows of one column of x
    for (int slot = threadIdx.x / 4; slot < ACROSS; slot += THREADS / 4) {
        int at = left + slot % 16 * 16 + slot / 16;
        const unsigned* four = words + slot * STRIDE + 4 * part;
        if (at < width && from < height)
            store_cached((uint4*)(y + (long long)at * height + from), make_uint4(four[0], four[1], four[2], four[3]));
    }
}
