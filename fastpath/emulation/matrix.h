/* MFMA of gfx942: the reference's unit `mfma-cdna3-g8` in C, and float32's chain of FMA; a test holds them to it. */
#ifndef MATRIX_H
#define MATRIX_H
#include "machine.h"

#define NO_EXPONENT (-4096)
#define LEAST_EXPONENT (-256)

static inline double power(int n) {
    uint64_t bits = (uint64_t)(n + 1023) << 52;
    double x;
    memcpy(&x, &bits, 8);
    return x;
}
/* floor(log2 |x|), -126 for subnormals and zeros of float32. */
static inline int exponent_of(float x) {
    int field = (int)(u32(x) >> 23 & 0xff);
    return (field ? field : 1) - 127;
}

/* Floor to 32 significant bits, or to the spacing they have at 2^-126, then to nearest even. */
static inline float round_sum(double x) {
    uint64_t u;
    double floored;
    if (fabs(x) < 0x1p-126) return (float)(floor(x * 0x1p157) * 0x1p-157);
    memcpy(&u, &x, 8);
    u = (u + ((uint64_t)((int64_t)u >> 63) & 0x1fffff)) & ~(uint64_t)0x1fffff;
    memcpy(&floored, &u, 8);
    return (float)floored;
}

/* c + sum of eight products of bfloat16 or float16 values; own exponents clamped at `least`. */
static inline float group8(const float *a, const int *ea, const float *b, const int *eb, float c) {
    int largest = LEAST_EXPONENT, finite = isfinite(c);
    for (int k = 0; k < 8; k++) {
        int e = ea[k] + eb[k];
        if (e > largest) largest = e;
        finite &= isfinite(a[k]) && isfinite(b[k]);
    }
    if (!finite || largest >= 127) {
        double special = c;
        for (int k = 0; k < 8; k++) {
            double product = (double)a[k] * b[k];
            special += fabs(product) >= 0x1p128 ? copysign(INFINITY, product) : product;
        }
        if (!isfinite(special)) return (float)special;
    }
    double total = 0, scale = power(24 - largest);
    for (int k = 0; k < 8; k++) total += trunc((double)a[k] * b[k] * scale);
    int own = exponent_of(c), common = largest > own ? largest : own;
    total = floor(total * power(largest + 8 - common));
    total += floor(c * power(24 - common)) * 256;
    return round_sum(total * power(common - 32));
}

static inline void prepare(float x, int least, float *value, int *exponent) {
    int own = exponent_of(x);
    *value = x;
    *exponent = x == 0 || !isfinite(x) ? NO_EXPONENT / 2 : own < least ? least : own;
}

static inline float half_value(uint32_t h) {
    uint32_t sign = (h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) return f32(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    return copysignf((float)(magnitude < 0x400 ? magnitude * 0x1p-24 : (double)f32((magnitude << 13) + 0x38000000)), f32(sign));
}

/* rows x rows outputs, K in all, `each` consecutive k a lane. Registers: a, b in 16-bit pairs; c, d float32. */
static void multiply_short(uint32_t (*a)[LANES], uint32_t (*b)[LANES], uint32_t (*c)[LANES], uint32_t (*d)[LANES], int rows,
                           int K, int is_half) {
    static float av[32][16], bv[32][16];
    static int ae[32][16], be[32][16];
    for (int l = 0; l < LANES; l++)
        for (int i = 0; i < 4; i++) {
            uint32_t x = a[i / 2][l] >> 16 * (i & 1) & 0xffff, y = b[i / 2][l] >> 16 * (i & 1) & 0xffff;
            int k = 4 * (l / rows) + i, least = is_half ? -14 : -126;
            prepare(is_half ? half_value(x) : f32(x << 16), least, &av[l % rows][k], &ae[l % rows][k]);
            prepare(is_half ? half_value(y) : f32(y << 16), least, &bv[l % rows][k], &be[l % rows][k]);
        }
    for (int r = 0; r < rows * rows / LANES; r++)
        for (int l = 0; l < LANES; l++) {
            int j = l % rows, i = rows == 16 ? 4 * (l / 16) + r : 8 * (r / 4) + 4 * (l / 32) + r % 4;
            float total = f32(c[r][l]);
            for (int k = 0; k < K; k += 8) total = group8(&av[i][k], &ae[i][k], &bv[j][k], &be[j][k], total);
            d[r][l] = u32(total);
        }
}

/* Float32: one FMA per k, ascending. */
static void multiply_float(uint32_t (*a)[LANES], uint32_t (*b)[LANES], uint32_t (*c)[LANES], uint32_t (*d)[LANES], int rows, int K) {
    for (int r = 0; r < rows * rows / LANES; r++)
        for (int l = 0; l < LANES; l++) {
            int j = l % rows, i = rows == 16 ? 4 * (l / 16) + r : 8 * (r / 4) + 4 * (l / 32) + r % 4;
            float total = f32(c[r][l]);
            for (int k = 0; k < K; k++) total = __builtin_fmaf(f32(a[0][k * rows + i]), f32(b[0][k * rows + j]), total);
            d[r][l] = u32(total);
        }
}

/* `size` says which: rows, K, and bfloat16, float16 or float32. */
static void matrix_multiply(machine *m, wave *w, const instruction *o) {
    int rows = o->size & 0xff, K = o->size >> 8 & 0xff, kind = o->size >> 16, count = rows * rows / LANES;
    static uint32_t c[16][LANES], d[16][LANES];
    if (o->src2 >= FIRST_VECTOR && o->src2 < LITERAL) memcpy(c, w->v[o->src2 - FIRST_VECTOR], sizeof c[0] * count);
    else { uint32_t x = scalar(w, o, 2); for (int r = 0; r < count; r++) EACH c[r][l] = x; }
    uint32_t(*a)[LANES] = &w->v[o->src0 - FIRST_VECTOR], (*b)[LANES] = &w->v[o->src1 - FIRST_VECTOR];
    if (kind == 2) multiply_float(a, b, c, d, rows, K);
    else multiply_short(a, b, c, d, rows, K, kind == 1);
    if (m->observe) m->observe(o->size, a[0], b[0], c[0], d[0]);
    memcpy(w->v[o->dst], d, sizeof d[0] * count);
}
#endif
