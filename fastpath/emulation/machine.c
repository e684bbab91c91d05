/* The machine that executes translated gfx942 code: one wavefront's instruction at a time, all 64 lanes of it at once.
 *
 * Work-group after work-group; the wavefronts of one run to a barrier or their end in turn, ascending or descending.
 * Semantics: AMD's CDNA3 ISA reference guide; where it is silent, as a comment says.
 */
#include "double.h"
#include "matrix.h"
#include "memory.h"
#include "vector.h"
#include "scalar.h"

#define OTHERS(X) \
    X(s_nop) X(s_waitcnt) X(s_sleep) X(s_setprio) X(s_icache_inv) X(s_endpgm) X(s_barrier) X(s_branch) X(s_cbranch_scc0) \
    X(s_cbranch_scc1) X(s_cbranch_vccz) X(s_cbranch_vccnz) X(s_cbranch_execz) X(s_cbranch_execnz) X(s_getpc_b64) \
    X(s_setpc_b64) X(s_swappc_b64) X(cache_control) X(scalar_load) X(vector_load) X(vector_store) X(vector_atomic) X(local_load) \
    X(local_load2) X(local_store) X(local_store2) X(ds_bpermute_b32) X(ds_permute_b32) X(ds_swizzle_b32) X(v_nop) \
    X(v_readfirstlane_b32) X(v_readlane_b32) X(v_writelane_b32) X(v_cndmask_b32) X(v_div_scale_f32) X(v_div_fmas_f32) \
    X(v_add_co_u32) X(v_sub_co_u32) X(v_subrev_co_u32) X(v_addc_co_u32) X(v_subb_co_u32) X(v_subbrev_co_u32) \
    X(v_mad_u64_u32) X(v_mad_i64_i32) X(v_mbcnt_lo_u32_b32) X(v_mbcnt_hi_u32_b32) X(v_cmp_class_f32) X(v_pk_fma_f32) \
    X(v_pk_mul_f32) X(v_pk_add_f32) X(v_pk_mov_b32) X(v_mfma) X(v_swap_b32) X(v_cvt_f32_f16) X(v_cvt_f16_f32) \
    X(v_cvt_f64_f32) X(v_cvt_f32_f64) X(v_ldexp_f64) X(v_div_scale_f64) X(v_div_fmas_f64)

#define NAME(name, ...) OP_##name,
#define EVERY(X) FLOAT_1(X) FLOAT_2(X) FLOAT_3(X) INTEGER_1(X) INTEGER_2(X) INTEGER_3(X) WIDE(X) COMPARE_F32(X) COMPARE_I32(X) \
    COMPARE_U32(X) COMPARE_I16(X) COMPARE_U16(X) COMPARE_I64(X) COMPARE_U64(X) SCALAR_32(X) SCALAR_64(X) SCALAR_64_TO_32(X) \
    DOUBLE(X) COMPARE_F64(X) SAVE_EXEC(X) SCALAR_COMPARE_I32(X) SCALAR_COMPARE_U32(X) SCALAR_COMPARE_U64(X) OTHERS(X)
enum { EVERY(NAME) OP_COUNT };
#define TEXT(name, ...) #name,
static const char *const NAMES[] = {EVERY(TEXT)};
const char *operation_name(int i) { return i < OP_COUNT ? NAMES[i] : 0; }
int instruction_bytes(void) { return sizeof(instruction); }
int machine_bytes(void) { return sizeof(machine); }

#define RUN_FLOAT_1(name, result) case OP_##name: { const uint32_t *x = vector(m, w, o, 0, t0, &active); \
    EACH { float a = f32(x[l]); t[l] = u32(result); } put(w, o, t, active); } break;
#define RUN_FLOAT_2(name, result) case OP_##name: { const uint32_t *x = vector(m, w, o, 0, t0, &active), *y = vector(m, w, o, 1, t1, &active); \
    EACH { float a = f32(x[l]), b = f32(y[l]); t[l] = u32(result); } put(w, o, t, active); } break;
