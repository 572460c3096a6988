/* FP8 casts of BF16 tensors on CPU, one pass each: round, count, observe, upcast.
 *
 * Bit-equal to the plain PyTorch path (formats.py, scaling.py); the tests compare them.
 * Plain C with the compiler's own vectorization: no intrinsics, no torch headers, so one
 * call of cc builds it in a second. Never build it with -ffast-math: NaN must survive.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define CHUNK 4096 /* elements between additions to the 64-bit counters */

static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

/* The shape of a format: mantissa bits dropped from FP32, exponent bias, and the constant
 * whose last place is the least subnormal, so that adding it rounds a subnormal to even. */
typedef struct { float max, overflow, min_normal, magic; uint32_t drop, rebias; } format;
static const format E4M3 = {448.0f, 464.0f, 0x1p-6f, 0x1p14f, 20, (127 - 7) << 3};
static const format E5M2 = {57344.0f, 61440.0f, 0x1p-14f, 0x1p7f, 21, (127 - 15) << 2};

typedef struct { uint32_t amax, saturated, underflowed, nonfinite; } seen;

/* Quantize n <= CHUNK elements. `code` (FP8 bytes) and `value` (their BF16 values) are
 * scratch or the caller's; both are written. */
static inline __attribute__((always_inline)) seen quantize_chunk(
    const uint16_t *restrict x, int n, float scale, const format f,
    uint8_t *restrict code, uint16_t *restrict value)
{
    uint32_t amax = 0, saturated = 0, underflowed = 0, nonfinite = 0;
    const uint32_t half = (1u << (f.drop - 1)) - 1;
    for (int i = 0; i < n; i++) {
        uint32_t u = (uint32_t)x[i] << 16;
        uint32_t magnitude = u & 0x7fffffffu;
        uint32_t sign = u >> 31;
        float scaled = float_of(magnitude) * scale;
        float p = scaled > f.max ? f.max : scaled;
        uint32_t b = bits_of(p);
        uint32_t normal = (b + half + ((b >> f.drop) & 1u)) >> f.drop;
        float shifted = p + f.magic;
        uint32_t subnormal = bits_of(shifted) - bits_of(f.magic);
        uint32_t small = p < f.min_normal;
        uint32_t nan = b > 0x7f800000u;
        uint32_t c = small ? subnormal : normal - f.rebias;
        uint32_t v = small ? bits_of(shifted - f.magic) >> 16 : normal << (f.drop - 16);
        c = nan ? 0x7fu : c;
        v = nan ? 0x7fc0u : v;
        code[i] = (uint8_t)(c | sign << 7);
        value[i] = (uint16_t)(v | sign << 15);
        uint32_t finite = magnitude < 0x7f800000u;
        amax = magnitude > amax ? magnitude : amax;
        nonfinite += 1u - finite;
        saturated += finite & (uint32_t)(scaled > f.overflow);
        underflowed += (uint32_t)(magnitude != 0) & (uint32_t)(c == 0);
    }
    return (seen){amax, saturated, underflowed, nonfinite};
}

static seen quantize_e4m3(const uint16_t *x, int n, float scale, uint8_t *c, uint16_t *v)
{ return quantize_chunk(x, n, scale, E4M3, c, v); }
static seen quantize_e5m2(const uint16_t *x, int n, float scale, uint8_t *c, uint16_t *v)
{ return quantize_chunk(x, n, scale, E5M2, c, v); }

static uint32_t largest(const uint16_t *x, int64_t n)
{
    uint16_t amax = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t magnitude = x[i] & 0x7fffu;
        amax = magnitude > amax ? magnitude : amax;
    }
    return (uint32_t)amax << 16;
}

/* Current scaling: see amax_to_scale in scaling.py. */
static float current_scale(float amax, float fp8_max, float epsilon, int power_of_two)
{
    if (amax < epsilon) amax = epsilon;
    if (!(amax > 0.0f) || isinf(amax)) return 1.0f;
    float scale = fp8_max / amax;
    if (isinf(scale)) scale = 0x1.fep127f; /* BF16's maximum */
    return power_of_two ? float_of(bits_of(scale) & 0x7f800000u) : scale;
}

/* amax holds the bits of a non-negative float: as integers they order the same way, with
 * NaN above infinity, so a NaN is kept. counters: saturated, underflowed, nonfinite, count.
 * `payload` may be NULL. With `current` the scale is computed here and left in *scale; with
 * delayed scaling it is read there. *scale_inv is written either way. */
void octavo_quantize(const uint16_t *x, int64_t n, int e5m2, int current, float epsilon,
                     int power_of_two, float *scale, float *scale_inv, uint32_t *amax,
                     int64_t *counters, uint8_t *payload, uint16_t *values)
{
    uint8_t scratch[CHUNK];
    if (current)
        *scale = current_scale(float_of(largest(x, n)), e5m2 ? E5M2.max : E4M3.max, epsilon,
                               power_of_two);
    *scale_inv = 1.0f / *scale;
    for (int64_t at = 0; at < n; at += CHUNK) {
        int m = n - at < CHUNK ? (int)(n - at) : CHUNK;
        uint8_t *code = payload ? payload + at : scratch;
        seen s = e5m2 ? quantize_e5m2(x + at, m, *scale, code, values + at)
                      : quantize_e4m3(x + at, m, *scale, code, values + at);
        *amax = s.amax > *amax ? s.amax : *amax;
        counters[0] += s.saturated;
        counters[1] += s.underflowed;
        counters[2] += s.nonfinite;
    }
    counters[3] += n;
}

/* Amax and non-finite values of a tensor that isn't quantized. */
void octavo_observe(const uint16_t *x, int64_t n, uint32_t *amax, int64_t *counters)
{
    uint32_t seen_amax = largest(x, n);
    *amax = seen_amax > *amax ? seen_amax : *amax;
    if (seen_amax >= 0x7f800000u) {
        int64_t nonfinite = 0;
        for (int64_t i = 0; i < n; i++) nonfinite += (x[i] & 0x7f80u) == 0x7f80u;
        counters[2] += nonfinite;
    }
    counters[3] += n;
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
