/* Scalar arithmetic. X(name, result, condition code) with a, b of 32 or 64 bits; KEEP leaves SCC alone. */
#ifndef SCALAR_H
#define SCALAR_H
#include "machine.h"

#define KEEP w->scc
static inline int overflow_add(uint32_t a, uint32_t b) { int32_t r; return __builtin_add_overflow((int32_t)a, (int32_t)b, &r); }
static inline int overflow_sub(uint32_t a, uint32_t b) { int32_t r; return __builtin_sub_overflow((int32_t)a, (int32_t)b, &r); }
static inline uint32_t field_u(uint32_t a, uint32_t b) {
    uint32_t width = b >> 16 & 0x7f, shifted = a >> (b & 31);
    return width >= 32 ? shifted : shifted & ((1u << width) - 1);
}
static inline uint32_t field_i(uint32_t a, uint32_t b) {
    uint32_t width = b >> 16 & 0x7f, x = field_u((uint32_t)((int32_t)a >> (b & 31)), width << 16);
    return width == 0 ? 0 : width >= 32 ? x : (uint32_t)((int32_t)(x << (32 - width)) >> (32 - width));
}
static inline uint64_t field_u64(uint64_t a, uint64_t b) {
    uint64_t width = b >> 16 & 0x7f, shifted = a >> (b & 63);
    return width >= 64 ? shifted : shifted & (((uint64_t)1 << width) - 1);
}
static inline uint64_t field_i64(uint64_t a, uint64_t b) {
    uint64_t width = b >> 16 & 0x7f, x = field_u64((uint64_t)((int64_t)a >> (b & 63)), width << 16);
    return width == 0 ? 0 : width >= 64 ? x : (uint64_t)((int64_t)(x << (64 - width)) >> (64 - width));
}

#define SCALAR_32(X) \
    X(s_mov_b32, a, KEEP) X(s_movk_i32, a, KEEP) X(s_cmov_b32, w->scc ? a : w->s[o->sdst], KEEP) \
    X(s_cmovk_i32, w->scc ? a : w->s[o->sdst], KEEP) X(s_not_b32, ~a, r != 0) \
    X(s_brev_b32, reversed(a), KEEP) X(s_bcnt1_i32_b32, (uint32_t)__builtin_popcount(a), r != 0) \
    X(s_ff1_i32_b32, a ? (uint32_t)__builtin_ctz(a) : ~0u, KEEP) X(s_flbit_i32_b32, a ? (uint32_t)__builtin_clz(a) : ~0u, KEEP) \
    X(s_sext_i32_i8, (uint32_t)(int32_t)(int8_t)a, KEEP) X(s_sext_i32_i16, (uint32_t)(int32_t)(int16_t)a, KEEP) \
    X(s_abs_i32, (int32_t)a < 0 ? -a : a, r != 0) \
    X(s_bitset0_b32, w->s[o->sdst] & ~(1u << (a & 31)), KEEP) X(s_bitset1_b32, w->s[o->sdst] | 1u << (a & 31), KEEP) \
    X(s_add_u32, a + b, (uint64_t)a + b >> 32) X(s_sub_u32, a - b, b > a) X(s_add_i32, a + b, overflow_add(a, b)) \
    X(s_sub_i32, a - b, overflow_sub(a, b)) X(s_addk_i32, w->s[o->sdst] + a, overflow_add(w->s[o->sdst], a)) \
    X(s_mulk_i32, w->s[o->sdst] * a, KEEP) \
    X(s_addc_u32, a + b + w->scc, (uint64_t)a + b + w->scc >> 32) X(s_subb_u32, a - b - w->scc, (uint64_t)b + w->scc > a) \
    X(s_min_i32, (int32_t)a < (int32_t)b ? a : b, (int32_t)a < (int32_t)b) X(s_min_u32, a < b ? a : b, a < b) \
    X(s_max_i32, (int32_t)a > (int32_t)b ? a : b, (int32_t)a > (int32_t)b) X(s_max_u32, a > b ? a : b, a > b) \
    X(s_cselect_b32, w->scc ? a : b, KEEP) X(s_and_b32, a & b, r != 0) X(s_or_b32, a | b, r != 0) X(s_xor_b32, a ^ b, r != 0) \
    X(s_andn2_b32, a & ~b, r != 0) X(s_orn2_b32, a | ~b, r != 0) X(s_nand_b32, ~(a & b), r != 0) X(s_nor_b32, ~(a | b), r != 0) \
    X(s_xnor_b32, ~(a ^ b), r != 0) X(s_lshl_b32, a << (b & 31), r != 0) X(s_lshr_b32, a >> (b & 31), r != 0) \
    X(s_ashr_i32, (uint32_t)((int32_t)a >> (b & 31)), r != 0) X(s_bfm_b32, ((1u << (a & 31)) - 1) << (b & 31), KEEP) \
    X(s_mul_i32, a * b, KEEP) X(s_mul_hi_u32, (uint32_t)((uint64_t)a * b >> 32), KEEP) \
    X(s_mul_hi_i32, (uint32_t)((int64_t)(int32_t)a * (int32_t)b >> 32), KEEP) \
    X(s_bfe_u32, field_u(a, b), r != 0) X(s_bfe_i32, field_i(a, b), r != 0) \
    X(s_absdiff_i32, (int32_t)(a - b) < 0 ? b - a : a - b, r != 0) \
    X(s_lshl1_add_u32, (a << 1) + b, ((uint64_t)a << 1) + b >> 32) X(s_lshl2_add_u32, (a << 2) + b, ((uint64_t)a << 2) + b >> 32) \
    X(s_lshl3_add_u32, (a << 3) + b, ((uint64_t)a << 3) + b >> 32) X(s_lshl4_add_u32, (a << 4) + b, ((uint64_t)a << 4) + b >> 32) \
    X(s_pack_ll_b32_b16, (a & 0xffff) | b << 16, KEEP) X(s_pack_lh_b32_b16, (a & 0xffff) | (b & 0xffff0000u), KEEP) \
    X(s_pack_hh_b32_b16, a >> 16 | (b & 0xffff0000u), KEEP)