#define RUN_FLOAT_3(name, result) case OP_##name: { const uint32_t *x = vector(m, w, o, 0, t0, &active), \
    *y = vector(m, w, o, 1, t1, &active), *z = vector(m, w, o, 2, t2, &active); \
    EACH { float a = f32(x[l]), b = f32(y[l]), c = f32(z[l]); t[l] = u32(result); } put(w, o, t, active); } break;
#define RUN_INTEGER_1(name, result) case OP_##name: { const uint32_t *x = vector(m, w, o, 0, t0, &active); \
    EACH { uint32_t a = x[l]; t[l] = (uint32_t)(result); } put(w, o, t, active); } break;
#define RUN_INTEGER_2(name, result) case OP_##name: { const uint32_t *x = vector(m, w, o, 0, t0, &active), *y = vector(m, w, o, 1, t1, &active); \
    EACH { uint32_t a = x[l], b = y[l]; t[l] = (uint32_t)(result); } put(w, o, t, active); } break;
#define RUN_INTEGER_3(name, result) case OP_##name: { const uint32_t *x = vector(m, w, o, 0, t0, &active), \
    *y = vector(m, w, o, 1, t1, &active), *z = vector(m, w, o, 2, t2, &active); \
    EACH { uint32_t a = x[l], b = y[l], c = z[l]; t[l] = (uint32_t)(result); } put(w, o, t, active); } break;
#define RUN_WIDE(name, result) case OP_##name: { uint64_t x[LANES], y[LANES], z[LANES]; vector64(m, w, o, 0, x); \
    vector64(m, w, o, 1, y); vector64(m, w, o, 2, z); \
    EACH { uint64_t a = x[l], b = y[l], c = z[l]; (void)a; (void)b; (void)c; x[l] = (result); } put64(w, o, x, active); } break;
#define RUN_DOUBLE(name, result) case OP_##name: { uint64_t x[LANES], y[LANES], z[LANES]; double_operand(m, w, o, 0, x); \
    double_operand(m, w, o, 1, y); double_operand(m, w, o, 2, z); \
    EACH { double a = f64(x[l]), b = f64(y[l]), c = f64(z[l]); (void)b; (void)c; x[l] = u64(result); } put64(w, o, x, active); } break;
#define COMPARED(condition, type, convert) { const uint32_t *x = vector(m, w, o, 0, t0, &active), *y = vector(m, w, o, 1, t1, &active); \
    uint64_t bits = 0; EACH { type a = convert(x[l]), b = convert(y[l]); bits |= (uint64_t)(condition) << l; } \
    set_pair(&w->s[o->sdst], bits & active); if (o->size) set_pair(&w->s[EXEC], bits & active); } break;
#define RUN_COMPARE_F32(name, condition) case OP_##name: COMPARED(condition, float, f32)
#define RUN_COMPARE_I32(name, condition) case OP_##name: COMPARED(condition, int32_t, (int32_t))
#define RUN_COMPARE_U32(name, condition) case OP_##name: COMPARED(condition, uint32_t, (uint32_t))
#define RUN_COMPARE_I16(name, condition) case OP_##name: COMPARED(condition, int16_t, (int16_t))
#define RUN_COMPARE_U16(name, condition) case OP_##name: COMPARED(condition, uint16_t, (uint16_t))
#define COMPARED64(condition, type) { uint64_t x[LANES], y[LANES], bits = 0; vector64(m, w, o, 0, x); vector64(m, w, o, 1, y); \
    EACH { type a = (type)x[l], b = (type)y[l]; bits |= (uint64_t)(condition) << l; } \
    set_pair(&w->s[o->sdst], bits & active); if (o->size) set_pair(&w->s[EXEC], bits & active); } break;
