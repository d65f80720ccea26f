/* Logits of tokens that stand in prompt or completion change by the row's penalties. */
#include <math.h>
#include <stdlib.h>

#include "../native/vector.h"

/* Numbers of a row: [repetition, frequency, presence]. */
enum { REPETITION, FREQUENCY, PRESENCE, NUM_PENALTIES };

static int by_number(const void *a, const void *b)
{
    const int64_t first = *(const int64_t *)a, second = *(const int64_t *)b;
    return (first > second) - (first < second);
}

INLINE void apply_repetition(float *logit, float penalty)
{
    *logit = *logit > 0 ? *logit / penalty : *logit * penalty;
}

/* prompt: each token once, in order; generated: as it came, sorted here. */
static void penalise_row(float *logits, int64_t vocab_size, const int64_t *prompt, int64_t num_prompt,
                         int64_t *generated, int64_t num_generated, const double *penalties)
{
    const float repetition = (float)penalties[REPETITION];
    const double frequency = penalties[FREQUENCY], presence = penalties[PRESENCE];
    qsort(generated, num_generated, sizeof *generated, by_number);
    if (repetition != 1)
        for (int64_t i = 0; i < num_prompt; i++)
            if (prompt[i] < vocab_size)
                apply_repetition(logits + prompt[i], repetition);
    for (int64_t first = 0, end; first < num_generated; first = end) {
        const int64_t token = generated[first];
        for (end = first + 1; end < num_generated && generated[end] == token; end++)
            ;
        if (token >= vocab_size)
            continue;
        if (repetition != 1 && !bsearch(&token, prompt, num_prompt, sizeof token, by_number))
            apply_repetition(logits + token, repetition);
        /* rounded once, whatever the compiler makes of it */
        logits[token] -= (float)fma(frequency, (double)(end - first), presence);
    }
}

/* logits […, vocab_size], rows `stride` apart, of which row i is number places[i]. Its tokens: prompts from
 * prompt_ends[i] to prompt_ends[i + 1], generated the same; penalties [num_rows, NUM_PENALTIES]. */
void penalise_tokens(float *logits, int64_t stride, int64_t vocab_size, const int64_t *places, int64_t num_rows,
                     const int64_t *prompts, const int64_t *prompt_ends, int64_t *generated,
                     const int64_t *generated_ends, const double *penalties)
{
#pragma omp parallel for schedule(dynamic) if (num_rows > 1)
    for (int64_t i = 0; i < num_rows; i++)
        penalise_row(logits + places[i] * stride, vocab_size, prompts + prompt_ends[i],
                     prompt_ends[i + 1] - prompt_ends[i], generated + generated_ends[i],
                     generated_ends[i + 1] - generated_ends[i], penalties + i * NUM_PENALTIES);
}
