/* The gated activation silu(gate) * up, and heads times the sigmoid of their gates, each in one pass. */
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

/* x [num_tokens, num_heads, size] times the sigmoid of gate, in place. Strides of gate are in numbers. */
void sigmoid_gate(float *x, const float *gate, int64_t token_stride, int64_t head_stride, int64_t num_tokens,
                  int64_t num_heads, int64_t size)
{
#pragma omp parallel for schedule(static)
    for (int64_t head = 0; head < num_tokens * num_heads; head++) {
        const float *of = gate + head / num_heads * token_stride + head % num_heads * head_stride;
        float *to = x + head * size;
        for (int64_t i = 0; i < size; i += WIDTH) {
            int count = size - i < WIDTH ? (int)(size - i) : WIDTH;
            store_first(to + i, load_first(to + i, count) * sigmoid(load_first(of + i, count)), count);
        }
    }
}