#define RUN_COMPARE_F64(name, condition) case OP_##name: { uint64_t x[LANES], y[LANES], bits = 0; \
    double_operand(m, w, o, 0, x); double_operand(m, w, o, 1, y); \
    EACH { double a = f64(x[l]), b = f64(y[l]); bits |= (uint64_t)(condition) << l; } \
    set_pair(&w->s[o->sdst], bits & active); if (o->size) set_pair(&w->s[EXEC], bits & active); } break;
#define RUN_COMPARE_I64(name, condition) case OP_##name: COMPARED64(condition, int64_t)
#define RUN_COMPARE_U64(name, condition) case OP_##name: COMPARED64(condition, uint64_t)
#define RUN_SCALAR_32(name, result, condition) case OP_##name: { uint32_t a = scalar(w, o, 0), b = scalar(w, o, 1), r = (result); \
    (void)b; w->scc = (condition) != 0; w->s[o->sdst] = r; } break;
#define RUN_SCALAR_64(name, result, condition) case OP_##name: { uint64_t a = scalar64(w, o, 0), b = scalar64(w, o, 1), r = (result); \
    (void)b; w->scc = (condition) != 0; set_pair(&w->s[o->sdst], r); } break;
#define RUN_SCALAR_64_TO_32(name, result, condition) case OP_##name: { uint64_t a = scalar64(w, o, 0); uint32_t r = (result); \
    w->scc = (condition) != 0; w->s[o->sdst] = r; } break;
#define RUN_SAVE_EXEC(name, result) case OP_##name: { uint64_t a = scalar64(w, o, 0), e = pair(&w->s[EXEC]), r = (result); \
    set_pair(&w->s[o->sdst], e); set_pair(&w->s[EXEC], r); w->scc = r != 0; } break;
#define RUN_SCALAR_COMPARE_I32(name, condition) case OP_##name: { int32_t a = (int32_t)scalar(w, o, 0), b = (int32_t)scalar(w, o, 1); w->scc = (condition) != 0; } break;
#define RUN_SCALAR_COMPARE_U32(name, condition) case OP_##name: { uint32_t a = scalar(w, o, 0), b = scalar(w, o, 1); w->scc = (condition) != 0; } break;
#define RUN_SCALAR_COMPARE_U64(name, condition) case OP_##name: { uint64_t a = scalar64(w, o, 0), b = scalar64(w, o, 1); w->scc = (condition) != 0; } break;

/* One half of a packed operand: `opsel` chooses the register of a pair for the low result, `opsel_hi` for the high. */
static const uint32_t *packed(machine *m, wave *w, const instruction *o, int k, int high, uint32_t *out) {
    int s = (&o->src0)[k], chosen = (high ? o->opsel_hi : o->opsel) >> k & 1, negative = (high ? o->neg_hi : o->neg) >> k & 1;
    if (s == LITERAL) {
        if (chosen) FAULT(m, o, "the high half of a packed constant");
        EACH out[l] = (uint32_t)o->constant[k];
    } else if (s < 128) { uint32_t x = w->s[s + chosen]; EACH out[l] = x; }
    else memcpy(out, w->v[s - FIRST_VECTOR + chosen], 4 * LANES);
    if (negative) EACH out[l] ^= 0x80000000u;
    return out;
}

static void run_packed(machine *m, wave *w, const instruction *o, uint64_t active) {
    uint32_t result[2][LANES], x[LANES], y[LANES], z[LANES];
    for (int high = 0; high < 2; high++) {
        packed(m, w, o, 0, high, x);
        packed(m, w, o, 1, high, y);
        if (o->code == OP_v_pk_fma_f32) packed(m, w, o, 2, high, z);
        EACH {
            float a = f32(x[l]), b = f32(y[l]);
            result[high][l] = u32(o->code == OP_v_pk_mul_f32 ? a * b : o->code == OP_v_pk_add_f32 ? a + b : __builtin_fmaf(a, b, f32(z[l])));
        }
    }
    EACH if (active >> l & 1) { w->v[o->dst][l] = result[0][l]; w->v[o->dst + 1][l] = result[1][l]; }
}

