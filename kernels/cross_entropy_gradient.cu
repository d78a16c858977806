// The gradient of the cross-entropy from the lses of an earlier pass, and the rescaling of a gradient already
// written. Streaming: `parts` blocks a row, each vector read once and written once.
#include "cross_entropy.cuh"

// The gradient alone, from the lses of an earlier cross_entropy_losses. `gradient` is `logits`, or lies on the same
// grid of vectors with the same distance between rows.
extern "C" __global__ __launch_bounds__(256) void cross_entropy_gradient(
    const ELEMENT* logits, long long row_stride, int classes, const long long* targets, long long ignore_index,
    float smoothing, float z_loss, float cap, const WEIGHT* weight, const WEIGHT* weight_sum, int parts,
    const float* scale, int scale_stride, const float* lses, ELEMENT* gradient) {
    Formula f = {smoothing, z_loss, cap, classes, weight, weight_sum};
    long long i = blockIdx.x / parts, target = targets[i];
    Row row((ELEMENT*)logits + i * row_stride, classes), out(gradient + i * row_stride, classes);
    int share = (row.count + parts - 1) / parts, begin = min((int)(blockIdx.x % parts) * share, row.count);
    int end = min(begin + share, row.count), step = blockDim.x;
    if (target < 0 || target >= classes || target == ignore_index)
        return write_zeros(out, begin, end, classes);
    float factor = scale[i * scale_stride], lse = lses[i];
    Slope slope = {-lse * LOG2E, f.all((int)target, lse) * factor, f.smooth() * factor,
                   f.hit((int)target) * factor};
    for (int v = begin + threadIdx.x; v < end; v += GROUP * step) {
        uint4 raw[GROUP];
#pragma unroll
        for (int k = 0; k < GROUP; k++)
            if (v + k * step < end) raw[k] = row.vectors[v + k * step];
#pragma unroll
        for (int k = 0; k < GROUP; k++)
            if (v + k * step < end) write_vector(slope, f, out, v + k * step, raw[k], (int)target);
    }
}

// Multiplies row i by wanted / used unless they are equal, which is the usual case: then nothing is read or
// written.
extern "C" __global__ __launch_bounds__(256) void rescale(ELEMENT* x, long long row_stride, int classes,
                                                          int parts, const float* wanted, int wanted_stride,
                                                          const float* used, int used_stride) {
    long long i = blockIdx.x / parts;
    float target = wanted[i * wanted_stride], present = used[i * used_stride];
    if (target == present || present == 0.0f) return;
    float factor = target / present;
    Row row(x + i * row_stride, classes);
    int share = (row.count + parts - 1) / parts, begin = min((int)(blockIdx.x % parts) * share, row.count);
    int end = min(begin + share, row.count);
    for (int v = begin + threadIdx.x; v < end; v += blockDim.x) {
        float y[COUNT];
        Wide<ELEMENT>::unpack(row.vectors[v], y);
#pragma unroll
        for (int k = 0; k < COUNT; k++) y[k] *= factor;
        row.store(v, y, classes);
    }
}
