/* Rotation of query and key heads, and the keys and values to their places in the pool, in one pass over a step. */
#include "../native/vector.h"

/* Half-split rotation of one head: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin, over `half` pairs. */
INLINE void rotate(float *head, const float *cosine, const float *sine, int64_t half)
{
    for (int64_t i = 0; i < half; i += WIDTH) {
        int count = half - i < WIDTH ? (int)(half - i) : WIDTH;
        vec first = load_first(head + i, count), second = load_first(head + half + i, count);
        vec c = load_first(cosine + i, count), s = load_first(sine + i, count);
        store_first(head + i, first * c - second * s, count);
        store_first(head + half + i, second * c + first * s, count);
    }
}

/* qkv [num_tokens, num_heads + 2 num_kv_heads, head_dim], changed in place. cosine, sine [num_tokens, half]; half 0:
 * no rotation. Key and value heads of a token go to rows kv_rows[token] [2 num_kv_heads] of head_dim numbers each, in fp32 or bf16,
 * `layer` times kv_strides[token] rows further. */
static void team_rotate_and_store(float *qkv, const float *cosine, const float *sine, int64_t half, void *pool, int64_t type,
                                  const int64_t *kv_rows, const int64_t *kv_strides, int64_t layer, int64_t num_tokens,
                                  int64_t num_heads, int64_t num_kv_heads, int64_t head_dim)
{
    const int64_t all_heads = num_heads + 2 * num_kv_heads;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_tokens; t++) {
        float *heads = qkv + t * all_heads * head_dim;
        for (int64_t h = 0; half && h < num_heads + num_kv_heads; h++)
            rotate(heads + h * head_dim, cosine + t * half, sine + t * half, half);
        for (int64_t h = 0; h < 2 * num_kv_heads; h++) {
            const float *head = heads + (num_heads + h) * head_dim;
            const int64_t row = kv_rows[t * 2 * num_kv_heads + h] + layer * kv_strides[t];
            void *to = (char *)pool + row * head_dim * SIZE_OF(type);
            if (type == FP32)
                memcpy(to, head, head_dim * sizeof(float));
            else
                for (int64_t i = 0; i < head_dim; i += WIDTH)
                    store_brains((uint16_t *)to + i, load(head + i));
        }
    }
}

void rotate_and_store(float *qkv, const float *cosine, const float *sine, int64_t half, void *pool, int64_t type,
                      const int64_t *kv_rows, const int64_t *kv_strides, int64_t layer, int64_t num_tokens,
                      int64_t num_heads, int64_t num_kv_heads, int64_t head_dim)
{
#pragma omp parallel
    team_rotate_and_store(qkv, cosine, sine, half, pool, type, kv_rows, kv_strides, layer, num_tokens, num_heads,
                          num_kv_heads, head_dim);
}
