/* A second implementation, in C, of what reference/ computes in NumPy: rounding in integers, primitives with the
 * machine's own fmaf. The accuracy of a primitive is measured against the C library in double precision.
 *
 * Build: gcc -O2 -mfma -ffp-contract=off -shared -fPIC oracle.c -lm
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

static uint32_t to_bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static float from_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

/* ---- rounding ---- */

enum { NAN_IEEE, NAN_ALL_ONES, NAN_NEGATIVE_ZERO };
enum { RNE, RTZ, RNA, ODD, STOCHASTIC };
enum { TO_INFINITY, SATURATE, TO_NAN };

typedef struct { int32_t exponent_bits, mantissa_bits, bias, nan, mode, overflow; } rounding;

static uint32_t round_one(float x, uint32_t random, const rounding *r) {
    const int M = r->mantissa_bits, width = 1 + r->exponent_bits + M, least = 1 - r->bias;
    const uint32_t u = to_bits(x), sign = (u >> 31) << (width - 1), magnitude = u & 0x7fffffff;
    const uint32_t top = (1u << (width - 1)) - 1;
    const uint32_t largest = r->nan == NAN_IEEE ? top - (1u << M) : r->nan == NAN_ALL_ONES ? top - 1 : top;
    const uint32_t nan = r->nan == NAN_IEEE ? (largest + 1 + (1u << (M - 1))) | sign
                       : r->nan == NAN_ALL_ONES ? top | sign : 1u << (width - 1);
    const uint32_t beyond = r->overflow == TO_NAN ? nan : r->overflow == SATURATE ? largest | sign : (largest + 1) | sign;
    if (magnitude > 0x7f800000) return nan;
    if (magnitude == 0x7f800000) return beyond;
    if (magnitude == 0) return r->nan == NAN_NEGATIVE_ZERO ? 0 : sign;

    int exponent = (int)(magnitude >> 23) - 127;
    uint64_t significand = magnitude & 0x7fffff;
    if (exponent == -127) exponent = -126; else significand |= 0x800000;
    while (!(significand & 0x800000)) { significand <<= 1; exponent--; }

    /* value = significand * 2^(exponent - 23); shift away what lies below the last place of the format */
    int shift = (exponent > least ? exponent : least) - M - (exponent - 23);
    if (shift > 60) shift = 60;
    uint64_t kept = significand >> shift, lost = significand - (kept << shift), half = shift ? 1ull << (shift - 1) : 1;
    int up = 0;
    switch (r->mode) {
    case RNE: up = lost > half || (lost == half && shift && (kept & 1)); break;
    case RNA: up = lost >= half && shift; break;
    case ODD: up = lost && !(kept & 1); break;
    case STOCHASTIC: up = (((lost << 32) >> shift) + random) >> 32 & 1; break;
    }
    kept += up;
    uint64_t code = exponent > least ? ((uint64_t)(exponent - least) << M) + kept : kept;
    if (code > largest)
        return r->overflow == TO_INFINITY && (r->mode == RTZ || r->mode == ODD) ? largest | sign : beyond;
    return code == 0 && r->nan == NAN_NEGATIVE_ZERO ? 0 : (uint32_t)code | sign;
}

void round_array(const float *x, const uint32_t *random, uint32_t *codes, int64_t n, const rounding *r) {
    for (int64_t i = 0; i < n; i++) codes[i] = round_one(x[i], random ? random[i] : 0, r);
}

void fma_array(const float *a, const float *b, const float *c, float *result, int64_t n) {
    for (int64_t i = 0; i < n; i++) result[i] = fmaf(a[i], b[i], c[i]);
}

/* ---- primitives ---- */

static float scale(float p, float k) {
    int n = (int)k, half = n >> 1;
    return (p * from_bits((uint32_t)(half + 127) << 23)) * from_bits((uint32_t)(n - half + 127) << 23);
}

static float exp_(float x) {
    if (x != x) return x;
    if (x > 0x1.62e430p6f) return INFINITY;
    if (x < -0x1.9fe36ap6f) return 0;
    float k = fmaf(x, 0x1.715476p0f, 0x1.8p23f) - 0x1.8p23f;
    float r = fmaf(k, -0x1.7f7d1cp-20f, fmaf(k, -0x1.62e400p-1f, x));
    float p = fmaf(0x1.6a4d60p-10f, r, 0x1.12398ep-7f);
    p = fmaf(p, r, 0x1.5558b0p-5f);
    p = fmaf(p, r, 0x1.555492p-3f);
    p = fmaf(p, r, 0x1.fffffcp-2f);
    return scale(fmaf(fmaf(p, r, 1), r, 1), k);
}

static float exp2_polynomial(float r) {
    float p = fmaf(0x1.416b52p-13f, r, 0x1.5f082ep-10f);
    p = fmaf(p, r, 0x1.3b2de0p-7f);
    p = fmaf(p, r, 0x1.c6af7cp-5f);
    p = fmaf(p, r, 0x1.ebfbdcp-3f);
    p = fmaf(p, r, 0x1.62e430p-1f);
    return fmaf(p, r, 1);
}

static float exp2_(float x) {
    if (x != x) return x;
    if (x >= 128) return INFINITY;
    if (x < -150) return 0;
    float k = (x + 0x1.8p23f) - 0x1.8p23f;
    return scale(exp2_polynomial(x - k), k);
}

static float exp2_nonpositive_(float x) {
    if (x != x) return x;
    if (x <= -127) return 0;
    float t = x + 0x1.8p23f;
    return from_bits((to_bits(t) << 23) + to_bits(exp2_polynomial(x - (t - 0x1.8p23f))));
}

