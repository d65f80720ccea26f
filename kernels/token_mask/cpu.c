/* Logits of tokens that are not allowed become minus infinity. */
#include <math.h>

#include "../native/vector.h"

/* logits [num_rows, vocab_size], rows `stride` apart; allowed [num_rows, num_words]: a bit for each token. */
void mask_tokens(float *logits, int64_t stride, const uint32_t *allowed, int64_t num_words, int64_t num_rows,
                 int64_t vocab_size)
{
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < num_rows; row++) {
        const uint32_t *words = allowed + row * num_words;
        for (int64_t word = 0; word < num_words && word * 32 < vocab_size; word++) {
            float *to = logits + row * stride + word * 32;
            const uint32_t bits = words[word];
            if (bits == UINT32_MAX)
                continue;
            const int count = vocab_size - word * 32 < 32 ? (int)(vocab_size - word * 32) : 32;
            for (int i = 0; i < count; i++)
                to[i] = bits >> i & 1 ? to[i] : -INFINITY;
        }
    }
}
