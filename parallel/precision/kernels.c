/* FP8 casts of BF16 tensors on CPU, one pass each: round, count, observe, upcast.
 *
 * Bit-equal to the plain PyTorch path (formats.py, scaling.py); the tests compare them.
 * Plain C with the compiler's own vectorization: no intrinsics, no torch headers, so one
 * call of cc builds it in a second. Never build it with -ffast-math: NaN must survive.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define CHUNK 4096 /* elements a pass: they stay in the first-level cache between passes */

static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

typedef struct {
    float max, overflow, min_normal;
    uint32_t mantissa; /* bits */
    uint32_t rebias;   /* difference of the exponent biases, in units of the code */
} format;
static const format E4M3 = {448.0f, 464.0f, 0x1p-6f, 3, (127 - 7) << 3};
static const format E5M2 = {57344.0f, 61440.0f, 0x1p-14f, 2, (127 - 15) << 2};

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

/* Largest magnitude, as the upper half of its FP32 bits: a NaN is the largest. */
static uint32_t largest(const uint16_t *x, int64_t n)
{
    uint16_t amax = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t magnitude = x[i] & 0x7fffu;
        amax = magnitude > amax ? magnitude : amax;
    }
    return (uint32_t)amax << 16;
}

static int zeros(const uint16_t *x, int n)
{
    uint16_t count = 0; /* CHUNK fits */
    for (int i = 0; i < n; i++) count += (x[i] & 0x7fffu) == 0;
    return count;
}

static int64_t nonfinite(const uint16_t *x, int64_t n)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += (x[i] & 0x7f80u) == 0x7f80u;
    return count;
}