static float log_(float x) {
    if (x == 0) return -INFINITY;
    if (!(x > 0)) return NAN;
    if (x == INFINITY) return x;
    float scaling = 0;
    if (x < 0x1p-126f) { x *= 0x1p23f; scaling = -23; }
    int32_t u = (int32_t)to_bits(x), e = (u - 0x3f2aaaab) & (int32_t)0xff800000;
    float f = from_bits((uint32_t)(u - e)) - 1, fe = fmaf((float)e, 0x1p-23f, scaling), s = f * f;
    static const float c[] = {0x1.1e678cp-3f, -0x1.f332f8p-4f, 0x1.1ed662p-3f, -0x1.559c44p-3f,
                              0x1.99d044p-3f, -0x1.fffefcp-3f, 0x1.555506p-2f, -0.5f};
    float p = -0x1.07c894p-3f;
    for (int i = 0; i < 8; i++) p = fmaf(p, f, c[i]);
    float h = fe * 0x1.62e400p-1f, R = h + f, error = f - (R - h), low = fmaf(fe, 0x1.7f7d1cp-20f, error);
    return R + fmaf(p, s, low);
}

static float rsqrt_(float x) {
    float y = 1 / sqrtf(x);
    if (x == 0 || !isfinite(x)) return y;
    float h = x * y, l = fmaf(x, y, -h), e = fmaf(-l, y, fmaf(-h, y, 1));
    return fmaf(0.5f * y, e, y);
}

static float rsqrt_uncompensated_(float x) { return 1 / sqrtf(x); }
static float sigmoid_(float x) { return 1 / (1 + exp_(-x)); }
static float silu_(float x) { return x / (1 + exp_(-x)); }

static double rsqrt_exact(double x) { return 1 / sqrt(x); }
static double sigmoid_exact(double x) { return 1 / (1 + exp(-x)); }
static double silu_exact(double x) { return x / (1 + exp(-x)); }

/* Correctly rounded, but for double roundings that differ from a direct one for about one input in 2^40. */
static float exp_cr(float x) { return (float)expl(x); }
static float exp2_cr(float x) { return (float)exp2l(x); }
static float log_cr(float x) { return (float)logl(x); }
static float rsqrt_cr(float x) { return (float)(1 / sqrtl(x)); }
static float sigmoid_cr(float x) {
    /* 1/2 + x/4 - x^3/48: where the first two terms are a tie, the third decides it towards 1/2 */
    if (fabsf(x) < 0x1p-18f) return (float)nextafterl(0.5L + x / 4, 0.5L);
    return (float)(1 / (1 + expl(-(long double)x)));
}

static float silu_cr(float x) {
    /* x / 2 + x^2 / 4: where halving a subnormal or the smallest normals is a tie, the second term decides it upwards */
    uint32_t u = to_bits(x), magnitude = u & 0x7fffffff;
    if (magnitude < 0x01000000) return from_bits((u & 0x80000000) | ((magnitude + !(u >> 31)) >> 1));
    return (float)(x / (1 + expl(-(long double)x)));
}

typedef struct { const char *name; float (*sequence)(float); double (*exact)(double); } primitive;

static const primitive PRIMITIVES[] = {
    {"exp/rlk", exp_, exp}, {"exp2/rlk", exp2_, exp2}, {"exp2_nonpositive/rlk", exp2_nonpositive_, exp2},
    {"log/rlk", log_, log}, {"rsqrt/rlk", rsqrt_, rsqrt_exact}, {"sigmoid/rlk", sigmoid_, sigmoid_exact},
    {"silu/rlk", silu_, silu_exact}, {"rsqrt/uncompensated", rsqrt_uncompensated_, rsqrt_exact},
    {"exp/correctly-rounded", exp_cr, exp}, {"exp2/correctly-rounded", exp2_cr, exp2},
    {"log/correctly-rounded", log_cr, log}, {"rsqrt/correctly-rounded", rsqrt_cr, rsqrt_exact},
    {"sigmoid/correctly-rounded", sigmoid_cr, sigmoid_exact}, {"silu/correctly-rounded", silu_cr, silu_exact},
};

static const primitive *find(const char *name) {
    for (unsigned i = 0; i < sizeof PRIMITIVES / sizeof *PRIMITIVES; i++)
        if (!strcmp(PRIMITIVES[i].name, name)) return &PRIMITIVES[i];
    return 0;
}

int primitive_array(const char *name, const float *x, float *y, int64_t n) {
    const primitive *p = find(name);
    if (!p) return -1;
    for (int64_t i = 0; i < n; i++) y[i] = p->sequence(x[i]);
    return 0;
}

typedef struct { double worst; float worst_x; int64_t misrounded, measured; } accuracy;

/* 2^(23 - exponent of x), the exponent at least -126. */
static double units_per_one(double x) {
    uint64_t u;
    memcpy(&u, &x, 8);
    int64_t exponent = (int64_t)(u >> 52 & 0x7ff) - 1023;
    u = (uint64_t)(23 - (exponent > -126 ? exponent : -126) + 1023) << 52;
    memcpy(&x, &u, 8);
    return x;
}

/* Error of y in units in the last place of the exact value, over the x in [low, high] whose exact result is finite;
 * a subnormal result counts in units of 2^-149. */
int measure(const char *name, const float *x, const float *y, int64_t n, float low, float high, accuracy *result) {
    const primitive *p = find(name);
    if (!p) return -1;
    for (int64_t i = 0; i < n; i++) {
        if (!(x[i] >= low && x[i] <= high)) continue;
        double exact = p->exact(x[i]);
        float rounded = (float)exact;
        if (!isfinite(rounded)) continue;
        result->measured++;
        result->misrounded += rounded != y[i];
        double error = fabs((double)y[i] - exact) * units_per_one(exact);
        if (!(error <= result->worst)) { result->worst = error; result->worst_x = x[i]; }
    }
    return 0;
}
