// Unpack quantized weights into the full parameters that a block computes with.
// hf_bmtrain/features/packed/arithmetic.py defines the bytes of a cell (16,384 packed elements). The cells are read
// once (0.52, 0.56 or 1.06 bytes per element) and the elements are written once.
//
// Macros: BITS: 4 (nf4) or 8 (e4m3). SCALE_BITS: 8 (the scales are quantized too) or 32. ELEMENT: float, fp16 or bf16.
// TABLES: float; none if no table is needed, because codes are e4m3 numbers and scales are float32.
#include "device.cuh"

constexpr int CELL = 16384, THREADS = 256, AT_ONCE = 8;
constexpr int CODE_WORDS = CELL * BITS / 32;                                // words of 4 bytes
constexpr int CELL_WORDS = CODE_WORDS + (SCALE_BITS == 8 ? 256 / 4 + 4 : 256);

// Return the scale of a block of 64 elements. Product and sum are rounded separately, because fusing them would give
// other results than torch.
__device__ __forceinline__ float scale_of(const int* tail, int block, const TABLES* tables) {
#if SCALE_BITS == 8
    int number = tail[block / 4] >> (8 * (block % 4)) & 255;
    float factor = __uint_as_float((unsigned)tail[64]), mean = __uint_as_float((unsigned)tail[65]);
    return __fadd_rn(__fmul_rn(tables[16 + number], factor), mean);
#else
    return __uint_as_float((unsigned)tail[block]);
#endif
}

// Convert an e4m3 number to float. If its sign, exponent and fraction are moved to their places in an fp16 number, this
// number is 256 times smaller than the e4m3 number, also for subnormals.
__device__ __forceinline__ float from_e4m3(unsigned code) {
    return to_float(fp16{(unsigned short)((code & 0x80u) << 8 | (code & 0x7fu) << 7)}) * 256.0f;
}

template <typename T> __device__ __forceinline__ void store8(T* out, const float* x) {
#pragma unroll
    for (int k = 0; k < AT_ONCE; k += Wide<T>::count) store_once((uint4*)(out + k), Wide<T>::pack(x + k));
}

// Unpack one cell per block of threads. Each thread first computes the scale of one group of 64 elements, then unpacks
// 8 adjacent elements at a time, so that a warp reads and writes full sectors.
extern "C" __global__ __launch_bounds__(256) void unpack_cells(const int* packed, const TABLES* tables, ELEMENT* out) {
    __shared__ float scales[THREADS], values[16];
    const int* cell = packed + (long long)blockIdx.x * CELL_WORDS;
    ELEMENT* target = out + (long long)blockIdx.x * CELL;
    int thread = threadIdx.x;
    scales[thread] = scale_of(cell + CODE_WORDS, thread, tables);
#if BITS == 4
    if (thread < 16) values[thread] = tables[thread];
#endif
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < CELL / (AT_ONCE * THREADS); pass++) {
        int part = pass * THREADS + thread;
        float scale = scales[part * AT_ONCE / 64], x[AT_ONCE];
#if BITS == 4
        unsigned codes = (unsigned)cell[part];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) x[k] = values[codes >> (8 * (k / 2) + (k % 2 ? 0 : 4)) & 15] * scale;
#else
        uint2 codes = load_once((const uint2*)cell + part);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) x[k] = from_e4m3((k < 4 ? codes.x : codes.y) >> (8 * (k % 4)) & 255) * scale;
#endif
        store8(target + part * AT_ONCE, x);
    }
}
