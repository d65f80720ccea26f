/* Unmerged LoRA on CPUs: shrink and expand of all segments of a step at one packed layer, in one call. */
#include "../native/lora.h"

/* y [num_tokens, y_stride] += LoRA of x [num_tokens, in_features]. `scratch`: see `lora_of`. */
void lora_add(float *y, int64_t y_stride, const float *x, int64_t in_features, const Segments *segments, float *scratch)
{
    const Lora lora = lora_of(y, y_stride, x, in_features, *segments, scratch);
#pragma omp parallel
    add_all(&lora);
}
