/* Vector arithmetic: float32, integers, conversions, comparisons. Each macro is one instruction, all lanes. */
#ifndef VECTOR_H
#define VECTOR_H
#include "machine.h"

static inline int is_nan(float x) { return x != x; }
static inline int exponent_field(float x) { return (int)(u32(x) >> 23 & 0xff); }

static inline float maximum(float a, float b) {
    if (is_nan(a)) return b;
    if (is_nan(b)) return a;
    if (a == 0 && b == 0) return f32(u32(a) & u32(b));
    return a >= b ? a : b;
}
static inline float minimum(float a, float b) {
    if (is_nan(a)) return b;
    if (is_nan(b)) return a;
    if (a == 0 && b == 0) return f32(u32(a) | u32(b));
    return a < b ? a : b;
}
static inline float maximum3(float a, float b, float c) { return maximum(maximum(a, b), c); }
static inline float minimum3(float a, float b, float c) { return minimum(minimum(a, b), c); }
static inline float median(float a, float b, float c) {
    if (is_nan(a) || is_nan(b) || is_nan(c)) return minimum3(a, b, c);
    float most = maximum3(a, b, c);
    return most == a ? maximum(b, c) : most == b ? maximum(a, c) : maximum(a, b);
}

/* n / d scaled so that the refinement of a quotient neither overflows nor loses bits; returns whether to undo it.
 * The guide scales a denominator above 2^126 up where the quotient is tiny too, which would overflow: it must be down. */
static inline int div_scale(float x, float d, float n, float *result) {
    int vcc = 0;
    float quotient = n / d;
    int tiny = fabsf(quotient) < 0x1p-126f && quotient != 0, recip = fabsf(d) > 0x1p126f && fabsf(d) < INFINITY;
    if (n == 0 || d == 0) { *result = NAN; return 0; }
    *result = x;
    if (exponent_field(n) - exponent_field(d) >= 96) { vcc = 1; if (x == d) *result = ldexpf(x, 64); }
    else if (exponent_field(d) == 0) *result = ldexpf(x, 64);
    else if (recip && tiny) { vcc = 1; if (x == d) *result = ldexpf(x, -64); }
    else if (recip) *result = ldexpf(x, -64);
    else if (tiny) { vcc = 1; if (x == n) *result = ldexpf(x, 64); }
    else if (exponent_field(n) <= 23) *result = ldexpf(x, 64);
    return vcc;
}

/* a * b + c scaled by 2^n, one rounding: the sum is rounded to odd in double precision, which decides every tie. */
static inline float scaled_fma(float a, float b, float c, int n) {
    double product = (double)a * b, sum = product + c;
    if (!isfinite(sum)) return (float)sum;
    double z = sum - product, error = (product - (sum - z)) + (c - z);
    if (error != 0) {
        uint64_t bits;
        memcpy(&bits, &sum, 8);
        if (!(bits & 1)) { bits += (error > 0) == (sum > 0) ? 1 : -1; memcpy(&sum, &bits, 8); }
    }
    return (float)ldexp(sum, n);
}

static inline float div_fixup(float q, float d, float n) {
    uint32_t sign = (u32(d) ^ u32(n)) & 0x80000000u;
    if (is_nan(n)) return n;
    if (is_nan(d)) return d;
    if ((d == 0 && n == 0) || (isinf(d) && isinf(n))) return NAN;
    if (d == 0 || isinf(n)) return f32(sign | 0x7f800000);
    if (isinf(d) || n == 0 || exponent_field(n) - exponent_field(d) < -150) return f32(sign);
    /* The guide asks for the denominator's exponent here, which is settled above: it must be the quotient's, too large. */
    if (exponent_field(q) == 255) return f32(sign | 0x7f800000);
    return f32(sign | (u32(q) & 0x7fffffff));
}

/* v_rcp, v_rsq, v_sqrt, v_exp and v_log neither read nor give subnormals (LLVM, SIISelLowering.cpp). */
static inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