#define SCALAR_64(X) \
    X(s_mov_b64, a, KEEP) X(s_cmov_b64, w->scc ? a : pair(&w->s[o->sdst]), KEEP) X(s_not_b64, ~a, r != 0) \
    X(s_cselect_b64, w->scc ? a : b, KEEP) X(s_and_b64, a & b, r != 0) X(s_or_b64, a | b, r != 0) X(s_xor_b64, a ^ b, r != 0) \
    X(s_andn2_b64, a & ~b, r != 0) X(s_orn2_b64, a | ~b, r != 0) X(s_nand_b64, ~(a & b), r != 0) X(s_nor_b64, ~(a | b), r != 0) \
    X(s_xnor_b64, ~(a ^ b), r != 0) X(s_lshl_b64, a << (b & 63), r != 0) X(s_lshr_b64, a >> (b & 63), r != 0) \
    X(s_ashr_i64, (uint64_t)((int64_t)a >> (b & 63)), r != 0) \
    X(s_bfm_b64, (((uint64_t)1 << (a & 63)) - 1) << (b & 63), KEEP) X(s_bfe_u64, field_u64(a, b), r != 0) \
    X(s_bfe_i64, field_i64(a, b), r != 0) \
    X(s_bitset0_b64, pair(&w->s[o->sdst]) & ~((uint64_t)1 << (a & 63)), KEEP) \
    X(s_bitset1_b64, pair(&w->s[o->sdst]) | (uint64_t)1 << (a & 63), KEEP)
/* 64-bit operand, 32-bit result. */
#define SCALAR_64_TO_32(X) \
    X(s_bcnt1_i32_b64, (uint32_t)__builtin_popcountll(a), r != 0) X(s_ff1_i32_b64, a ? (uint32_t)__builtin_ctzll(a) : ~0u, KEEP) \
    X(s_flbit_i32_b64, a ? (uint32_t)__builtin_clzll(a) : ~0u, KEEP)
/* EXEC becomes the result, the destination its old value. */
#define SAVE_EXEC(X) \
    X(s_and_saveexec_b64, a & e) X(s_or_saveexec_b64, a | e) X(s_xor_saveexec_b64, a ^ e) X(s_andn2_saveexec_b64, a & ~e) \
    X(s_orn2_saveexec_b64, a | ~e) X(s_nand_saveexec_b64, ~(a & e)) X(s_nor_saveexec_b64, ~(a | e)) \
    X(s_xnor_saveexec_b64, ~(a ^ e)) X(s_andn1_saveexec_b64, ~a & e) X(s_orn1_saveexec_b64, ~a | e)
/* SCC only. */
#define ORDER_S(X, kind) X(s_cmp_eq_##kind, a == b) X(s_cmp_lg_##kind, a != b) X(s_cmp_gt_##kind, a > b) X(s_cmp_ge_##kind, a >= b) \
    X(s_cmp_lt_##kind, a < b) X(s_cmp_le_##kind, a <= b)
#define SCALAR_COMPARE_I32(X) ORDER_S(X, i32)
#define SCALAR_COMPARE_U32(X) ORDER_S(X, u32) X(s_bitcmp0_b32, !(a >> (b & 31) & 1)) X(s_bitcmp1_b32, a >> (b & 31) & 1)
#define SCALAR_COMPARE_U64(X) X(s_cmp_eq_u64, a == b) X(s_cmp_lg_u64, a != b) X(s_bitcmp0_b64, !(a >> (b & 63) & 1)) \
    X(s_bitcmp1_b64, a >> (b & 63) & 1)
#endif
