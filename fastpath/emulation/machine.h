/* State of the machine: instructions as `fastpath.emulation.translate` writes them, wavefronts, memory, faults. */
#ifndef MACHINE_H
#define MACHINE_H
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LANES 64
#define VECTORS 512 /* 256 VGPRs, then 256 accumulation registers */
#define EXEC 126
#define VCC 106
#define M0 124
#define FIRST_VECTOR 256
#define LITERAL 1024
#define ALL (~(uint64_t)0)
#define EACH for (int l = 0; l < LANES; l++)

/* One translated instruction; every field an int32, then three constants. Keep in step with `translate.FIELDS`. */
typedef struct {
    int32_t code, form, dst, sdst, src0, src1, src2, neg, abs, opsel, opsel_hi, neg_hi;
    int32_t dpp, row_mask, bank_mask, bound, dst_sel, dst_unused, sel0, sel1, sext0, sext1;
    int32_t space, bytes, extend, offset, offset1, addr, data, data1, base, soffset, glc, target, size, place;
    uint64_t constant[3];
} instruction;

enum { PLAIN, DPP, SDWA };
enum { BUFFER, GLOBAL, SCRATCH, FLAT };
enum { ZERO_EXTEND, SIGN_EXTEND, LOW_HALF, HIGH_HALF };

typedef struct { uint64_t first, end; int32_t writable; int32_t unused; } range;

typedef struct {
    uint32_t s[128], v[VECTORS][LANES];
    uint32_t scc;
    int64_t pc;
    int done, waiting;
    uint8_t *scratch;
} wave;

typedef struct {
    const instruction *code;
    const range *ranges;
    int32_t range_count, approximate;
    wave *waves;
    int32_t wave_count, lds_bytes, scratch_bytes, current;
    /* Local memory, and of each byte: written at all, by which wavefront in which epoch, read by which in which epoch. */
    uint8_t *lds, *lds_written, *lds_writer;
    uint16_t *lds_readers;
    int32_t *lds_write_epoch, *lds_read_epoch, epoch;
    uint64_t steps, most_steps, executed, approximations;
    char *fault;
    int failed;
    /* Called for every MFMA if not null: operands, for a second opinion. */
    void (*observe)(int32_t code, const uint32_t *a, const uint32_t *b, const uint32_t *c, const uint32_t *d);
} machine;

static inline float f32(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static inline uint32_t u32(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline uint64_t pair(const uint32_t *s) { return s[0] | (uint64_t)s[1] << 32; }
static inline void set_pair(uint32_t *s, uint64_t x) { s[0] = (uint32_t)x; s[1] = (uint32_t)(x >> 32); }

#define FAULT(m, o, ...) do { if (!(m)->failed) { int n_ = snprintf((m)->fault, 200, __VA_ARGS__); \
    snprintf((m)->fault + n_, 100, " (instruction at byte %d, wavefront %d)", (o)->place, (m)->current); \
    (m)->failed = 1; } } while (0)

static inline uint64_t scalar64(const wave *w, const instruction *o, int k) {
    int s = (&o->src0)[k];
    if (s == LITERAL) return o->constant[k];
    if (s < 127) return pair(&w->s[s]);
    return ALL;
}

static inline uint32_t scalar(const wave *w, const instruction *o, int k) {
    int s = (&o->src0)[k];
    if (s == LITERAL) return (uint32_t)o->constant[k];
    if (s < 128) return w->s[s];
    if (s == 251) return pair(&w->s[VCC]) == 0;
    if (s == 252) return pair(&w->s[EXEC]) == 0;
    if (s == 253) return w->scc;
    return s >= FIRST_VECTOR ? w->v[s - FIRST_VECTOR][0] : 0;
}

/* Lane that lane l reads under a DPP control, or -1. */
static inline int dpp_source(int control, int l) {
    int row = l & ~15, in = l & 15;
    if (control < 0x100) return (l & ~3) | (control >> 2 * (l & 3) & 3);
    if (control > 0x100 && control < 0x110) return in + (control & 15) < 16 ? l + (control & 15) : -1;
    if (control > 0x110 && control < 0x120) return in >= (control & 15) ? l - (control & 15) : -1;
    if (control > 0x120 && control < 0x130) return row | ((in - (control & 15)) & 15);
    if (control == 0x130) return l < 63 ? l + 1 : -1;
    if (control == 0x134) return (l + 1) & 63;
    if (control == 0x138) return l - 1;
    if (control == 0x13c) return (l - 1) & 63;
    if (control == 0x140) return row | (15 - in);
    if (control == 0x141) return (l & ~7) | (7 - (l & 7));
    if (control == 0x142) return row ? row - 1 : -1;
    if (control == 0x143) return l >= 32 ? 31 : -1;
    if (control >= 0x150 && control < 0x160) return row | (control & 15);
    return -2;
}

