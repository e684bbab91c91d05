/* Double precision, as far as the division of two float32 through float64 needs it. */
#ifndef DOUBLE_H
#define DOUBLE_H
#include "machine.h"
#include "vector.h"

static inline double f64(uint64_t u) { double x; memcpy(&x, &u, 8); return x; }
static inline uint64_t u64(double x) { uint64_t u; memcpy(&u, &x, 8); return u; }
static inline int exponent_field64(double x) { return (int)(u64(x) >> 52 & 0x7ff); }

/* v_rcp_f64: the guide documents 2^29 units in the last place. Moved, it is that far off, or that times `approximate`. */
static inline double reciprocal64(machine *m, double x) {
    m->approximations++;
    double nearest = 1 / x;
    if (!m->approximate || !isfinite(nearest) || fabs(nearest) < 0x1p-1000) return nearest;
    return f64(u64(nearest) + (uint64_t)((int64_t)m->approximate * ((1 << 29) - 1)));
}

/* As div_scale of float32, by 2^128. Quotients of float32 never need it: only infinities and NaN reach a scale, and
 * v_div_fixup_f64 sets their result. */
static inline int div_scale64(double x, double d, double n, double *result) {
    int apart = exponent_field64(n) - exponent_field64(d) >= 768;
    *result = n == 0 || d == 0 ? NAN : x;
    if (n == 0 || d == 0) return 0;
    if (apart) { if (u64(x) == u64(d)) *result = ldexp(x, 128); return 1; }
    if (exponent_field64(d) == 0 || exponent_field64(n) <= 53) *result = ldexp(x, 128);
    return 0;
}

static inline double div_fixup64(double q, double d, double n) {
    uint64_t sign = (u64(d) ^ u64(n)) & (uint64_t)1 << 63;
    if (n != n) return n;
    if (d != d) return d;
    if ((d == 0 && n == 0) || (isinf(d) && isinf(n))) return NAN;
    if (d == 0 || isinf(n)) return f64(sign | (uint64_t)0x7ff << 52);
    if (isinf(d) || n == 0) return f64(sign);
    return f64(sign | (u64(q) & ~((uint64_t)1 << 63)));
}

/* X(name, result) with doubles a, b, c; operand by operand: 64 bits wide, or 32. */
#define DOUBLE(X) \
    X(v_fma_f64, fma(a, b, c)) X(v_mul_f64, a * b) X(v_add_f64, a + b) X(v_rcp_f64, reciprocal64(m, a)) \
    X(v_div_fixup_f64, div_fixup64(a, b, c))

/* X(name, condition) with doubles a, b. */
#define COMPARE_F64(X) ORDER(X, f64) X(v_cmp_lg_f64, a < b || a > b) X(v_cmp_o_f64, a == a && b == b) \
    X(v_cmp_u_f64, a != a || b != b) X(v_cmp_nge_f64, !(a >= b)) X(v_cmp_nlg_f64, !(a < b || a > b)) \
    X(v_cmp_ngt_f64, !(a > b)) X(v_cmp_nle_f64, !(a <= b)) X(v_cmp_neq_f64, a != b) X(v_cmp_nlt_f64, !(a < b))

/* Operand k of 64 bits, sign bits changed as asked. */
static void double_operand(machine *m, wave *w, const instruction *o, int k, uint64_t *out) {
    vector64(m, w, o, k, out);
    if (o->abs >> k & 1) EACH out[l] &= ~((uint64_t)1 << 63);
    if (o->neg >> k & 1) EACH out[l] ^= (uint64_t)1 << 63;
}
#endif