/* Carries are read before the destination is written: they may be the same registers. */
static void run_carry(machine *m, wave *w, const instruction *o, uint64_t active) {
    uint32_t t0[LANES], t1[LANES], t[LANES];
    const uint32_t *x = vector(m, w, o, 0, t0, &active), *y = vector(m, w, o, 1, t1, &active);
    int is_first = o->code == OP_v_add_co_u32 || o->code == OP_v_sub_co_u32 || o->code == OP_v_subrev_co_u32;
    uint64_t carry = is_first ? 0 : scalar64(w, o, 2), out = 0;
    EACH {
        uint64_t a = x[l], b = y[l], in = carry >> l & 1;
        int is_add = o->code == OP_v_add_co_u32 || o->code == OP_v_addc_co_u32;
        if (o->code == OP_v_subrev_co_u32 || o->code == OP_v_subbrev_co_u32) { uint64_t other = a; a = b; b = other; }
        uint64_t sum = is_add ? a + b + in : a - b - in;
        t[l] = (uint32_t)sum;
        out |= (uint64_t)(is_add ? sum >> 32 != 0 : b + in > a) << l;
    }
    put(w, o, t, active);
    set_pair(&w->s[o->sdst], out & active);
}

static void run_special(machine *m, wave *w, const instruction *o, uint64_t active) {
    uint32_t t0[LANES], t1[LANES], t2[LANES], t[LANES];
    uint64_t exec = pair(&w->s[EXEC]), bits = 0;
    int first = exec ? __builtin_ctzll(exec) : 0;
    const uint32_t *x, *y, *z;
    switch (o->code) {
    case OP_v_readfirstlane_b32: w->s[o->sdst] = w->v[o->src0 - FIRST_VECTOR][first]; break;
    case OP_v_readlane_b32: w->s[o->sdst] = w->v[o->src0 - FIRST_VECTOR][scalar(w, o, 1) & 63]; break;
    case OP_v_writelane_b32: w->v[o->dst][scalar(w, o, 1) & 63] = scalar(w, o, 0); break;
    case OP_v_cndmask_b32:
        x = vector(m, w, o, 0, t0, &active); y = vector(m, w, o, 1, t1, &active); bits = scalar64(w, o, 2);
        EACH t[l] = bits >> l & 1 ? y[l] : x[l];
        put(w, o, t, active);
        break;
    case OP_v_div_scale_f32:
        x = vector(m, w, o, 0, t0, &active); y = vector(m, w, o, 1, t1, &active); z = vector(m, w, o, 2, t2, &active);
        EACH { float r; bits |= (uint64_t)div_scale(f32(x[l]), f32(y[l]), f32(z[l]), &r) << l; t[l] = u32(r); }
        put(w, o, t, active);
        set_pair(&w->s[o->sdst], bits & active);
        break;
    case OP_v_div_fmas_f32:
        /* The guide says 2^32; the scale of v_div_scale is 2^64, down if the quotient was scaled up and vice versa. */
        x = vector(m, w, o, 0, t0, &active); y = vector(m, w, o, 1, t1, &active); z = vector(m, w, o, 2, t2, &active);
        bits = pair(&w->s[VCC]);
        EACH {
            float a = f32(x[l]), b = f32(y[l]), c = f32(z[l]);
            t[l] = u32(bits >> l & 1 ? scaled_fma(a, b, c, exponent_field(c) > 127 ? 64 : -64) : __builtin_fmaf(a, b, c));
        }
        put(w, o, t, active);
        break;
    case OP_v_cvt_f64_f32: {
        uint64_t r[LANES];
        x = vector(m, w, o, 0, t0, &active);
        EACH r[l] = u64((double)f32(x[l]));
        put64(w, o, r, active);
        break;
    }
    case OP_v_cvt_f32_f64: {
        uint64_t a[LANES];
        double_operand(m, w, o, 0, a);
        EACH t[l] = u32((float)f64(a[l]));
        put(w, o, t, active);
        break;
    }
    case OP_v_ldexp_f64: {
        uint64_t a[LANES];
        double_operand(m, w, o, 0, a);
        y = vector(m, w, o, 1, t1, &active);
        EACH a[l] = u64(ldexp(f64(a[l]), (int32_t)y[l]));
        put64(w, o, a, active);
        break;
    }
    case OP_v_div_scale_f64: case OP_v_div_fmas_f64: {
        uint64_t a[LANES], b[LANES], c[LANES];
        double_operand(m, w, o, 0, a); double_operand(m, w, o, 1, b); double_operand(m, w, o, 2, c);
        if (o->code == OP_v_div_scale_f64) {
            EACH { double r; bits |= (uint64_t)div_scale64(f64(a[l]), f64(b[l]), f64(c[l]), &r) << l; a[l] = u64(r); }
            put64(w, o, a, active);
            set_pair(&w->s[o->sdst], bits & active);
            break;
        }
        bits = pair(&w->s[VCC]);
        EACH {
            double r = fma(f64(a[l]), f64(b[l]), f64(c[l]));
            if (bits >> l & 1 && isfinite(r) && active >> l & 1) FAULT(m, o, "a quotient of float64 that needs scaling");
            a[l] = u64(r);
        }
        put64(w, o, a, active);
        break;
    }
    case OP_v_mad_u64_u32: case OP_v_mad_i64_i32: {
        uint64_t c[LANES], r[LANES];
        x = vector(m, w, o, 0, t0, &active); y = vector(m, w, o, 1, t1, &active); vector64(m, w, o, 2, c);
        EACH {
            uint64_t p = o->code == OP_v_mad_u64_u32 ? (uint64_t)x[l] * y[l] : (uint64_t)((int64_t)(int32_t)x[l] * (int32_t)y[l]);
            r[l] = p + c[l];
            bits |= (uint64_t)(r[l] < p) << l;
        }
        put64(w, o, r, active);
        set_pair(&w->s[o->sdst], bits & active);
        break;
    }
    case OP_v_mbcnt_lo_u32_b32: case OP_v_mbcnt_hi_u32_b32:
        x = vector(m, w, o, 0, t0, &active); y = vector(m, w, o, 1, t1, &active);
        EACH {
            uint64_t below = ((uint64_t)1 << l) - 1;
            uint32_t part = o->code == OP_v_mbcnt_lo_u32_b32 ? (uint32_t)below : (uint32_t)(below >> 32);
            t[l] = (uint32_t)__builtin_popcount(x[l] & part) + y[l];
        }
        put(w, o, t, active);
        break;
    case OP_v_cmp_class_f32:
        x = vector(m, w, o, 0, t0, &active); y = vector(m, w, o, 1, t1, &active);
        EACH bits |= (uint64_t)(y[l] >> class_of(f32(x[l])) & 1) << l;
        set_pair(&w->s[o->sdst], bits & active);
        if (o->size) set_pair(&w->s[EXEC], bits & active);
        break;
    case OP_v_pk_mov_b32:
        memcpy(t0, packed(m, w, o, 0, 0, t), sizeof t0);
        memcpy(t1, o->opsel >> 1 & 1 ? packed(m, w, o, 1, 1, t) : packed(m, w, o, 1, 0, t), sizeof t1);
        EACH if (active >> l & 1) { w->v[o->dst][l] = t0[l]; w->v[o->dst + 1][l] = t1[l]; }
        break;
    case OP_v_swap_b32:
        memcpy(t0, w->v[o->dst], sizeof t0);
        EACH if (active >> l & 1) { w->v[o->dst][l] = w->v[o->src0 - FIRST_VECTOR][l]; w->v[o->src0 - FIRST_VECTOR][l] = t0[l]; }
        break;
    case OP_ds_bpermute_b32:
        memcpy(t0, w->v[o->addr], sizeof t0);
        memcpy(t1, w->v[o->data], sizeof t1);
        EACH { uint32_t from = (t0[l] + o->offset) >> 2 & 63; t[l] = exec >> from & 1 ? t1[from] : 0; }
        put(w, o, t, exec);
        break;
    case OP_ds_permute_b32:
        memset(t, 0, sizeof t);
        EACH if (exec >> l & 1) t[(w->v[o->addr][l] + o->offset) >> 2 & 63] = w->v[o->data][l];
        put(w, o, t, exec);
        break;
    case OP_ds_swizzle_b32: {
        int mode = o->offset;
        memcpy(t1, w->v[o->addr], sizeof t1);
        EACH {
            int from;
            if (mode >= 0xe000) { FAULT(m, o, "unknown swizzle %#x", mode); return; }
            if (mode & 0x8000) from = (l & ~3) | (mode >> 2 * (l & 3) & 3);
            else from = (l & 32) | ((((l & 31) & (mode & 31)) | (mode >> 5 & 31)) ^ (mode >> 10 & 31));
            t[l] = exec >> from & 1 ? t1[from] : 0;
        }
        put(w, o, t, exec);
        break;
    }
    case OP_v_cvt_f32_f16: x = vector(m, w, o, 0, t0, &active); EACH t[l] = u32(half_value(x[l] & 0xffff)); put(w, o, t, active); break;
    default: FAULT(m, o, "%s is translated but not executed", NAMES[o->code]);
    }
}

