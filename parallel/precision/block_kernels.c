/* FP8 casts of BF16 matrices whose blocks have scales of their own: the recipes block and mxfp8.
 *
 * Bit-equal to the plain PyTorch path (blockwise.py); the tests compare them.
 */
#include "casts.h"

/* Blocks: a matrix x [rows, columns] whose elements share power-of-two scales in runs of `block`
 * along its rows (for the product that contracts over columns), along its columns (over rows),
 * or in squares. Each scale is kept as the E8M0 exponent of its inverse. Values come out
 * dequantized, in BF16, which is exact: rounding to a coarser grid than x's own leaves a value
 * of x's grid, and to a finer one nothing. */
enum rule { BLOCK, MX, CURRENT };
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

/* Least magnitude but 0 of a short run, as the upper half of its FP32 bits; 0: all are 0. */
static inline __attribute__((always_inline)) uint16_t smallest_of_run(const uint16_t *x, int n)
{
    uint16_t less_one = 0xffffu;
    for (int i = 0; i < n; i++) {
        uint16_t magnitude = (uint16_t)((x[i] & 0x7fffu) - 1u);
        less_one = magnitude < less_one ? magnitude : less_one;
    }
    return (uint16_t)(less_one + 1u);
}

/* Whether some value of a run may become 0, of which `smallest` is the least but 0 and `scale` the
 * least scale: those of up to half the least subnormal do. It costs a third of counting them, which
 * almost no run needs: within a block they lie 18 octaves below the largest. True where the scale
 * is 0 or NaN. */
static inline int may_vanish(uint16_t smallest, float scale, const format f)
{
    const float half = float_of(bits_of(f.min_normal) - ((f.mantissa + 1) << 23));
    return smallest && !(float_of((uint32_t)smallest << 16) * scale > half);
}

static inline __attribute__((always_inline)) void quantize_rows(
    const slot *to, const uint16_t *x, int64_t stride, int rows, int n, const int block,
    enum rule rule, const format f, uint16_t *value)
{
    for (int r = 0; r < rows; r++) {
        const uint16_t *in = x + r * stride;
        uint16_t *out = value + r * stride;
        uint32_t largest_here = 0;
        float least_scale = INFINITY;
        int at = 0;
        for (; at + block <= n; at += block) {
            const uint32_t amax = largest_of_run(in + at, block);
            const block_scale by = scale_of(amax, rule, f, to->epsilon);
            largest_here = amax > largest_here ? amax : largest_here;
            /* A block whose scale is NaN is left out: its values become NaN, not 0. */
            least_scale = by.scale < least_scale ? by.scale : least_scale;
            round_run(in + at, block, by, f, out + at);
        }
        if (at < n) {
            const uint32_t amax = largest_of_run(in + at, n - at);
            const block_scale by = scale_of(amax, rule, f, to->epsilon);
            largest_here = amax > largest_here ? amax : largest_here;
            least_scale = by.scale < least_scale ? by.scale : least_scale;
            round_run(in + at, n - at, by, f, out + at);
        }
        const uint32_t seen = largest_here << 16;
        *to->amax = seen > *to->amax ? seen : *to->amax;
        if (!to->counting) continue;
        const int odd = largest_here >= 0x7f80u;
        if (odd && rule == BLOCK) {
            /* Only a block with a value that isn't finite can saturate: its scale is 1. */
            for (at = 0; at < n; at += block) {
                const int m = n - at < block ? n - at : block;
                if (largest_of_run(in + at, m) >= 0x7f80u)
                    to->counters[0] += saturated(in + at, m, 1.0f, f.overflow);
            }
        }
        if (odd) to->counters[2] += nonfinite(in, n);
        if (may_vanish(smallest_of_run(in, n), least_scale, f))
            to->counters[1] += vanished(in, out, n);
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
                const uint16_t *row = in + i * columns;
                uint16_t *rounded = out + i * columns;
                round_run(row, n, by, E4M3, rounded);
                if (!to->counting) continue;
                if (amax >= 0x7f80u) {
                    to->counters[2] += nonfinite(row, n);
                    to->counters[0] += saturated(row, n, by.scale, E4M3.overflow);
                }
                if (may_vanish(smallest_of_run(row, n), by.scale, E4M3))
                    to->counters[1] += vanished(row, rounded, n);
                if (to->energies) measure_error(to, row, rounded, n, 1.0f);
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

/* The scales to report of n tensors: each that of its largest magnitude, which is in the first of
 * a row's `columns` and a BF16 number; into the second. */
void octavo_used_scales(float *report, int64_t columns, const float *fp8_max, int64_t n,
                        int32_t rule, int32_t power_of_two, float epsilon)
{
    for (int64_t i = 0; i < n; i++) {
        float *row = report + i * columns;
        const format f = fp8_max[i] == E4M3.max ? E4M3 : E5M2;
        if (rule == CURRENT)
            row[1] = current_scale(row[0], f.max, epsilon, power_of_two);
        else
            row[1] = row[0] > 0.0f ? exact_scale(bits_of(row[0]) >> 16, rule, f, epsilon).scale
                                   : 1.0f;
    }
}
