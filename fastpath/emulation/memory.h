/* Global, buffer, scratch and local memory. Every access is checked; local memory also for races and unwritten reads. */
#ifndef MEMORY_H
#define MEMORY_H
#include "machine.h"

static uint8_t *checked(machine *m, const instruction *o, uint64_t address, int bytes, int write) {
    for (int i = 0; i < m->range_count; i++) {
        const range *r = &m->ranges[i];
        if (address >= r->first && address + bytes <= r->end) {
            if (write && !r->writable) break;
            return (uint8_t *)(uintptr_t)address;
        }
    }
    FAULT(m, o, "%s of %d bytes outside every argument, at %#llx", write ? "write" : "read", bytes, (unsigned long long)address);
    return 0;
}

/* Where a lane's access goes, or null if it is skipped: out of a buffer's range, or a fault. */
static uint8_t *place(machine *m, wave *w, const instruction *o, int lane, int write, int *in_range) {
    *in_range = 1;
    int bytes = o->bytes;
    if (o->space == BUFFER) {
        const uint32_t *d = &w->s[o->base];
        uint64_t base = d[0] | (uint64_t)(d[1] & 0xffff) << 32, records = d[2];
        if (d[1] >> 16) { FAULT(m, o, "buffer with a stride or swizzle"); return 0; }
        uint64_t offset = (uint64_t)o->offset + (o->addr >= 0 ? w->v[o->addr][lane] : 0);
        uint64_t scalar_offset = o->soffset < 128 ? w->s[o->soffset] : (uint32_t)o->constant[0];
        if (offset + scalar_offset + bytes > records || offset > 0xffffffff) {
            if (offset + scalar_offset < records && offset <= 0xffffffff) FAULT(m, o, "access across the end of a buffer");
            *in_range = 0;
            return 0;
        }
        return checked(m, o, base + scalar_offset + offset, bytes, write);
    }
    if (o->space == SCRATCH) {
        int64_t offset = o->offset + (o->addr >= 0 ? (int64_t)(int32_t)w->v[o->addr][lane] : 0) + (o->base >= 0 ? (int64_t)w->s[o->base] : 0);
        if (offset < 0 || offset + bytes > m->scratch_bytes) { FAULT(m, o, "scratch offset %lld out of range", (long long)offset); return 0; }
        return w->scratch + (size_t)lane * m->scratch_bytes + offset;
    }
    uint64_t address = (uint64_t)(int64_t)o->offset;
    if (o->base >= 0) address += pair(&w->s[o->base]) + w->v[o->addr][lane];
    else address += w->v[o->addr][lane] | (uint64_t)w->v[o->addr + 1][lane] << 32;
    return checked(m, o, address, bytes, write);
}

static void load_into(uint32_t *d, const uint8_t *from, const instruction *o) {
    uint32_t x = 0;
    if (o->bytes < 4) memcpy(&x, from, o->bytes);
    if (o->bytes == 1 && o->extend == SIGN_EXTEND) x = (uint32_t)(int32_t)(int8_t)x;
    if (o->bytes == 2 && o->extend == SIGN_EXTEND) x = (uint32_t)(int32_t)(int16_t)x;
    if (o->extend == LOW_HALF) x = (d[0] & 0xffff0000u) | (x & 0xffff);
    if (o->extend == HIGH_HALF) x = (d[0] & 0xffff) | x << 16;
    if (o->bytes < 4) { d[0] = x; return; }
    for (int i = 0; i < o->bytes / 4; i++) memcpy(&d[i * LANES], from + 4 * i, 4);
}

static void store_from(const uint32_t *s, uint8_t *to, const instruction *o) {
    uint32_t x = o->extend == HIGH_HALF ? s[0] >> 16 : s[0];
    if (o->bytes < 4) { memcpy(to, &x, o->bytes); return; }
    for (int i = 0; i < o->bytes / 4; i++) memcpy(to + 4 * i, &s[i * LANES], 4);
}

static void vector_load(machine *m, wave *w, const instruction *o) {
    uint64_t exec = pair(&w->s[EXEC]);
    int in_range;
    uint32_t moved[4][LANES]; /* the address register may be a destination */
    for (int i = 0; i < (o->bytes + 3) / 4; i++) memcpy(moved[i], w->v[o->dst + i], sizeof moved[i]);
    static const uint8_t zeros[16];
    EACH if (exec >> l & 1) {
        uint8_t *from = place(m, w, o, l, 0, &in_range);
        if (m->failed) return;
        load_into(&moved[0][l], in_range ? from : zeros, o);
    }
    for (int i = 0; i < (o->bytes + 3) / 4; i++) memcpy(w->v[o->dst + i], moved[i], sizeof moved[i]);
}

static void vector_store(machine *m, wave *w, const instruction *o) {
    uint64_t exec = pair(&w->s[EXEC]);
    int in_range;
    EACH if (exec >> l & 1) {
        uint8_t *to = place(m, w, o, l, 1, &in_range);
        if (m->failed) return;
        if (in_range) store_from(&w->v[o->data][l], to, o);
    }
}