static void jump(wave *w, const instruction *o, int taken) { if (taken) w->pc = o->target; }

static void step(machine *m, wave *w) {
    const instruction *o = &m->code[w->pc++];
    uint64_t active = pair(&w->s[EXEC]);
    uint32_t t[LANES], t0[LANES], t1[LANES], t2[LANES];
    switch (o->code) {
        FLOAT_1(RUN_FLOAT_1) FLOAT_2(RUN_FLOAT_2) FLOAT_3(RUN_FLOAT_3) INTEGER_1(RUN_INTEGER_1) INTEGER_2(RUN_INTEGER_2)
        INTEGER_3(RUN_INTEGER_3) WIDE(RUN_WIDE) DOUBLE(RUN_DOUBLE) COMPARE_F64(RUN_COMPARE_F64) COMPARE_F32(RUN_COMPARE_F32) COMPARE_I32(RUN_COMPARE_I32)
        COMPARE_U32(RUN_COMPARE_U32) COMPARE_I16(RUN_COMPARE_I16) COMPARE_U16(RUN_COMPARE_U16) COMPARE_I64(RUN_COMPARE_I64)
        COMPARE_U64(RUN_COMPARE_U64) SCALAR_32(RUN_SCALAR_32) SCALAR_64(RUN_SCALAR_64) SCALAR_64_TO_32(RUN_SCALAR_64_TO_32)
        SAVE_EXEC(RUN_SAVE_EXEC) SCALAR_COMPARE_I32(RUN_SCALAR_COMPARE_I32) SCALAR_COMPARE_U32(RUN_SCALAR_COMPARE_U32)
        SCALAR_COMPARE_U64(RUN_SCALAR_COMPARE_U64)
    case OP_s_nop: case OP_s_waitcnt: case OP_s_sleep: case OP_s_setprio: case OP_s_icache_inv: case OP_cache_control: case OP_v_nop: break;
    case OP_s_endpgm: w->done = 1; break;
    case OP_s_barrier: w->waiting = 1; break;
    case OP_s_branch: w->pc = o->target; break;
    case OP_s_cbranch_scc0: jump(w, o, !w->scc); break;
    case OP_s_cbranch_scc1: jump(w, o, w->scc); break;
    case OP_s_cbranch_vccz: jump(w, o, !pair(&w->s[VCC])); break;
    case OP_s_cbranch_vccnz: jump(w, o, pair(&w->s[VCC]) != 0); break;
    case OP_s_cbranch_execz: jump(w, o, !active); break;
    case OP_s_cbranch_execnz: jump(w, o, active != 0); break;
    case OP_scalar_load: scalar_load(m, w, o); break;
    case OP_vector_load: vector_load(m, w, o); break;
    case OP_vector_store: vector_store(m, w, o); break;
    case OP_vector_atomic: vector_atomic(m, w, o); break;
    case OP_local_load: local_load(m, w, o, o->offset, o->dst); break;
    case OP_local_load2: {
        uint32_t kept[LANES];
        memcpy(kept, w->v[o->addr], sizeof kept);
        local_load(m, w, o, o->offset, o->dst);
        memcpy(t, w->v[o->addr], sizeof t); /* the address may be the first destination */
        if (o->addr >= o->dst && o->addr < o->dst + o->bytes / 4) {
            uint32_t first[LANES];
            memcpy(first, t, sizeof first);
            memcpy(w->v[o->addr], kept, sizeof kept);
            local_load(m, w, o, o->offset1, o->dst + o->bytes / 4);
            EACH if (active >> l & 1) w->v[o->addr][l] = first[l];
        } else local_load(m, w, o, o->offset1, o->dst + o->bytes / 4);
        break;
    }
    case OP_local_store: local_store(m, w, o, o->offset, o->data); break;
    case OP_local_store2: local_store(m, w, o, o->offset, o->data); local_store(m, w, o, o->offset1, o->data1); break;
    case OP_v_mfma: matrix_multiply(m, w, o); break;
    case OP_v_pk_fma_f32: case OP_v_pk_mul_f32: case OP_v_pk_add_f32: run_packed(m, w, o, active); break;
    case OP_v_add_co_u32: case OP_v_sub_co_u32: case OP_v_subrev_co_u32: case OP_v_addc_co_u32: case OP_v_subb_co_u32:
    case OP_v_subbrev_co_u32: run_carry(m, w, o, active); break;
    default: run_special(m, w, o, active);
    }
}

