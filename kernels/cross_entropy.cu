// Cross-entropy over rows of logits: the losses and, optionally in the same launch, the gradient, which overwrites the
// logits.
//
// One block, or one cluster of blocks, processes a row. Each thread copies its vectors into shared memory and, as they
// arrive, sums exp(z) with a running maximum. After the sums of all threads are combined, it computes the gradient from
// the copy in shared memory. So each logit is read once and written once. Shared memory has room for `stage` vectors
// per block; further vectors are read from global memory a second time.
//
// Macros: those of cross_entropy.cuh, and CLUSTER, the blocks per row: 1, 2, 4 or 8 (more than 1 needs sm_90).
#include "cross_entropy.cuh"

constexpr int DEPTH = 4;     // pending groups of copies per thread
constexpr int SCRATCH = 40;  // 16-byte vectors before the copied logits: 4 floats for each of 32 warps and 8 blocks
constexpr float FLOOR =
    -2.0e38f;  // initial value of the running maximum: finite, so that logits of -inf never give inf - inf
#define INFINITE __uint_as_float(0x7f800000u)

struct Statistics {
    float top, sum, logits;
};  // maximum of z, sum of exp(z - top), and sum of w z for label smoothing

__device__ __forceinline__ Statistics combine(const Statistics& a, const Statistics& b) {
    float top = fmaxf(a.top, b.top);
    return {top, a.sum * exp2_approx((a.top - top) * LOG2E) + b.sum * exp2_approx((b.top - top) * LOG2E),
            a.logits + b.logits};
}

// Add vector v of the row, whose logits are `raw`, to this thread's statistics.
__device__ __forceinline__ void add_vector(Statistics& s, const Formula& f, const Row& row, int v,
                                           uint4 raw) {
    float z[COUNT];
    Wide<ELEMENT>::unpack(raw, z);
    int first = v * COUNT - row.lead;
    float top = -INFINITE;
#pragma unroll
    for (int k = 0; k < COUNT; k++) z[k] = f.capped(z[k]);
    if (row.edge(v)) {
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (first + k < 0 || first + k >= f.classes) z[k] = -INFINITE;
    }
#pragma unroll
    for (int k = 0; k < COUNT; k++) top = fmaxf(top, z[k]);
    if (top > s.top) {
        s.sum *= exp2_approx((s.top - top) * LOG2E);
        s.top = top;
    }
    float offset = -s.top * LOG2E, sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < COUNT; k++) sums[k & 1] += exp2_approx(fmaf(z[k], LOG2E, offset));
    s.sum += sums[0] + sums[1];
    if (GENERAL && f.smoothing > 0.0f) {
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (first + k >= 0 && first + k < f.classes)
                s.logits = fmaf(class_weight_of(f.weight, first + k), z[k], s.logits);
    }
}

__device__ __forceinline__ Statistics warp_combine(Statistics s) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        Statistics other = {__shfl_xor_sync(0xffffffffu, s.top, offset),
                            __shfl_xor_sync(0xffffffffu, s.sum, offset),
                            __shfl_xor_sync(0xffffffffu, s.logits, offset)};
        s = combine(s, other);
    }
    return s;
}

// Combine the statistics of all threads, and return those of the full row in every thread of the cluster. The caller
// must have called cluster_arrive once, so that no block writes to the shared memory of a block that has not started.
__device__ __forceinline__ Statistics row_combine(Statistics s, int rank) {
    float* of_warps = (float*)shared_memory();
    float* of_blocks = of_warps + 128;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    s = warp_combine(s);
    if (lane == 0)
        of_warps[4 * warp] = s.top, of_warps[4 * warp + 1] = s.sum, of_warps[4 * warp + 2] = s.logits;
    __syncthreads();
    Statistics mine = {FLOOR, 0.0f, 0.0f};
    if (lane < blockDim.x / 32) mine = {of_warps[4 * lane], of_warps[4 * lane + 1], of_warps[4 * lane + 2]};
    s = warp_combine(mine);
    if (CLUSTER == 1) return s;
    cluster_wait();
    if (threadIdx.x < CLUSTER) {
        store_remote(of_blocks + 4 * rank, threadIdx.x, s.top);
        store_remote(of_blocks + 4 * rank + 1, threadIdx.x, s.sum);
        store_remote(of_blocks + 4 * rank + 2, threadIdx.x, s.logits);
    }
    cluster_arrive();
    cluster_wait();
    s = {of_blocks[0], of_blocks[1], of_blocks[2]};
    for (int b = 1; b < CLUSTER; b++)
        s = combine(s, {of_blocks[4 * b], of_blocks[4 * b + 1], of_blocks[4 * b + 2]});
    return s;
}

