/* The gated activation silu(gate) * up, in one pass. */
#include "../native/vector.h"

/* packed [num_tokens, 2 * inner], gate beside up, to out [num_tokens, inner]. */
static void team_silu_gate(float *out, const float *packed, int64_t num_tokens, int64_t inner)
{
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_tokens; t++) {
        const float *gate = packed + t * 2 * inner, *up = gate + inner;
        for (int64_t i = 0; i < inner; i += WIDTH) {
            int count = inner - i < WIDTH ? (int)(inner - i) : WIDTH;
            store_first(out + t * inner + i, silu(load_first(gate + i, count)) * load_first(up + i, count), count);
        }
    }
}

void silu_gate(float *out, const float *packed, int64_t num_tokens, int64_t inner)
{
#pragma omp parallel
    team_silu_gate(out, packed, num_tokens, inner);
}
