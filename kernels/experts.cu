// The element-wise parts of a mixture of experts, each in one pass over memory. A token has k rows, one for each of its
// experts; the rows of all tokens are sorted by expert. All arithmetic is in float32, and each element is rounded once.
//
// `vectors` is the width of a row in 16-byte vectors of ELEMENT; for the gate kernels, the width of half a row of x.
// Rows are aligned to 16 bytes and consist of full vectors, so that no element is left over.
//
// Macros: ELEMENT: float, fp16 or bf16, the rows. OUT: ELEMENT or float, the sums of rows. WEIGHT: float; none if the
// rows are added without weights.
#include "device.cuh"

constexpr int COUNT = Wide<ELEMENT>::count;

// Load or store COUNT adjacent elements, of which p points to the first.
template <typename T> __device__ __forceinline__ void load(const T* p, float* y) {
#pragma unroll
    for (int i = 0; i < COUNT; i += Wide<T>::count) Wide<T>::unpack(load_cached((const uint4*)(p + i)), y + i);
}
template <typename T> __device__ __forceinline__ void store(T* p, const float* x) {
#pragma unroll
    for (int i = 0; i < COUNT; i += Wide<T>::count) store_cached((uint4*)(p + i), Wide<T>::pack(x + i));
}

__device__ __forceinline__ float weight_of(const float* weights, long long i) { return weights[i]; }
__device__ __forceinline__ float weight_of(const none*, long long) { return 1.0f; }

// out[token] = the sum over j of weights[token, j] * rows[places[token, j]], in the order of j. One block per token.
extern "C" __global__ __launch_bounds__(256) void sum_rows(int vectors, const ELEMENT* rows, const long long* places,
                                                           const WEIGHT* weights, int k, OUT* out) {
    long long token = blockIdx.x, width = (long long)vectors * COUNT;
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        float sum[COUNT] = {}, x[COUNT];
#pragma unroll 4
        for (int j = 0; j < k; j++) {
            load(rows + places[token * k + j] * width + v * COUNT, x);
            float weight = weight_of(weights, token * k + j);
#pragma unroll
            for (int i = 0; i < COUNT; i++) sum[i] += weight * x[i];
        }
        store(out + token * width + v * COUNT, sum);
    }
}

// From `dout`, the gradient of the result of sum_rows, compute the gradients of the rows and of the weights.
// order[row] is the index of the row's weight in the flattened weights. One warp per row.
extern "C" __global__ __launch_bounds__(256) void sum_rows_backward(int vectors, const OUT* dout, const ELEMENT* rows,
                                                                    const float* weights, const long long* order,
                                                                    int k, long long count, ELEMENT* drows,
                                                                    float* dweights) {
    long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32, width = (long long)vectors * COUNT;
    if (row >= count) return;
    int lane = threadIdx.x % 32;
    long long place = order[row];
    const OUT* gradient = dout + place / k * width;
    float weight = weights[place], product = 0.0f;
#pragma unroll 4
    for (int v = lane; v < vectors; v += 32) {
        float dy[COUNT], y[COUNT];
        load(gradient + v * COUNT, dy);
        load(rows + row * width + v * COUNT, y);
#pragma unroll
        for (int i = 0; i < COUNT; i++) product += dy[i] * y[i], dy[i] *= weight;
        store(drows + row * width + v * COUNT, dy);
    }
    for (int offset = 16; offset > 0; offset >>= 1) product += __shfl_xor_sync(0xffffffffu, product, offset);
    if (lane == 0) dweights[place] = product;
}

// out = silu(gate) * up. In each row of x, the first half is gate, and the second half is up. One block per row.
extern "C" __global__ __launch_bounds__(256) void silu_gate(int vectors, const ELEMENT* x, ELEMENT* out) {
    long long row = blockIdx.x, width = (long long)vectors * COUNT;
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        float gate[COUNT], up[COUNT];
        load(x + 2 * row * width + v * COUNT, gate);
        load(x + (2 * row + 1) * width + v * COUNT, up);
#pragma unroll
        for (int i = 0; i < COUNT; i++) up[i] *= gate[i] / (1.0f + expf(-gate[i]));
        store(out + row * width + v * COUNT, up);
    }
}

// From `dout`, the gradient of the result of silu_gate, compute dx, the gradient of x. One block per row.
extern "C" __global__ __launch_bounds__(256) void silu_gate_backward(int vectors, const ELEMENT* x, const ELEMENT* dout,
                                                                     ELEMENT* dx) {
    long long row = blockIdx.x, width = (long long)vectors * COUNT;
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        float gate[COUNT], up[COUNT], dy[COUNT];
        load(x + 2 * row * width + v * COUNT, gate);
        load(x + (2 * row + 1) * width + v * COUNT, up);
        load(dout + row * width + v * COUNT, dy);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float sigmoid = 1.0f / (1.0f + expf(-gate[i])), silu = gate[i] * sigmoid;
            gate[i] = dy[i] * up[i] * (sigmoid + silu * (1.0f - sigmoid));
            up[i] = dy[i] * silu;
        }
        store(dx + 2 * row * width + v * COUNT, gate);
        store(dx + (2 * row + 1) * width + v * COUNT, up);
    }
}