/* The correctly rounded value of a hardware approximation, moved by units in the last place on request. */
static inline float approximation(machine *m, double exact) {
    m->approximations++;
    float nearest = flushed((float)exact);
    if (!m->approximate || !isfinite(nearest) || nearest == 0) return nearest;
    /* the farthest value within one unit of the exact one: the nearest may already lie on that side */
    if (m->approximate > 0 ? fabs((double)nearest) > fabs(exact) : fabs((double)nearest) < fabs(exact)) return nearest;
    uint32_t moved = u32(nearest) + (uint32_t)m->approximate;
    return (moved & 0x7f800000) == 0x7f800000 || (moved & 0x7fffffff) == 0 ? nearest : f32(moved);
}

static inline int32_t to_i32(float x) {
    return is_nan(x) ? 0 : x >= 0x1p31f ? INT32_MAX : x <= -0x1p31f ? INT32_MIN : (int32_t)x;
}
static inline uint32_t to_u32(float x) { return is_nan(x) || x <= 0 ? 0 : x >= 0x1p32f ? UINT32_MAX : (uint32_t)x; }

static inline uint32_t permuted(uint32_t high, uint32_t low, uint32_t selector) {
    uint64_t data = (uint64_t)high << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t sel = selector >> 8 * i & 0xff, byte;
        if (sel >= 13) byte = 0xff;
        else if (sel == 12) byte = 0;
        else if (sel >= 8) byte = data >> (16 * (sel - 8) + 15) & 1 ? 0xff : 0;
        else byte = (uint32_t)(data >> 8 * sel) & 0xff;
        result |= byte << 8 * i;
    }
    return result;
}
static inline int class_of(float x) {
    uint32_t u = u32(x), magnitude = u & 0x7fffffff;
    int sign = (int)(u >> 31);
    if (magnitude > 0x7f800000) return magnitude & 0x400000 ? 1 : 0;
    if (magnitude == 0x7f800000) return sign ? 2 : 9;
    if (magnitude >= 0x800000) return sign ? 3 : 8;
    if (magnitude) return sign ? 4 : 7;
    return sign ? 5 : 6;
}
static inline uint32_t reversed(uint32_t x) {
    uint32_t result = 0;
    for (int i = 0; i < 32; i++) result |= (x >> i & 1) << (31 - i);
    return result;
}
static inline int32_t signed24(uint32_t x) { return (int32_t)(x << 8) >> 8; }
static inline int64_t med_i(int64_t a, int64_t b, int64_t c) {
    int64_t least = a < b ? a : b, most = a < b ? b : a;
    return c < least ? least : c > most ? most : c;
}

/* X(name, result) with floats a, b, c. */
#define FLOAT_1(X) \
    X(v_rcp_f32, approximation(m, 1 / (double)flushed(a))) X(v_rcp_iflag_f32, approximation(m, 1 / (double)flushed(a))) \
    X(v_rsq_f32, approximation(m, 1 / sqrt((double)flushed(a)))) X(v_sqrt_f32, approximation(m, sqrt((double)flushed(a)))) \
    X(v_exp_f32, approximation(m, exp2((double)flushed(a)))) X(v_log_f32, approximation(m, log2((double)flushed(a)))) \
    X(v_sin_f32, approximation(m, sin(6.283185307179586 * (double)a))) \
    X(v_cos_f32, approximation(m, cos(6.283185307179586 * (double)a))) \
    X(v_floor_f32, floorf(a)) X(v_ceil_f32, ceilf(a)) X(v_trunc_f32, truncf(a)) X(v_rndne_f32, rintf(a)) \
    X(v_fract_f32, a - floorf(a))
#define FLOAT_2(X) \
    X(v_add_f32, a + b) X(v_sub_f32, a - b) X(v_subrev_f32, b - a) X(v_mul_f32, a * b) \
    X(v_max_f32, maximum(a, b)) X(v_min_f32, minimum(a, b))
#define FLOAT_3(X) \
    X(v_fma_f32, __builtin_fmaf(a, b, c)) X(v_med3_f32, median(a, b, c)) X(v_max3_f32, maximum3(a, b, c)) \
    X(v_min3_f32, minimum3(a, b, c)) X(v_div_fixup_f32, div_fixup(a, b, c))