static int64_t saturated(const uint16_t *x, int n, float scale, float overflow)
{
    int64_t count = 0;
    for (int i = 0; i < n; i++) {
        uint32_t magnitude = (uint32_t)(x[i] & 0x7fffu) << 16;
        count += magnitude < 0x7f800000u && float_of(magnitude) * scale > overflow;
    }
    return count;
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

/* One operand of one linear: see TensorSlot. The pointers are into packed tensors.
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
static void measure_error(const slot *to, const uint16_t *x, const uint16_t *value, int n,
                          float scale_inv)
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
        if (!(float_of(seen) * s <= overflow)) counters[0] += saturated(x + at, m, s, overflow);
        counters[1] += zeros(values + at, m) - zeros(x + at, m);
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

/* Blocks: a matrix x [rows, columns] whose elements share power-of-two scales in runs of `block`
 * along its rows (for the product that contracts over columns), along its columns (over rows),
 * or in squares. Each scale is kept as the E8M0 exponent of its inverse. Values come out
 * dequantized, in BF16, which is exact: rounding to a coarser grid than x's own leaves a value
 * of x's grid, and to a finer one nothing. */
enum rule { BLOCK, MX };
#define STRIP 512 /* columns a pass: 128 rows of them stay in the second-level cache */
#define LARGEST_BLOCK 128

typedef struct { float scale, inverse; uint8_t exponent; } block_scale;

/* See amax_to_exponent in scaling.py; amax is the upper half of its FP32 bits. */
static block_scale exact_scale(uint32_t amax, enum rule rule, const format f, float epsilon)
{
    uint32_t e;
    if (rule == BLOCK) {
        e = 254u - (bits_of(current_scale(float_of(amax << 16), f.max, epsilon, 1)) >> 23);
    } else if (amax >= 0x7f80u) {
        e = amax > 0x7f80u ? 255u : 254u;
    } else {
        const uint32_t u = bits_of(float_of(amax << 16) * (1.0f / f.max)), m = u & 0x7fffffu;
        e = u >> 23;
        e += e ? m > 0 : m > 0x400000u;
    }
    block_scale made = {float_of((254u - e) << 23), float_of(e ? e << 23 : 0x400000u), (uint8_t)e};
    if (rule == MX && e == 0) made.scale = 1.0f;
    if (e == 255u) made.scale = made.inverse = float_of(0x7fc00000u);
    return made;
}

/* The same for almost every amax. Both maxima are 1.75 times a power of two, so the exponent of
 * amax / max, rounded up, is amax's less that of max, plus one where its mantissa is above .75;
 * both rules then agree. */
static inline __attribute__((always_inline)) block_scale scale_of(
    uint32_t amax, enum rule rule, const format f, float epsilon)
{
    const uint32_t of_max = (bits_of(f.max) >> 23) - 127u;
    const uint32_t e = ((amax + 31u) >> 7) - of_max;
    if (e - 1u >= 252u - of_max || amax >= 0x7f80u || epsilon > 0.0f)
        return exact_scale(amax, rule, f, epsilon);
    block_scale made = {float_of((254u - e) << 23), float_of(e << 23), (uint8_t)e};
    return made;
}

/* One element: its dequantized BF16 value, and its code where asked for. */
static inline __attribute__((always_inline)) uint16_t round_one(
    uint16_t x, float scale, float inverse, const format f, int with_code, uint8_t *code)
{
    const uint32_t least = bits_of(f.min_normal), drop = 23 - f.mantissa, places = drop << 23;
    const uint32_t u = (uint32_t)x << 16;
    float p = float_of(u & 0x7fffffffu) * scale;
    p = p > f.max ? f.max : p;
    uint32_t exponent = bits_of(p) & 0x7f800000u;
    exponent = exponent > least ? exponent : least;
    const float round = float_of(exponent + places);
    const float v = (p + round) - round;
    if (with_code) {
        const float magic = float_of(least - (f.mantissa << 23) + (23u << 23));
        const uint32_t subnormal = bits_of(v + magic) - bits_of(magic);
        uint32_t c = v < f.min_normal ? subnormal : (bits_of(v) >> drop) - f.rebias;
        c = bits_of(v) > 0x7f800000u ? 0x7fu : c;
        *code = (uint8_t)(c | u >> 31 << 7);
    }
    /* NaN keeps its payload's upper bits, of which the multiplication sets the quiet one. */
    return (uint16_t)((bits_of(v * inverse) | (u & 0x80000000u)) >> 16);
}

static inline __attribute__((always_inline)) void round_run(
    const uint16_t *restrict x, int n, block_scale by, const format f, uint16_t *restrict value)
{
    for (int i = 0; i < n; i++)
        value[i] = round_one(x[i], by.scale, by.inverse, f, 0, NULL);
}

static inline __attribute__((always_inline)) void round_across(
    const uint16_t *restrict x, int n, const float *restrict scale, const float *restrict inverse,
    const format f, uint16_t *restrict value, uint8_t *restrict code)
{
    if (code)
        for (int i = 0; i < n; i++) round_one(x[i], scale[i], 0.0f, f, 1, code + i);
    if (value)
        for (int i = 0; i < n; i++) value[i] = round_one(x[i], scale[i], inverse[i], f, 0, NULL);
}

/* Largest magnitude of a short run, as the upper half of its FP32 bits. */
static inline __attribute__((always_inline)) uint16_t largest_of_run(const uint16_t *x, int n)
{
    uint16_t amax = 0;
    for (int i = 0; i < n; i++) {
        uint16_t magnitude = x[i] & 0x7fffu;
        amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
}

/* What one run of a row tells: counted where it is quantized along the rows, or alone. */
static inline void count_run(const slot *to, const uint16_t *x, const uint16_t *value, int n,
                             int has_nonfinite, float scale, float overflow)
{
    if (!to->counting) return;
    if (has_nonfinite) {
        to->counters[2] += nonfinite(x, n);
        to->counters[0] += saturated(x, n, scale, overflow);
    }
    to->counters[1] += zeros(value, n) - zeros(x, n);
    if (to->energies) measure_error(to, x, value, n, 1.0f);
}

static inline __attribute__((always_inline)) void quantize_rows(
    const slot *to, const uint16_t *x, int64_t stride, int rows, int n, const int block,
    enum rule rule, const format f, uint16_t *value)
{
    for (int r = 0; r < rows; r++) {
        const uint16_t *in = x + r * stride;
        uint16_t *out = value + r * stride;
        int odd = 0, at = 0;
        for (; at + block <= n; at += block) {
            const uint32_t amax = largest_of_run(in + at, block);
            odd |= amax >= 0x7f80u;
            round_run(in + at, block, scale_of(amax, rule, f, to->epsilon), f, out + at);
        }
        if (at < n) {
            const uint32_t amax = largest_of_run(in + at, n - at);
            odd |= amax >= 0x7f80u;
            round_run(in + at, n - at, scale_of(amax, rule, f, to->epsilon), f, out + at);
        }
        const uint32_t seen = (uint32_t)largest_of_run(in, n) << 16;
        *to->amax = seen > *to->amax ? seen : *to->amax;
        if (!to->counting) continue;
        if (odd && rule == BLOCK) {
            /* Only a block with a value that isn't finite can saturate: its scale is 1. */
            for (at = 0; at < n; at += block) {
                const int m = n - at < block ? n - at : block;
                if (largest_of_run(in + at, m) >= 0x7f80u)
                    to->counters[0] += saturated(in + at, m, 1.0f, f.overflow);
            }
        }
        if (odd) to->counters[2] += nonfinite(in, n);
        to->counters[1] += zeros(out, n) - zeros(in, n);
        if (to->energies) measure_error(to, in, out, n, 1.0f);
    }
}

static inline __attribute__((always_inline)) void quantize_columns(
    const slot *to, const uint16_t *x, int64_t stride, int rows, int n, enum rule rule,
    const format f, uint16_t *value, uint8_t *code, uint8_t *exponents)
{
    uint16_t amax[STRIP] = {0};
    float scale[STRIP], inverse[STRIP];
    for (int r = 0; r < rows; r++) {
        const uint16_t *restrict in = x + r * stride;
        for (int i = 0; i < n; i++) {
            uint16_t magnitude = in[i] & 0x7fffu;
            amax[i] = magnitude > amax[i] ? magnitude : amax[i];
        }
    }
    for (int i = 0; i < n; i++) {
        const block_scale by = scale_of(amax[i], rule, f, to->epsilon);
        scale[i] = by.scale;
        inverse[i] = by.inverse;
        if (exponents) exponents[i] = by.exponent;
    }
    for (int r = 0; r < rows; r++)
        round_across(x + r * stride, n, scale, inverse, f, value ? value + r * stride : NULL,
                     code ? code + r * stride : NULL);
}

#define FOR_EACH_STRIP(rows, columns, block)                                                 \
    for (int64_t r = 0; r < (rows); r += (block))                                            \
        for (int64_t c = 0; c < (columns); c += STRIP)
#define LEFT(total, at, most) ((total) - (at) < (most) ? (int)((total) - (at)) : (most))

static inline __attribute__((always_inline)) void quantize_strips(
    const slot *to, const uint16_t *x, int64_t rows, int64_t columns, const int block,
    enum rule rule, const format f, uint16_t *along_rows, uint16_t *along_columns, uint8_t *codes,
    uint8_t *exponents)
{
    FOR_EACH_STRIP(rows, columns, block)
    {
        const int m = LEFT(rows, r, block), n = LEFT(columns, c, STRIP);
        const int64_t at = r * columns + c;
        if (along_rows)
            quantize_rows(to, x + at, columns, m, n, block, rule, f, along_rows + at);
        if (along_columns || codes)
            quantize_columns(to, x + at, columns, m, n, rule, f,
                             along_columns ? along_columns + at : NULL, codes ? codes + at : NULL,
                             exponents ? exponents + r / block * columns + c : NULL);
    }
}

/* Blocks of `block` (32 or 128) along rows and along columns. Any of the outputs may be NULL:
 * `along_rows` and `along_columns` are values; `codes` are those of the latter, with `exponents`
 * [ceil(rows / block), columns]. Counters and amax are kept where `along_rows` is asked for. */
void octavo_quantize_blocks(const slot *to, const uint16_t *x, int64_t rows, int64_t columns,
                            int32_t mx, uint16_t *along_rows, uint16_t *along_columns,
                            uint8_t *codes, uint8_t *exponents)
{
    if (mx && to->e5m2)
        quantize_strips(to, x, rows, columns, 32, MX, E5M2, along_rows, along_columns, codes,
                        exponents);
    else if (mx)
        quantize_strips(to, x, rows, columns, 32, MX, E4M3, along_rows, along_columns, codes,
                        exponents);
    else if (to->e5m2)
        quantize_strips(to, x, rows, columns, 128, BLOCK, E5M2, along_rows, along_columns, codes,
                        exponents);
    else
        quantize_strips(to, x, rows, columns, 128, BLOCK, E4M3, along_rows, along_columns, codes,
                        exponents);
    if (along_rows && to->counting) to->counters[3] += rows * columns;
}

/* Squares of 128 x 128: the same values serve both products. Weights, so E4M3. */
void octavo_quantize_squares(const slot *to, const uint16_t *x, int64_t rows, int64_t columns,
                             uint16_t *value)
{
    const int block = LARGEST_BLOCK;
    for (int64_t r = 0; r < rows; r += block)
        for (int64_t c = 0; c < columns; c += block) {
            const int m = LEFT(rows, r, block), n = LEFT(columns, c, block);
            const uint16_t *in = x + r * columns + c;
            uint16_t *out = value + r * columns + c;
            uint16_t amax = 0;
            for (int i = 0; i < m; i++) {
                const uint16_t seen = largest_of_run(in + i * columns, n);
                amax = seen > amax ? seen : amax;
            }
            const uint32_t seen = (uint32_t)amax << 16;
            *to->amax = seen > *to->amax ? seen : *to->amax;
            const block_scale by = scale_of(amax, BLOCK, E4M3, to->epsilon);
            for (int i = 0; i < m; i++) {
                round_run(in + i * columns, n, by, E4M3, out + i * columns);
                count_run(to, in + i * columns, out + i * columns, n, amax >= 0x7f80u, by.scale,
                          E4M3.overflow);
            }
        }
    if (to->counting) to->counters[3] += rows * columns;
}

/* BF16 values of codes with a scale each `block` rows of a column. */
void octavo_unpack_columns(const uint8_t *codes, const uint8_t *exponents, int64_t rows,
                           int64_t columns, int32_t block, int32_t e5m2, uint16_t *values)
{
    const float mend = e5m2 ? 0x1p112f : 0x1p120f;
    const int shift = e5m2 ? 21 : 20;
    const uint32_t last = e5m2 ? 0x7cu : 0x7eu;
    float inverse[STRIP];
    FOR_EACH_STRIP(rows, columns, block)
    {
        const int m = LEFT(rows, r, block), n = LEFT(columns, c, STRIP);
        const uint8_t *restrict e = exponents + r / block * columns + c;
        for (int i = 0; i < n; i++)
            inverse[i] = float_of(e[i] == 255 ? 0x7fc00000u : e[i] ? (uint32_t)e[i] << 23 : 0x400000u);
        for (int64_t k = 0; k < m; k++) {
            const uint8_t *restrict code = codes + (r + k) * columns + c;
            uint16_t *restrict value = values + (r + k) * columns + c;
            for (int i = 0; i < n; i++) {
                const uint32_t b = code[i] & 0x7fu;
                uint32_t v = bits_of(float_of(b << shift) * mend * inverse[i]) >> 16;
                v = b > last ? 0x7fc0u : v;
                value[i] = (uint16_t)(v | (uint32_t)(code[i] >> 7) << 15);
            }
        }
    }
}

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

/* Blocks of the gradient exchange: see block_quantize in parallel/gradients.py. n values of x
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
        const double inverse = ldexp(1.0, (int)e - 127);
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
