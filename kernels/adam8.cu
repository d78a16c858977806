// AdamW over a flat range by the formula in adam.cu, with moments in 8 bits. The formats are those of
// engine/ops/eight_bits.py: a byte (the code) for each m and each square root of v, and for each of the two an exponent
// per block of 32 elements. An update rounds both stochastically.
//
// Macros: as in adam.cu, without EXP_AVG. Masters that are stored as residuals have no tie flags.
//
// Memory traffic per element, with a bf16 gradient, weight and residual: 8.06 bytes read and 6.06 written. In the time
// that this takes, a GPU executes only about a hundred instructions per element, where an integer instruction counts
// twice. So the number of instructions limits the speed of this kernel. To save instructions:
//   - Each thread updates eight elements, so that four threads share a block of 32.
//   - Codes are unpacked and packed in pairs.
//   - One test for all eight elements finds rare cases: ties, NaN, weights that other code has changed, huge moments.
//   - Square root, reciprocal and quotient are approximate. Their errors, 2^-22, are far below those of the formats. A
//     v below 2^-126 counts as 0.
// A thread starts all loads before it waits for the first: otherwise, the test for weights that other code has changed
// would delay the loads after it.
#include "adam.cuh"

constexpr int M_FRACTION = 4, ROOT_FRACTION = 5, COUNT = 8;

// ---- eight masters ---------------------------------------------------------------------------------------

template <typename T> struct Eight {  // eight elements as they are loaded
    static constexpr int count = sizeof(T) * COUNT / 16;
    uint4 words[count];
    __device__ __forceinline__ void load(const T* p, long long i) {
#pragma unroll
        for (int k = 0; k < count; k++) words[k] = load_now((const uint4*)p + count * i + k, count == 1);
    }
    __device__ __forceinline__ void unpack(float* y) const {
#pragma unroll
        for (int k = 0; k < count; k++) Wide<T>::unpack(words[k], y + COUNT / count * k);
    }
};
template <typename T> __device__ __forceinline__ void store8(T* p, long long i, const float* x) {
    constexpr int count = Wide<T>::count, stores = COUNT / count;
#pragma unroll
    for (int k = 0; k < stores; k++) store_once((uint4*)p + stores * i + k, Wide<T>::pack(x + count * k));
}
__device__ __forceinline__ void store8(none*, long long, const float*) {}

// Eight masters in the form in which they are stored: float32 masters, or weights and residuals.
template <typename M, typename W> struct Masters {
    Eight<M> stored;
    __device__ __forceinline__ void load(const M* p, const W*, long long i) { stored.load(p, i); }
    __device__ __forceinline__ void unpack(float* y) const { stored.unpack(y); }
};
template <> struct Masters<short, bf16> {
    Eight<short> residuals;
    Eight<bf16> weights;
    __device__ __forceinline__ void load(const short* p, const bf16* weight, long long i) {
        residuals.load(p, i), weights.load(weight, i);
    }
    __device__ __forceinline__ void unpack(float* y) const {
        const uint4 residual = residuals.words[0], w = weights.words[0];
        const unsigned r[4] = {residual.x, residual.y, residual.z, residual.w}, words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            y[2 * k] = __uint_as_float((words[k] << 16) + (unsigned)(int)(short)r[k]);
            y[2 * k + 1] = __uint_as_float((words[k] & 0xffff0000u) + (unsigned)((int)r[k] >> 16));
        }
        uint4 rounded = Wide<bf16>::pack(y);
        if ((rounded.x ^ w.x) | (rounded.y ^ w.y) | (rounded.z ^ w.z) | (rounded.w ^ w.w)) {
#pragma unroll
            for (int k = 0; k < COUNT; k++) {  // a weight that other code has changed becomes the master
                bf16 own = as_bf16(words[k / 2] >> 16 * (k % 2)), found;
                from_float(y[k], found);
                y[k] = found.bits == own.bits ? y[k] : to_float(own);
            }
        }
    }
};

// A master halfway between two weights (a tie) that is rounded down has the residual 32768, which needs a tie flag.
// There are no tie flags here, so move such a master by its last bit towards the weight.
__device__ __forceinline__ void off_ties(float*, const float*) {}
__device__ __forceinline__ void off_ties(float* p, const short*) {
    unsigned nearest = 1;
#pragma unroll
    for (int k = 0; k < COUNT; k++) nearest = min(nearest, (__float_as_uint(p[k]) & 0x1ffffu) ^ 0x8000u);
    if (nearest == 0) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            unsigned u = __float_as_uint(p[k]);
            p[k] = __uint_as_float(u - ((u & 0x1ffffu) == 0x8000u));
        }
    }
}