static void run_wave(machine *m, int index) {
    wave *w = &m->waves[index];
    m->current = index;
    while (!w->done && !w->waiting && !m->failed) {
        step(m, w);
        m->executed++;
        if (++m->steps > m->most_steps) FAULT(m, &m->code[w->pc], "more than %llu instructions in a work-group", (unsigned long long)m->most_steps);
    }
}

/* What a launch sets up: scalar registers by kind, and whether each is present. */
typedef struct {
    int32_t kernarg_at, dispatch_at, preload_at, preload_words, group_x, group_y, group_z, scratch_wave, size_x, size_y, size_z, flat_scratch;
    uint64_t kernarg;
} setup;

static void start(machine *m, const setup *u, int64_t entry, const int32_t *group) {
    int threads = u->size_x * u->size_y * u->size_z;
    for (int i = 0; i < m->wave_count; i++) {
        wave *w = &m->waves[i];
        uint8_t *scratch = w->scratch;
        memset(w, 0, sizeof *w);
        w->scratch = scratch;
        w->pc = entry;
        int left = threads - i * LANES;
        set_pair(&w->s[EXEC], left >= LANES ? ALL : ((uint64_t)1 << left) - 1);
        if (u->kernarg_at >= 0) set_pair(&w->s[u->kernarg_at], u->kernarg);
        if (u->preload_words > 0) memcpy(&w->s[u->preload_at], (void *)(uintptr_t)u->kernarg, 4 * (size_t)u->preload_words);
        if (u->group_x >= 0) w->s[u->group_x] = (uint32_t)group[0];
        if (u->group_y >= 0) w->s[u->group_y] = (uint32_t)group[1];
        if (u->group_z >= 0) w->s[u->group_z] = (uint32_t)group[2];
        EACH {
            int id = i * LANES + l;
            w->v[0][l] = (uint32_t)(id % u->size_x | (id / u->size_x % u->size_y) << 10 | (id / u->size_x / u->size_y) << 20);
        }
    }
    memset(m->lds_written, 0, (size_t)m->lds_bytes);
    memset(m->lds_write_epoch, 0xff, 4 * (size_t)m->lds_bytes);
    memset(m->lds_read_epoch, 0xff, 4 * (size_t)m->lds_bytes);
    m->epoch = 0;
    m->steps = 0;
}