static inline uint32_t select_part(uint32_t x, int sel, int sext) {
    if (sel < 4) { x = x >> 8 * sel & 0xff; return sext ? (uint32_t)(int32_t)(int8_t)x : x; }
    if (sel < 6) { x = x >> 16 * (sel - 4) & 0xffff; return sext ? (uint32_t)(int32_t)(int16_t)x : x; }
    return x;
}

/* Operand k of all lanes: the register itself, or `out`. DPP takes lanes out of `active` that it does not write. */
static inline const uint32_t *vector(machine *m, wave *w, const instruction *o, int k, uint32_t *out, uint64_t *active) {
    int s = (&o->src0)[k];
    const uint32_t *x;
    if (s >= FIRST_VECTOR && s < FIRST_VECTOR + VECTORS) x = w->v[s - FIRST_VECTOR];
    else { uint32_t value = scalar(w, o, k); EACH out[l] = value; x = out; }
    if (o->form == DPP && k == 0) {
        uint32_t moved[LANES];
        uint64_t exec = pair(&w->s[EXEC]);
        EACH {
            int from = dpp_source(o->dpp, l);
            int is_valid = from >= 0 && exec >> from & 1;
            if (from == -2) FAULT(m, o, "unknown DPP control %#x", o->dpp);
            moved[l] = is_valid ? x[from] : 0;
            int is_enabled = o->row_mask >> (l >> 4) & 1 && o->bank_mask >> (l >> 2 & 3) & 1;
            if (!is_enabled || (!is_valid && !o->bound)) *active &= ~((uint64_t)1 << l);
        }
        memcpy(out, moved, sizeof moved);
        x = out;
    }
    if (o->form == SDWA && k < 2) {
        int sel = k ? o->sel1 : o->sel0, sext = k ? o->sext1 : o->sext0;
        if (sel != 6) { EACH out[l] = select_part(x[l], sel, sext); x = out; }
    }
    if ((o->neg | o->abs) >> k & 1) {
        uint32_t keep = o->abs >> k & 1 ? 0x7fffffff : ~0u, flip = o->neg >> k & 1 ? 0x80000000u : 0;
        EACH out[l] = (x[l] & keep) ^ flip;
        x = out;
    }
    return x;
}

/* Write a result to the active lanes; SDWA places it in a part of the register. */
static inline void put(wave *w, const instruction *o, const uint32_t *x, uint64_t active) {
    uint32_t *d = w->v[o->dst];
    uint32_t placed[LANES];
    if (o->form == SDWA && o->dst_sel != 6) {
        int shift = o->dst_sel < 4 ? 8 * o->dst_sel : 16 * (o->dst_sel - 4), width = o->dst_sel < 4 ? 8 : 16;
        uint32_t mask = (width == 8 ? 0xffu : 0xffffu) << shift;
        EACH {
            uint32_t part = x[l] << shift & mask, rest = 0;
            if (o->dst_unused == 2) rest = d[l] & ~mask;
            if (o->dst_unused == 1 && x[l] >> (width - 1) & 1) rest = ~(uint32_t)0 << (shift + width - 1) << 1;
            placed[l] = part | rest;
        }
        x = placed;
    }
    if (active == ALL) { memcpy(d, x, 4 * LANES); return; }
    EACH d[l] = active >> l & 1 ? x[l] : d[l];
}

static inline void vector64(machine *m, wave *w, const instruction *o, int k, uint64_t *out) {
    int s = (&o->src0)[k];
    if (s >= FIRST_VECTOR && s < LITERAL) { EACH out[l] = w->v[s - FIRST_VECTOR][l] | (uint64_t)w->v[s - FIRST_VECTOR + 1][l] << 32; }
    else { uint64_t value = s < 0 ? 0 : scalar64(w, o, k); EACH out[l] = value; }
    if (o->form != PLAIN) FAULT(m, o, "DPP or SDWA of a 64-bit operand");
}

static inline void put64(wave *w, const instruction *o, const uint64_t *x, uint64_t active) {
    uint32_t *low = w->v[o->dst], *high = w->v[o->dst + 1];
    EACH if (active >> l & 1) { low[l] = (uint32_t)x[l]; high[l] = (uint32_t)(x[l] >> 32); }
}
#endif
