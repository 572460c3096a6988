/* What the casts share: the formats, an operand's slot, the counting of values.
 *
 * Plain C with the compiler's own vectorization: no intrinsics, no torch headers, so one call of
 * cc builds all of it in two seconds. Never build it with -ffast-math: NaN must survive.
 */
#ifndef OCTAVO_CASTS_H
#define OCTAVO_CASTS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define CHUNK 4096 /* elements a pass: they stay in the first-level cache between passes */

static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

typedef struct {
    float max;
    float overflow; /* the least magnitude that rounds beyond max: see formats.py */
    float min_normal;
    uint32_t mantissa; /* bits */
    uint32_t rebias;   /* difference of the exponent biases, in units of the code */
} format;
static const format E4M3 = {448.0f, 0x1.d00002p8f, 0x1p-6f, 3, (127 - 7) << 3};
static const format E5M2 = {57344.0f, 61440.0f, 0x1p-14f, 2, (127 - 15) << 2};

/* Largest magnitude, as the upper half of its FP32 bits: a NaN is the largest. */
static inline uint32_t largest(const uint16_t *x, int64_t n)
{
    uint16_t amax = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t magnitude = x[i] & 0x7fffu;
        amax = magnitude > amax ? magnitude : amax;
    }
    return (uint32_t)amax << 16;
}

/* Values other than 0 that became 0, of n <= CHUNK. */
static inline int vanished(const uint16_t *restrict x, const uint16_t *restrict value, int n)
{
    uint16_t count = 0;
    for (int i = 0; i < n; i++)
        count += (uint16_t)((value[i] & 0x7fffu) == 0) & (uint16_t)((x[i] & 0x7fffu) != 0);
    return count;
}

static inline int64_t nonfinite(const uint16_t *x, int64_t n)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += (x[i] & 0x7f80u) == 0x7f80u;
    return count;
}

static inline int64_t saturated(const uint16_t *x, int n, float scale, float overflow)
{
    int64_t count = 0;
    for (int i = 0; i < n; i++) {
        uint32_t magnitude = (uint32_t)(x[i] & 0x7fffu) << 16;
        count += magnitude < 0x7f800000u && float_of(magnitude) * scale >= overflow;
    }
    return count;
}

/* Current scaling: see amax_to_scale in scaling.py. */
static inline float current_scale(float amax, float fp8_max, float epsilon, int power_of_two)
{
    if (amax < epsilon) amax = epsilon;
    if (!(amax > 0.0f) || isinf(amax)) return 1.0f;
    float scale = fp8_max / amax;
    if (isinf(scale)) scale = 0x1.fep127f; /* BF16's maximum */
    return power_of_two ? float_of(bits_of(scale) & 0x7f800000u) : scale;
}

/* One operand of one linear: see Quantizer in quantizers.py. The pointers are into packed tensors.
 * amax holds the bits of a non-negative float: as integers they order the same way, with
 * NaN above infinity, so a NaN is kept. */
typedef struct {
    float *scale;
    uint32_t *amax;
    int64_t *counters; /* saturated, underflowed, nonfinite, count */
    double *energies;  /* of the values, and of what rounding took away; NULL: not asked for */
    int32_t e5m2, current, power_of_two;
    int32_t counting; /* counters and energies are kept; amax always is */
    float epsilon;
} slot;

/* Energies of n values and of their rounding errors; values that aren't finite have none. */
static inline void measure_error(const slot *to, const uint16_t *x, const uint16_t *value,
                                 int n, float scale_inv)
{
    double signal = 0.0, noise = 0.0;
#pragma omp simd reduction(+ : signal, noise)
    for (int i = 0; i < n; i++) {
        const int finite = (x[i] & 0x7f80u) != 0x7f80u;
        const double a = finite ? float_of((uint32_t)x[i] << 16) : 0.0f;
        const double b = finite ? float_of((uint32_t)value[i] << 16) * scale_inv : 0.0f;
        signal += a * a;
        noise += (a - b) * (a - b);
    }
    to->energies[0] += signal;
    to->energies[1] += noise;
}

#endif