template <typename W>
__device__ __forceinline__ void store_master8(float* p, W* weight, long long i, const float* x) {
    store8(p, i, x);
    store8(weight, i, x);
}
__device__ __forceinline__ void store_master8(short* p, bf16* weight, long long i, const float* x) {
    unsigned r[4];  // after off_ties, the lower 16 bits of a master are its residual
    bool numbers = true;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        r[k] = __byte_perm(__float_as_uint(x[2 * k]), __float_as_uint(x[2 * k + 1]), 0x5410);
        numbers = numbers && (x[2 * k] <= x[2 * k + 1] || x[2 * k] > x[2 * k + 1]);
    }
    if (!numbers) {
#pragma unroll
        for (int k = 0; k < COUNT; k++)  // the residual of NaN is 0
            if (x[k] != x[k]) r[k / 2] &= k % 2 ? 0x0000ffffu : 0xffff0000u;
    }
    store_once((uint4*)p + i, make_uint4(r[0], r[1], r[2], r[3]));
    store_once((uint4*)weight + i, Wide<bf16>::pack(x));
}

// ---- codes -----------------------------------------------------------------------------------------------

// Decode four codes. The caller multiplies the results by 2^(E+8), where E is the block's exponent without float32's
// bias of 127. To decode a code, put its exponent bits into the lower bits of the exponent of an fp16 number, and its
// fraction bits into the upper bits of the fraction. SIGNED: whether the first bit of a code is a sign.
template <int FRACTION, bool SIGNED> __device__ __forceinline__ void decode4(unsigned codes, float* y) {
    constexpr int shift = FRACTION - 2;
    constexpr unsigned half = (SIGNED ? 0x7f00u : 0xff00u) >> shift, mask = half << 16 | half;
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        unsigned bytes = __byte_perm(codes, 0, pair ? 0x3424 : 0x1404), h = bytes >> shift & mask;
        if (SIGNED) h |= bytes & 0x80008000u;
        y[2 * pair] = to_float(fp16{(unsigned short)h});
        y[2 * pair + 1] = to_float(fp16{(unsigned short)(h >> 16)});
    }
}
__device__ __forceinline__ float scale_of(unsigned exponent) {  // 2^(E+8), or inf from E = 120
    return __uint_as_float(min(exponent + 8, 255u) << 23);
}

// Return the exponent (with float32's bias) of a block whose largest magnitude is `largest`. This is the exponent of
// `largest`, or the next one if `largest` exceeds the second largest number that the format has with this exponent.
// The function `encode` in engine/ops/eight_bits.py explains why.
template <int FRACTION> __device__ __forceinline__ unsigned exponent_of(float largest) {
    return min((__float_as_uint(largest) + (2u << (23 - FRACTION)) - 1) >> 23, 255u);
}

// Multiply eight values by 2^(-E-120). The bits of the resulting float then contain the value's code, from bit 25 down:
// the last 3 bits of the exponent and the first bits of the fraction.
__device__ __forceinline__ void shift_to_codes(float* x, unsigned exponent) {
    if (exponent > 133) {  // the factor would be subnormal: multiply in two steps
#pragma unroll
        for (int k = 0; k < COUNT; k++) x[k] *= 0x1p-127f;
        exponent -= 127;
    }
    float factor = __uint_as_float((134 - exponent) << 23);
#pragma unroll
    for (int k = 0; k < COUNT; k++) x[k] *= factor;
}

// Take the codes from the bits of four floats, bits 30 to 26 of which are 0, and pack them into a word.
template <int FRACTION, bool SIGNED> __device__ __forceinline__ unsigned codes_of4(const unsigned* bits) {
    unsigned one = __byte_perm(bits[0], bits[1], 0x7632), two = __byte_perm(bits[2], bits[3], 0x7632);
    unsigned codes = __byte_perm(one >> (7 - FRACTION), two >> (7 - FRACTION), 0x6420);
    return SIGNED ? (codes & 0x7f7f7f7fu) | (__byte_perm(one, two, 0x7531) & 0x80808080u) : codes;
}

