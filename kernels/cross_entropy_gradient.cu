// Two kernels. The first computes the gradient of the cross-entropy from the lse (log-sum-exp) of each row, which an
// earlier pass has stored. The second rescales a gradient. `parts` blocks process each row. Each vector is read and
// written once.
#include "cross_entropy.cuh"

// Write the gradient of scale[i * scale_stride] times the loss of each row i. lses: from cross_entropy_losses.
// gradient: `logits` itself, or an array with the same row stride and the same alignment to 16 bytes.
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

// Multiply each row i of a gradient by wanted[i * wanted_stride] / used[i * used_stride]. The row was computed with the
// factor `used`; this replaces the factor by `wanted`. If the two are equal (the usual case) or `used` is 0, the row is
// not accessed.
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