/* X(name, result) with uint32_t a, b, c. */
#define INTEGER_1(X) \
    X(v_mov_b32, a) X(v_not_b32, ~a) X(v_bfrev_b32, reversed(a)) X(v_accvgpr_read, a) \
    X(v_accvgpr_write, a) X(v_accvgpr_mov_b32, a) \
    X(v_ffbh_u32, a ? (uint32_t)__builtin_clz(a) : ~0u) X(v_ffbl_b32, a ? (uint32_t)__builtin_ctz(a) : ~0u) \
    X(v_ffbh_i32, (a ^ (uint32_t)((int32_t)a >> 31)) ? (uint32_t)__builtin_clz(a ^ (uint32_t)((int32_t)a >> 31)) : ~0u) \
    X(v_cvt_f32_i32, u32((float)(int32_t)a)) X(v_cvt_f32_u32, u32((float)a)) \
    X(v_cvt_i32_f32, (uint32_t)to_i32(f32(a))) X(v_cvt_u32_f32, to_u32(f32(a))) \
    X(v_cvt_f32_ubyte0, u32((float)(a & 255))) X(v_cvt_f32_ubyte1, u32((float)(a >> 8 & 255))) \
    X(v_cvt_f32_ubyte2, u32((float)(a >> 16 & 255))) X(v_cvt_f32_ubyte3, u32((float)(a >> 24)))