// Make one step on n elements. aligned: whether each array of n elements is aligned to 16 bytes, or to 8 elements if
// these take less. index_base: the position of element 0 among all elements of the optimizer, for the random bits.
extern "C" __global__ __launch_bounds__(256) void adam8_update(
    const GRAD* __restrict__ grad, MASTER* __restrict__ master, unsigned char* __restrict__ exp_avg,
    unsigned char* __restrict__ exp_avg_exponents, unsigned char* __restrict__ exp_avg_sq,
    unsigned char* __restrict__ exp_avg_sq_exponents, WEIGHT* __restrict__ weight, long long n, int aligned,
    long long index_base, const float* __restrict__ record) {
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x, first = COUNT * thread, block = first / 32;
    int inside = (int)max(0ll, min((long long)COUNT, n - first));  // the number of this thread's elements that exist
    bool wide = aligned && inside == COUNT;
    float g[COUNT] = {}, p[COUNT] = {};
    unsigned m_codes[2] = {}, root_codes[2] = {}, m_exponent = 0, root_exponent = 0;
    if (inside > 0) {
        m_exponent = load_now(exp_avg_exponents + block), root_exponent = load_now(exp_avg_sq_exponents + block);
    }
    if (wide) {
        Masters<MASTER, WEIGHT> masters;
        Eight<GRAD> grads;
        masters.load(master, weight, thread), grads.load(grad, thread);
        uint2 codes = load_now((const uint2*)exp_avg + thread), roots = load_now((const uint2*)exp_avg_sq + thread);
        masters.unpack(p), grads.unpack(g);
        m_codes[0] = codes.x, m_codes[1] = codes.y, root_codes[0] = roots.x, root_codes[1] = roots.y;
    } else {
        for (int k = 0; k < inside; k++) {
            float no_ties = 0;
            g[k] = to_float(grad[first + k]), p[k] = load_master(master + first + k, weight + first + k, no_ties);
            m_codes[k / 4] |= (unsigned)exp_avg[first + k] << 8 * (k % 4);
            root_codes[k / 4] |= (unsigned)exp_avg_sq[first + k] << 8 * (k % 4);
        }
    }
    const Record r = *(const Record*)record;  // loaded last, so that the other loads do not wait for it
    if (r.skip != 0.0f) return;

    float m[COUNT], root[COUNT], m_largest = 0, m_scale = scale_of(m_exponent), root_scale = scale_of(root_exponent);
    float eps = fmaxf(r.eps, 0x1p-63f);  // SMALLEST_EPS in engine/ops/eight_bits.py
    unsigned root_largest = 0;
    decode4<M_FRACTION, true>(m_codes[0], m), decode4<M_FRACTION, true>(m_codes[1], m + 4);
    decode4<ROOT_FRACTION, false>(root_codes[0], root), decode4<ROOT_FRACTION, false>(root_codes[1], root + 4);
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        m[k] *= m_scale, root[k] *= root_scale;
        float v = root[k] * root[k];
        average(r, g[k], p[k], m[k], v);
        root[k] = sqrt_approx(v);
        p[k] = p[k] * r.decay - r.step_size * m[k] * reciprocal_approx(fmaf(root[k], r.inverse_root, eps));
        m_largest = fmaxf(m_largest, fabsf(m[k]));
        root_largest = max(root_largest, __float_as_uint(root[k]));
    }
    off_ties(p, master);
    if (wide) {
        store_master8(master, weight, thread, p);
    } else {
        for (int k = 0; k < inside; k++) {
            float no_ties = 0;
            store_master(master + first + k, weight + first + k, p[k], no_ties);
        }
    }

    unsigned exponents = exponent_of<M_FRACTION>(m_largest) |
                         exponent_of<ROOT_FRACTION>(__uint_as_float(root_largest & 0x7fffffffu)) << 16;
#pragma unroll
    for (int offset = 1; offset < 32 / COUNT; offset *= 2)
        exponents = __vmaxu2(exponents, __shfl_xor_sync(0xffffffffu, exponents, offset));
    m_exponent = exponents & 0xffffu, root_exponent = exponents >> 16;
    // `present` is the minimum of `root_bits`, so that the code of a root above 0 is at least 1.
    unsigned present[COUNT], m_bits[COUNT], root_bits[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) present[k] = min(__float_as_uint(root[k]), 1u << (23 - ROOT_FRACTION));
    shift_to_codes(m, m_exponent), shift_to_codes(root, root_exponent);
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        unsigned random = random_bits(index_base + first + k, r.seed);
        m_bits[k] = __float_as_uint(m[k]) + ((random & 0xffffu) << (7 - M_FRACTION));
        root_bits[k] = max(__float_as_uint(root[k]) + ((random >> 16) << (7 - ROOT_FRACTION)), present[k]);
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        m_codes[k] = codes_of4<M_FRACTION, true>(m_bits + 4 * k);
        root_codes[k] = codes_of4<ROOT_FRACTION, false>(root_bits + 4 * k);
    }
    if (wide) {
        store_once((uint2*)exp_avg + thread, make_uint2(m_codes[0], m_codes[1]));
        store_once((uint2*)exp_avg_sq + thread, make_uint2(root_codes[0], root_codes[1]));
    } else {
        for (int k = 0; k < inside; k++) {
            exp_avg[first + k] = m_codes[k / 4] >> 8 * (k % 4), exp_avg_sq[first + k] = root_codes[k / 4] >> 8 * (k % 4);
        }
    }
    if (first % 32 == 0 && inside > 0) {
        exp_avg_exponents[block] = m_exponent;
        exp_avg_sq_exponents[block] = root_exponent;
    }
}
