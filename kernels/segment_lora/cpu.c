/* Unmerged LoRA on CPUs: shrink and expand of all segments of a step at one packed layer, in one call. */
#include "../native/lora.h"

/* y [num_tokens, y_stride] += LoRA of x [num_tokens, in_features]. `scratch`: see `lora_of`. */
void lora_add(float *y, int64_t y_stride, const float *x, int64_t in_features, const Segment *segments,
              int64_t num_segments, float *scratch, int64_t scratch_stride)
{
    const Lora lora = lora_of(y, y_stride, x, in_features, segments, num_segments, scratch, scratch_stride);
#pragma omp parallel
    add_all(&lora);
}