#define INTEGER_2(X) \
    X(v_add_u32, a + b) X(v_sub_u32, a - b) X(v_subrev_u32, b - a) X(v_and_b32, a & b) X(v_or_b32, a | b) \
    X(v_xor_b32, a ^ b) X(v_xnor_b32, ~(a ^ b)) X(v_lshlrev_b32, b << (a & 31)) X(v_lshrrev_b32, b >> (a & 31)) \
    X(v_ashrrev_i32, (uint32_t)((int32_t)b >> (a & 31))) X(v_mul_lo_u32, a * b) \
    X(v_mul_hi_u32, (uint32_t)((uint64_t)a * b >> 32)) \
    X(v_mul_hi_i32, (uint32_t)((int64_t)(int32_t)a * (int32_t)b >> 32)) \
    X(v_mul_u32_u24, (a & 0xffffff) * (b & 0xffffff)) \
    X(v_mul_i32_i24, (uint32_t)((int64_t)signed24(a) * signed24(b))) \
    X(v_mul_hi_u32_u24, (uint32_t)((uint64_t)(a & 0xffffff) * (b & 0xffffff) >> 32)) \
    X(v_min_u32, a < b ? a : b) X(v_max_u32, a > b ? a : b) \
    X(v_min_i32, (int32_t)a < (int32_t)b ? a : b) X(v_max_i32, (int32_t)a > (int32_t)b ? a : b) \
    X(v_bcnt_u32_b32, (uint32_t)__builtin_popcount(a) + b) \
    X(v_bfm_b32, ((1u << (a & 31)) - 1) << (b & 31)) \
    X(v_ldexp_f32, u32(ldexpf(f32(a), (int32_t)b))) \
    X(v_lshlrev_b16, b << (a & 15) & 0xffff) X(v_lshrrev_b16, (b & 0xffff) >> (a & 15)) \
    X(v_ashrrev_i16, (uint32_t)((int16_t)b >> (a & 15)) & 0xffff) \
    X(v_add_u16, (a + b) & 0xffff) X(v_sub_u16, (a - b) & 0xffff) X(v_mul_lo_u16, (a & 0xffff) * (b & 0xffff) & 0xffff) \
    X(v_max_u16, (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff) \
    X(v_min_u16, (a & 0xffff) < (b & 0xffff) ? a & 0xffff : b & 0xffff) \
    X(v_max_i16, (int16_t)a > (int16_t)b ? a & 0xffff : b & 0xffff) \
    X(v_min_i16, (int16_t)a < (int16_t)b ? a & 0xffff : b & 0xffff)
#define INTEGER_3(X) \
    X(v_add3_u32, a + b + c) X(v_lshl_add_u32, (a << (b & 31)) + c) X(v_add_lshl_u32, (a + b) << (c & 31)) \
    X(v_lshl_or_b32, (a << (b & 31)) | c) X(v_and_or_b32, (a & b) | c) X(v_or3_b32, a | b | c) X(v_xad_u32, (a ^ b) + c) \
    X(v_bfe_u32, a >> (b & 31) & ((1u << (c & 31)) - 1)) \
    X(v_bfe_i32, c & 31 ? (uint32_t)((int32_t)(a >> (b & 31) << (32 - (c & 31))) >> (32 - (c & 31))) : 0) \
    X(v_bfi_b32, (a & b) | (~a & c)) X(v_perm_b32, permuted(a, b, c)) \
    X(v_alignbit_b32, (uint32_t)(((uint64_t)a << 32 | b) >> (c & 31))) \
    X(v_alignbyte_b32, (uint32_t)(((uint64_t)a << 32 | b) >> 8 * (c & 3))) \
    X(v_mad_u32_u24, (a & 0xffffff) * (b & 0xffffff) + c) \
    X(v_mad_i32_i24, (uint32_t)((int64_t)signed24(a) * signed24(b)) + c) \
    X(v_min3_u32, a < b ? (a < c ? a : c) : b < c ? b : c) X(v_max3_u32, a > b ? (a > c ? a : c) : b > c ? b : c) \
    X(v_min3_i32, (uint32_t)((int32_t)a < (int32_t)b ? ((int32_t)a < (int32_t)c ? a : c) : (int32_t)b < (int32_t)c ? b : c)) \
    X(v_max3_i32, (uint32_t)((int32_t)a > (int32_t)b ? ((int32_t)a > (int32_t)c ? a : c) : (int32_t)b > (int32_t)c ? b : c)) \
    X(v_med3_i32, (uint32_t)med_i((int32_t)a, (int32_t)b, (int32_t)c)) X(v_med3_u32, (uint32_t)med_i(a, b, c))

/* X(name, result) with uint64_t a, b, c; shifts read their amount from the low half. */
#define WIDE(X) \
    X(v_mov_b64, a) X(v_lshlrev_b64, b << (a & 63)) X(v_lshrrev_b64, b >> (a & 63)) \
    X(v_ashrrev_i64, (uint64_t)((int64_t)b >> (a & 63))) X(v_lshl_add_u64, (a << (b & 7)) + c)

/* X(name, condition): float a, b; int32_t; uint32_t; int64_t; uint64_t. */
#define ORDER(X, kind) X(v_cmp_lt_##kind, a < b) X(v_cmp_eq_##kind, a == b) X(v_cmp_le_##kind, a <= b) X(v_cmp_gt_##kind, a > b) \
    X(v_cmp_ge_##kind, a >= b)
#define COMPARE_F32(X) ORDER(X, f32) X(v_cmp_lg_f32, a < b || a > b) X(v_cmp_o_f32, a == a && b == b) \
    X(v_cmp_u_f32, a != a || b != b) X(v_cmp_nge_f32, !(a >= b)) X(v_cmp_nlg_f32, !(a < b || a > b)) \
    X(v_cmp_ngt_f32, !(a > b)) X(v_cmp_nle_f32, !(a <= b)) X(v_cmp_neq_f32, a != b) X(v_cmp_nlt_f32, !(a < b))
#define COMPARE_I32(X) ORDER(X, i32) X(v_cmp_ne_i32, a != b)
#define COMPARE_U32(X) ORDER(X, u32) X(v_cmp_ne_u32, a != b)
#define COMPARE_I16(X) ORDER(X, i16) X(v_cmp_ne_i16, a != b)
#define COMPARE_U16(X) ORDER(X, u16) X(v_cmp_ne_u16, a != b)
#define COMPARE_I64(X) ORDER(X, i64) X(v_cmp_ne_i64, a != b)
#define COMPARE_U64(X) ORDER(X, u64) X(v_cmp_ne_u64, a != b)
#endif
