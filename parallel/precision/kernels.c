/* FP8 casts of BF16 tensors with one scale, one pass each: round, count, observe, upcast.
 *
 * Bit-equal to the plain PyTorch path (per_tensor.py); the tests compare them.
 */
#include "casts.h"

/* The BF16 values, and the codes unless NULL, of n <= CHUNK elements.
 *
 * Adding and subtracting a power of two whose last FP32 place is the format's last place at
 * p's magnitude rounds p to even there; below the least normal the place stays put, which
 * makes the subnormals. NaN runs through the arithmetic. */
static inline __attribute__((always_inline)) void quantize_chunk(
    const uint16_t *restrict x, int n, float scale, const format f, int with_code,
    uint8_t *restrict code, uint16_t *restrict value)
{
    const uint32_t least = bits_of(f.min_normal), places = (23 - f.mantissa) << 23;
    const uint32_t drop = 23 - f.mantissa;
    const float step = float_of(least - (f.mantissa << 23)); /* the least subnormal */
    const float magic = float_of(bits_of(step) + (23u << 23));
    for (int i = 0; i < n; i++) {
        uint32_t u = (uint32_t)x[i] << 16;
        float p = float_of(u & 0x7fffffffu) * scale;
        p = p > f.max ? f.max : p;
        uint32_t exponent = bits_of(p) & 0x7f800000u;
        exponent = exponent > least ? exponent : least;
        float round = float_of(exponent + places);
        float v = (p + round) - round;
        value[i] = (uint16_t)((bits_of(v) | (u & 0x80000000u)) >> 16);
        if (with_code) {
            uint32_t subnormal = bits_of(v + magic) - bits_of(magic);
            uint32_t c = v < f.min_normal ? subnormal : (bits_of(v) >> drop) - f.rebias;
            c = bits_of(v) > 0x7f800000u ? 0x7fu : c;
            code[i] = (uint8_t)(c | u >> 31 << 7);
        }
    }
}

static void quantize_e4m3(const uint16_t *x, int n, float s, uint8_t *c, uint16_t *v)
{ if (c) quantize_chunk(x, n, s, E4M3, 1, c, v); else quantize_chunk(x, n, s, E4M3, 0, c, v); }
static void quantize_e5m2(const uint16_t *x, int n, float s, uint8_t *c, uint16_t *v)
{ if (c) quantize_chunk(x, n, s, E5M2, 1, c, v); else quantize_chunk(x, n, s, E5M2, 0, c, v); }

/* `payload` may be NULL. With `current` the scale is computed here and left in the slot; with
 * delayed scaling it is read there. *scale_inv is written either way. */
void octavo_quantize(const slot *to, const uint16_t *x, int64_t n, uint8_t *payload,
                     uint16_t *values, float *scale_inv)
{
    const int e5m2 = to->e5m2;
    const float fp8_max = e5m2 ? E5M2.max : E4M3.max;
    const float overflow = e5m2 ? E5M2.overflow : E4M3.overflow;
    if (to->current && n)
        *to->scale = current_scale(float_of(largest(x, n)), fp8_max, to->epsilon,
                                   to->power_of_two);
    const float s = *to->scale;
    int64_t *counters = to->counters;
    *scale_inv = 1.0f / s;
    for (int64_t at = 0; at < n; at += CHUNK) {
        const int m = n - at < CHUNK ? (int)(n - at) : CHUNK;
        uint8_t *code = payload ? payload + at : NULL;
        (e5m2 ? quantize_e5m2 : quantize_e4m3)(x + at, m, s, code, values + at);
        const uint32_t seen = largest(x + at, m);
        *to->amax = seen > *to->amax ? seen : *to->amax;
        if (!to->counting) continue;
        /* The rare ones are counted only where the largest says that there are some. */
        if (seen >= 0x7f800000u) counters[2] += nonfinite(x + at, m);
        if (!(float_of(seen) * s < overflow)) counters[0] += saturated(x + at, m, s, overflow);
        counters[1] += vanished(x + at, values + at, m);
        if (to->energies) measure_error(to, x + at, values + at, m, *scale_inv);
    }
    if (to->counting) counters[3] += n;
}

/* Amax and non-finite values of a tensor that isn't quantized. */
void octavo_observe(const slot *to, const uint16_t *x, int64_t n)
{
    const uint32_t seen = largest(x, n);
    *to->amax = seen > *to->amax ? seen : *to->amax;
    if (!to->counting) return;
    if (seen >= 0x7f800000u) to->counters[2] += nonfinite(x, n);
    to->counters[3] += n;
}

/* y * (a * b) in FP32, rounded to BF16 to even, in place. */
void octavo_rescale(uint16_t *y, int64_t n, const float *a, const float *b)
{
    const float scale = *a * *b;
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = bits_of(float_of((uint32_t)y[i] << 16) * scale);
        uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
        y[i] = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
}

/* BF16 values of FP8 bytes. Shifting the code into FP32's fields leaves an exponent that
 * is too small by a constant; the multiplication mends it and normalizes subnormals. */
void octavo_upcast(const uint8_t *restrict code, int64_t n, int e5m2, uint16_t *restrict values)
{
    if (e5m2) {
        for (int64_t i = 0; i < n; i++) {
            uint32_t c = code[i] & 0x7fu;
            uint32_t v = bits_of(float_of(c << 21) * 0x1p112f) >> 16;
            v = c == 0x7cu ? 0x7f80u : c > 0x7cu ? 0x7fc0u : v;
            values[i] = (uint16_t)(v | (uint32_t)(code[i] >> 7) << 15);
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            uint32_t c = code[i] & 0x7fu;
            uint32_t v = bits_of(float_of(c << 20) * 0x1p120f) >> 16;
            v = c == 0x7fu ? 0x7fc0u : v;
            values[i] = (uint16_t)(v | (uint32_t)(code[i] >> 7) << 15);
        }
    }
}