// Return the statistics of this thread's vectors among vectors begin .. end of the row. The threads together also copy
// the first `staged` of these vectors to shared memory.
__device__ __forceinline__ Statistics read_row(const Formula& f, const Row& row, int begin, int staged,
                                               int end) {
    uint4* stage = shared_memory() + SCRATCH;
    const uint4* source = row.vectors + begin;
    int step = blockDim.x, copied = threadIdx.x;
    Statistics s = {FLOOR, 0.0f, 0.0f};
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
#pragma unroll
        for (int k = 0; k < GROUP; k++, copied += step)
            if (copied < staged) copy_async(stage + copied, source + copied);
        commit_copies();
    }
    for (int at = threadIdx.x; at < staged;) {
        wait_copies<DEPTH - 1>();
#pragma unroll
        for (int k = 0; k < GROUP; k++, at += step)
            if (at < staged) add_vector(s, f, row, begin + at, stage[at]);
#pragma unroll
        for (int k = 0; k < GROUP; k++, copied += step)
            if (copied < staged) copy_async(stage + copied, source + copied);
        commit_copies();
    }
    for (int at = begin + staged + threadIdx.x; at < end; at += GROUP * step) {
        uint4 raw[GROUP];
#pragma unroll
        for (int k = 0; k < GROUP; k++)
            if (at + k * step < end) raw[k] = row.vectors[at + k * step];
#pragma unroll
        for (int k = 0; k < GROUP; k++)
            if (at + k * step < end) add_vector(s, f, row, at + k * step, raw[k]);
    }
    return s;
}

__device__ __forceinline__ float row_loss(const Formula& f, const Statistics& s, float target_logit,
                                          int target, float lse) {
    float loss = f.hit(target) * (logf(s.sum) + (s.top - target_logit)) + f.z_loss * lse * lse;
    if (GENERAL && f.smoothing > 0.0f)
        loss += f.smooth() * (class_weight_sum(f.weight_sum, f.classes) * lse - s.logits);
    return loss;
}

template <bool GRADIENT>
__device__ __forceinline__ void cross_entropy_row(const Formula& f, ELEMENT* logits, long long row_stride,
                                                  const long long* targets, long long ignore_index, int stage,
                                                  const float* scale, int scale_stride, float* losses,
                                                  float* lses) {
    int rank = blockIdx.x % CLUSTER;
    long long i = blockIdx.x / CLUSTER, target = targets[i];
    Row row(logits + i * row_stride, f.classes);
    int share = (row.count + CLUSTER - 1) / CLUSTER;
    int begin = min(rank * share, row.count), end = min(begin + share, row.count),
        staged = min(stage, end - begin);
    bool writer = rank == 0 && threadIdx.x == 0;
    // All blocks of a cluster process the same row, so either all of them return here or none.
    if (target < 0 || target >= f.classes || target == ignore_index) {
        if (GRADIENT) write_zeros(row, begin, end, f.classes);
        if (writer) losses[i] = target == ignore_index ? 0.0f : __uint_as_float(0x7fc00000u), lses[i] = 0.0f;
        return;
    }
    cluster_arrive();
    float target_logit =
        writer ? f.capped(to_float(row.logits[target])) : 0.0f;  // read before the gradient overwrites the logits
    Statistics s = row_combine(read_row(f, row, begin, staged, end), rank);
    float lse = s.top + logf(s.sum);
    if (writer) losses[i] = row_loss(f, s, target_logit, (int)target, lse), lses[i] = lse;
    if (!GRADIENT) return;
    float factor = scale[i * scale_stride];
    Slope slope = {-s.top * LOG2E, f.all((int)target, lse) * factor / s.sum, f.smooth() * factor,
                   f.hit((int)target) * factor};
    const uint4* staged_vectors = shared_memory() + SCRATCH;
    for (int at = threadIdx.x; at < staged; at += blockDim.x)
        write_vector(slope, f, row, begin + at, staged_vectors[at], (int)target);
    for (int v = begin + staged + threadIdx.x; v < end; v += blockDim.x)
        write_vector(slope, f, row, v, row.vectors[v], (int)target);
}

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

// Write the loss and the log-sum-exp of each row i to losses[i] and lses[i]. If the row's target is ignored, both are
// 0; if it is out of range, they are NaN and 0. CLUSTER blocks process each row.
extern "C" __global__ CLUSTERED void cross_entropy_losses(const ELEMENT* logits, long long row_stride,
                                                          int classes, const long long* targets,
                                                          long long ignore_index, float smoothing,
                                                          float z_loss, float cap, const WEIGHT* weight,
                                                          const WEIGHT* weight_sum, int stage, float* losses,
                                                          float* lses) {
    Formula f = {smoothing, z_loss, cap, classes, weight, weight_sum};
    cross_entropy_row<false>(f, (ELEMENT*)logits, row_stride, targets, ignore_index, stage, nullptr, 0,
                             losses, lses);
}

// Do the same as cross_entropy_losses, and overwrite the logits with the gradient of scale[i * scale_stride] *
// losses[i]. It is 0 for rows whose target is ignored or out of range.
extern "C" __global__ CLUSTERED void cross_entropy_fused(ELEMENT* logits, long long row_stride, int classes,
                                                         const long long* targets, long long ignore_index,
                                                         float smoothing, float z_loss, float cap,
                                                         const WEIGHT* weight, const WEIGHT* weight_sum,
                                                         int stage, const float* scale, int scale_stride,
                                                         float* losses, float* lses) {
    Formula f = {smoothing, z_loss, cap, classes, weight, weight_sum};
    cross_entropy_row<true>(f, logits, row_stride, targets, ignore_index, stage, scale, scale_stride, losses,
                            lses);
}
