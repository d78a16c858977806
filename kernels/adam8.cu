// AdamW over a flat range by the formula in adam.cu, with moments in 8 bits. The formats are those of
// engine/ops/eight_bits.py: a byte for each m and each square root of v, and for each block of 32 elements an exponent. An update rounds both stochastically.
//
// Macros: as in adam.cu, without EXP_AVG. Masters that are residuals have no tie flags.
//
// Bytes per element, with a bf16 gradient, weight and residual: 8.06 read and 6.06 written. Four elements a thread, so
// that eight threads share a block; the other half of the time goes into arithmetic, hence the approximate root and
// quotient, whose errors of 2^-22 are far below those of the formats.
#include "adam.cuh"

constexpr int M_FRACTION = 4, ROOT_FRACTION = 5;
constexpr float SHIFT = 0x1p120f;  // see `_SHIFT` in engine/ops/eight_bits.py

// The code of a magnitude. inverse: 2^-E of its block. random: the bits to add before the lower ones are cut off.
template <int FRACTION> __device__ __forceinline__ unsigned encode(float magnitude, float inverse, unsigned random) {
    unsigned code = (__float_as_uint(magnitude * inverse * (1.0f / SHIFT)) + random) >> (23 - FRACTION);
    return min(code, (8u << FRACTION) - 1);
}
// The magnitude of a code. scale: 2^E.
template <int FRACTION> __device__ __forceinline__ float decode(unsigned code, float scale) {
    return __uint_as_float(code << (23 - FRACTION)) * SHIFT * scale;
}

// The exponent of a block, of which eight adjacent threads pass magnitudes: that of the largest, or the next one if the
// largest is above the last number but one of its power of two.
template <int FRACTION> __device__ __forceinline__ unsigned shared_exponent(unsigned bits) {
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, offset));
    return min((bits + (2u << (23 - FRACTION)) - 1) >> 23, 255u);
}
__device__ __forceinline__ float inverse_of(unsigned exponent) {  // of 2^E, 0 if E is 128: inf or NaN
    return __uint_as_float((254u - min(exponent, 254u)) << 23);
}

// A residual without a tie flag must not be that of a tie that is rounded down: move it by the last bit.
template <typename M> __device__ __forceinline__ float off_tie(float p, const M*) { return p; }
__device__ __forceinline__ float off_tie(float p, const short*) {
    unsigned u = __float_as_uint(p);
    return __uint_as_float(u - ((u & 0x1ffffu) == 0x8000u));
}

// Update n elements. aligned: whether all arrays of n elements are aligned to four. index_base: the number of element 0
// in the whole model, for the random bits.
extern "C" __global__ __launch_bounds__(256) void adam8_update(
    const GRAD* __restrict__ grad, MASTER* __restrict__ master, unsigned char* __restrict__ exp_avg,
    unsigned char* __restrict__ exp_avg_exponents, unsigned char* __restrict__ exp_avg_sq,
    unsigned char* __restrict__ exp_avg_sq_exponents, WEIGHT* __restrict__ weight, long long n, int aligned,
    long long index_base, const float* __restrict__ record) {
    const Record r = *(const Record*)record;
    if (r.skip != 0.0f) return;
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x, first = 4 * thread, block = thread / 8;
    int inside = (int)max(0ll, min(4ll, n - first));  // how many of this thread's elements there are
    bool wide = aligned && inside == 4;
    float g[4] = {}, p[4] = {}, m[4] = {}, v[4] = {}, no_ties[4] = {};
    unsigned m_codes = 0, root_codes = 0;
    if (wide) {
        load4(grad, thread, g);
        load_master4(master, weight, thread, p, no_ties);
        m_codes = load_once((const unsigned*)exp_avg + thread);
        root_codes = load_once((const unsigned*)exp_avg_sq + thread);
    } else {
        for (int k = 0; k < inside; k++) {
            g[k] = to_float(grad[first + k]), p[k] = load_master(master + first + k, weight + first + k, no_ties[k]);
            m_codes |= (unsigned)exp_avg[first + k] << 8 * k, root_codes |= (unsigned)exp_avg_sq[first + k] << 8 * k;
        }
    }
    float m_scale = 0, root_scale = 0;
    if (inside > 0) {
        m_scale = __uint_as_float((unsigned)exp_avg_exponents[block] << 23);
        root_scale = __uint_as_float((unsigned)exp_avg_sq_exponents[block] << 23);
    }
    unsigned m_largest = 0, root_largest = 0;
    float root[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned code = m_codes >> 8 * k & 255u;
        m[k] = decode<M_FRACTION>(code & 127u, m_scale);
        m[k] = code & 128u ? -m[k] : m[k];
        root[k] = decode<ROOT_FRACTION>(root_codes >> 8 * k & 255u, root_scale);
        v[k] = root[k] * root[k];
        average(r, g[k], p[k], m[k], v[k]);
        root[k] = sqrt_approx(v[k]);
        p[k] = off_tie(p[k] * r.decay - __fdividef(r.step_size * m[k], fmaf(root[k], r.inverse_root, r.eps)), master);
        if (k < inside) {
            m_largest = max(m_largest, __float_as_uint(m[k]) & 0x7fffffffu);
            root_largest = max(root_largest, __float_as_uint(root[k]));
        }
    }
    unsigned m_exponent = shared_exponent<M_FRACTION>(m_largest);
    unsigned root_exponent = shared_exponent<ROOT_FRACTION>(root_largest & 0x7fffffffu);
    float m_inverse = inverse_of(m_exponent), root_inverse = inverse_of(root_exponent);
    m_codes = root_codes = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned random = random_bits(index_base + first + k, r.seed);
        unsigned code = encode<M_FRACTION>(fabsf(m[k]), m_inverse, (random & 0xffffu) << (7 - M_FRACTION));
        m_codes |= (code | (__float_as_uint(m[k]) >> 31) << 7) << 8 * k;
        code = encode<ROOT_FRACTION>(root[k], root_inverse, (random >> 16) << (7 - ROOT_FRACTION));
        root_codes |= max(code, root[k] > 0.0f ? 1u : 0u) << 8 * k;
    }
    if (wide) {
        store_master4(master, weight, thread, p, no_ties);
        store_once((unsigned*)exp_avg + thread, m_codes);
        store_once((unsigned*)exp_avg_sq + thread, root_codes);
    } else {
        for (int k = 0; k < inside; k++) {
            store_master(master + first + k, weight + first + k, p[k], no_ties[k]);
            exp_avg[first + k] = m_codes >> 8 * k, exp_avg_sq[first + k] = root_codes >> 8 * k;
        }
    }
    if (thread % 8 == 0 && inside > 0) {
        exp_avg_exponents[block] = m_exponent;
        exp_avg_sq_exponents[block] = root_exponent;
    }
}