enum { SWAP, CMPSWAP, ADD, SUB, SMIN, UMIN, SMAX, UMAX, AND, OR, XOR, ADD_F32 };

static uint64_t combined(int operation, uint64_t old, uint64_t x, uint64_t compare, int bytes) {
    int64_t a = bytes == 4 ? (int64_t)(int32_t)old : (int64_t)old, b = bytes == 4 ? (int64_t)(int32_t)x : (int64_t)x;
    switch (operation) {
    case SWAP: return x;
    case CMPSWAP: return old == compare ? x : old;
    case ADD: return old + x;
    case SUB: return old - x;
    case SMIN: return a < b ? old : x;
    case SMAX: return a > b ? old : x;
    case UMIN: return old < x ? old : x;
    case UMAX: return old > x ? old : x;
    case AND: return old & x;
    case OR: return old | x;
    case XOR: return old ^ x;
    default: return u32(f32((uint32_t)old) + f32((uint32_t)x));
    }
}

static void vector_atomic(machine *m, wave *w, const instruction *o) {
    uint64_t exec = pair(&w->s[EXEC]);
    int in_range, words = o->bytes / 4;
    EACH if (exec >> l & 1) {
        uint8_t *at = place(m, w, o, l, 1, &in_range);
        if (m->failed) return;
        if (!in_range) continue;
        uint64_t old = 0, x = w->v[o->data][l], compare = 0;
        memcpy(&old, at, o->bytes);
        if (words == 2) x |= (uint64_t)w->v[o->data + 1][l] << 32;
        if (o->size == CMPSWAP) {
            compare = w->v[o->data + words][l];
            if (words == 2) compare |= (uint64_t)w->v[o->data + 3][l] << 32;
        }
        uint64_t updated = combined(o->size, old, x, compare, o->bytes);
        memcpy(at, &updated, o->bytes);
        if (o->glc) { w->v[o->dst][l] = (uint32_t)old; if (words == 2) w->v[o->dst + 1][l] = (uint32_t)(old >> 32); }
    }
}

static uint8_t *local(machine *m, const instruction *o, uint32_t address, int bytes, int write, const uint8_t *written) {
    if ((uint64_t)address + bytes > (uint64_t)m->lds_bytes) {
        FAULT(m, o, "local memory of %d bytes accessed at %u", m->lds_bytes, address);
        return 0;
    }
    for (uint32_t i = address; i < address + bytes; i++) {
        int written_now = m->lds_written[i] && m->lds_write_epoch[i] == m->epoch && m->lds_writer[i] != m->current;
        int read_now = m->lds_read_epoch[i] == m->epoch && m->lds_readers[i] & ~(1u << m->current);
        if (write) {
            int changes = m->lds[i] != written[i - address];
            if ((written_now || read_now) && (changes || !m->lds_written[i])) {
                FAULT(m, o, "race: local byte %u is written while another wavefront %s it between the same barriers", i,
                      written_now ? "writes" : "reads");
                return 0;
            }
            m->lds_written[i] = 1;
            m->lds_write_epoch[i] = m->epoch;
            m->lds_writer[i] = (uint8_t)m->current;
        } else {
            if (!m->lds_written[i]) { FAULT(m, o, "local byte %u is read and was never written", i); return 0; }
            if (written_now) {
                FAULT(m, o, "race: local byte %u is read while wavefront %d writes it between the same barriers", i, m->lds_writer[i]);
                return 0;
            }
            if (m->lds_read_epoch[i] != m->epoch) { m->lds_read_epoch[i] = m->epoch; m->lds_readers[i] = 0; }
            m->lds_readers[i] |= 1u << m->current;
        }
    }
    return m->lds + address;
}

static void local_load(machine *m, wave *w, const instruction *o, int offset, int dst) {
    uint64_t exec = pair(&w->s[EXEC]);
    uint32_t addresses[LANES];
    memcpy(addresses, w->v[o->addr], sizeof addresses);
    EACH if (exec >> l & 1) {
        uint8_t *from = local(m, o, addresses[l] + offset, o->bytes, 0, 0);
        if (m->failed) return;
        load_into(&w->v[dst][l], from, o);
    }
}

static void local_store(machine *m, wave *w, const instruction *o, int offset, int data) {
    uint64_t exec = pair(&w->s[EXEC]);
    uint8_t bytes[16];
    EACH if (exec >> l & 1) {
        store_from(&w->v[data][l], bytes, o);
        uint8_t *to = local(m, o, w->v[o->addr][l] + offset, o->bytes, 1, bytes);
        if (m->failed) return;
        memcpy(to, bytes, o->bytes);
    }
}

static void scalar_load(machine *m, wave *w, const instruction *o) {
    uint64_t address = pair(&w->s[o->base]) + (int64_t)o->offset;
    if (o->soffset >= 0) address += w->s[o->soffset];
    uint8_t *from = checked(m, o, address & ~(uint64_t)3, o->bytes, 0);
    if (from) memcpy(&w->s[o->sdst], from, o->bytes);
}
#endif
