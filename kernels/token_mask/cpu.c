/* Logits of tokens that are not allowed become minus infinity. */
#include <math.h>

#include "../native/vector.h"

/* logits […, vocab_size], rows `stride` apart, of which row places[i] has mask i; allowed [num_masks, num_words]: a bit
 * for each token. */
void mask_tokens(float *logits, int64_t stride, const uint32_t *allowed, int64_t num_words, const int64_t *places,
                 int64_t num_masks, int64_t vocab_size)
{
#pragma omp parallel for schedule(static) if (num_masks > 1)
    for (int64_t mask = 0; mask < num_masks; mask++) {
        float *row = logits + places[mask] * stride;
        const uint32_t *words = allowed + mask * num_words;
        const int64_t num_whole = smaller(num_words, vocab_size / 32);
        for (int64_t word = 0; word < num_whole; word++) {
            float *to = row + word * 32;
            const uint32_t bits = words[word];
            if (bits == UINT32_MAX)
                continue;
            for (int i = 0; i < 32; i++)
                to[i] = bits >> i & 1 ? to[i] : -INFINITY;
        }
        for (int64_t token = num_whole * 32; token < smaller(num_words * 32, vocab_size); token++)
            if (!(words[token / 32] >> token % 32 & 1))
                row[token] = -INFINITY;
    }
}
