/* Digests of every primitive over blocks of 2^24 bit patterns, as fastpath/measure/primitives.py defines them; the
 * primitives are those of the exhaustive oracle, which equals the NumPy reference on all 2^32 inputs. */
#include "../reference/exhaustive/oracle.c"

static float sqrt_rn_(float x) { return sqrtf(x); }
static float reciprocal_(float x) { return 1 / x; }
static float round_bf16_(float x) {
    uint32_t u = to_bits(x);
    return from_bits((u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000);
}
static float exp2_of_nonpositive_(float x) { return exp2_nonpositive_(x > 0 ? -x : x); }

static const struct { const char *name; float (*function)(float); } FUNCTIONS[] = {
    {"exp", exp_}, {"exp2", exp2_}, {"exp2_nonpositive", exp2_of_nonpositive_}, {"log", log_}, {"rsqrt", rsqrt_},
    {"sigmoid", sigmoid_}, {"silu", silu_}, {"sqrt_rn", sqrt_rn_}, {"reciprocal", reciprocal_},
    {"round_bf16", round_bf16_},
};

int digest_block(const char *name, uint64_t first, uint64_t count, uint64_t *digest) {
    for (unsigned i = 0; i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++) {
        if (strcmp(FUNCTIONS[i].name, name)) continue;
        uint64_t sum = 0;
        for (uint64_t index = first; index < first + count; index++) {
            float x = from_bits((uint32_t)index), y = x != x ? x : FUNCTIONS[i].function(x);
            uint64_t word = index << 32 | (y != y ? 0x7FC00000u : to_bits(y));
            word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ull;
            word = (word ^ word >> 27) * 0x94D049BB133111EBull;
            sum += word ^ word >> 31;
        }
        *digest = sum;
        return 0;
    }
    return -1;
}