static void run_group(machine *m, int descending) {
    while (!m->failed) {
        int waiting = 0, running = 0;
        for (int i = 0; i < m->wave_count; i++) run_wave(m, descending ? m->wave_count - 1 - i : i);
        for (int i = 0; i < m->wave_count; i++) { waiting += m->waves[i].waiting; running += !m->waves[i].done; }
        if (!running) return;
        if (waiting != running) return; /* failed */
        for (int i = 0; i < m->wave_count; i++) m->waves[i].waiting = 0;
        m->epoch++;
    }
}

/* Execute work-groups [first, first + count) of a grid; 0, or 1 with the reason in `fault` (at least 400 bytes). */
int execute(const instruction *code, int64_t entry, const setup *u, const int32_t *grid, int64_t first, int64_t count, const range *ranges,
            int32_t range_count, int32_t lds_bytes, int32_t scratch_bytes, int32_t approximate, int32_t descending,
            uint64_t most_steps, void (*observe)(int32_t, const uint32_t *, const uint32_t *, const uint32_t *, const uint32_t *),
            uint64_t *counts, char *fault) {
    machine m = {0};
    int waves = (u->size_x * u->size_y * u->size_z + LANES - 1) / LANES;
    size_t bytes = lds_bytes > 0 ? (size_t)lds_bytes : 1;
    m.code = code; m.ranges = ranges; m.range_count = range_count; m.approximate = approximate; m.wave_count = waves;
    m.lds_bytes = lds_bytes; m.scratch_bytes = scratch_bytes; m.most_steps = most_steps; m.observe = observe; m.fault = fault;
    m.waves = calloc((size_t)waves, sizeof(wave));
    m.lds = calloc(bytes, 1); m.lds_written = calloc(bytes, 1); m.lds_writer = calloc(bytes, 1); m.lds_readers = calloc(bytes, 2);
    m.lds_write_epoch = calloc(bytes, 4); m.lds_read_epoch = calloc(bytes, 4);
    for (int i = 0; i < waves; i++) m.waves[i].scratch = calloc((size_t)(scratch_bytes > 0 ? scratch_bytes : 1), LANES);
    for (int64_t g = first; g < first + count && !m.failed; g++) {
        int32_t group[3] = {(int32_t)(g % grid[0]), (int32_t)(g / grid[0] % grid[1]), (int32_t)(g / grid[0] / grid[1])};
        start(&m, u, entry, group);
        run_group(&m, descending);
        if (m.failed) { size_t n = strlen(fault); snprintf(fault + n, 80, ", work-group (%d, %d, %d)", group[0], group[1], group[2]); }
    }
    counts[0] += m.executed;
    counts[1] += m.approximations;
    for (int i = 0; i < waves; i++) free(m.waves[i].scratch);
    free(m.waves); free(m.lds); free(m.lds_written); free(m.lds_writer); free(m.lds_readers); free(m.lds_write_epoch); free(m.lds_read_epoch);
    return m.failed;
}

/* For the tests: C's twin of the unit, one group of eight. */
void multiply_groups(const float *a, const float *b, const float *c, float *d, int64_t rows, int32_t K, int32_t least) {
    for (int64_t r = 0; r < rows; r++) {
        float total = c[r];
        for (int k = 0; k < K; k += 8) {
            float av[8], bv[8];
            int ae[8], be[8];
            for (int i = 0; i < 8; i++) {
                prepare(a[r * K + k + i], least, &av[i], &ae[i]);
                prepare(b[r * K + k + i], least, &bv[i], &be[i]);
            }
            total = group8(av, ae, bv, be, total);
        }
        d[r] = total;
    }
}
