/* The blocks that gradients travel in: FP32 to FP8 bytes with E8M0 scales, and back.
 *
 * Bit-equal to the plain PyTorch path of exchange_casts.py; the tests compare them.
 */
#include "casts.h"

/* One block at scale: codes, squared error and squared norm in scaled units. */
static inline __attribute__((always_inline)) void block_chunk(
    const float *restrict x, int n, float scale, const format f, uint8_t *restrict code,
    float *err, float *norm)
{
    const uint32_t least = bits_of(f.min_normal), drop = 23 - f.mantissa, places = drop << 23;
    const float magic = float_of(least - (f.mantissa << 23) + (23u << 23));
    float e = 0.0f, s = 0.0f;
#pragma omp simd reduction(+ : e, s)
    for (int i = 0; i < n; i++) {
        uint32_t u = bits_of(x[i]);
        float p = float_of(u & 0x7fffffffu) * scale;
        uint32_t exponent = bits_of(p) & 0x7f800000u;
        exponent = exponent > least ? exponent : least;
        float round = float_of(exponent + places);
        float v = (p + round) - round;
        v = v > f.max ? f.max : v;
        uint32_t subnormal = bits_of(v + magic) - bits_of(magic);
        uint32_t c = v < f.min_normal ? subnormal : (bits_of(v) >> drop) - f.rebias;
        code[i] = (uint8_t)(c | u >> 31 << 7);
        e += (v - p) * (v - p);
        s += p * p;
    }
    *err = e;
    *norm = s;
}

/* Blocks of the gradient exchange: see block_quantize in exchange_casts.py. n values of x
 * fill the first of nblocks blocks, zeros the rest; error[0] and error[1] grow by the squared
 * rounding error and the squared norm of the finite blocks. A block's scale byte is the
 * exponent of its scale_inv, rounded up, 255 for NaN. */
void octavo_block_quantize(const float *restrict x, int64_t n, int64_t nblocks, int32_t block,
                           int32_t e5m2, uint8_t *restrict payload, uint8_t *restrict scales,
                           double *restrict error)
{
    const format f = e5m2 ? E5M2 : E4M3;
    for (int64_t b = 0; b < nblocks; b++) {
        const int64_t left = n - b * block;
        const int m = left <= 0 ? 0 : left < block ? (int)left : block;
        const float *restrict in = x + b * block;
        uint8_t *restrict code = payload + b * block;
        uint32_t amax = 0;
        for (int i = 0; i < m; i++) {
            uint32_t magnitude = bits_of(in[i]) & 0x7fffffffu;
            amax = magnitude > amax ? magnitude : amax;
        }
        if (amax >= 0x7f800000u) {
            memset(code, 0, block);
            scales[b] = 255;
            continue;
        }
        const uint32_t e = (bits_of(float_of(amax) / f.max) + 0x7fffffu) >> 23;
        const float scale = float_of((254u - e) << 23);
        float err = 0.0f, norm = 0.0f;
        if (e5m2) block_chunk(in, m, scale, E5M2, code, &err, &norm);
        else block_chunk(in, m, scale, E4M3, code, &err, &norm);
        memset(code + m, 0, block - m);
        scales[b] = (uint8_t)e;
        /* Of the exponent 0 nothing comes back: 2^-135 and less, which no statistic counts. */
        const double inverse = e ? ldexp(1.0, (int)e - 127) : 0.0;
        error[0] += err * inverse * inverse;
        error[1] += norm * inverse * inverse;
    }
}

/* The values of n elements of blocks, or, with `add`, added to what `out` holds. */
void octavo_block_dequantize(const uint8_t *restrict payload, const uint8_t *restrict scales,
                             int64_t n, int32_t block, int32_t e5m2, int32_t add,
                             float *restrict out)
{
    for (int64_t b = 0; b * block < n; b++) {
        const int64_t left = n - b * block;
        const int m = left < block ? (int)left : block;
        const uint32_t e = scales[b];
        /* The exponent 0 stands for blocks of zeros; 255 is NaN, whatever the payload. */
        const float inverse = float_of(e == 255 ? 0x7fc00000u : e << 23);
        const float mend = e5m2 ? 0x1p112f : 0x1p120f;
        const int shift = e5m2 ? 21 : 20;
        const uint8_t *restrict code = payload + b * block;
        float *restrict to = out + b * block;
        for (int i = 0; i < m; i++) {
            uint32_t c = code[i];
            float magnitude = float_of((c & 0x7fu) << shift) * mend;
            float v = float_of(bits_of(magnitude) | (c >> 7 << 31)) * inverse;
            to[i] = add ? to[i] + v : v;
        }
    }
}
