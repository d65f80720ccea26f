/* Root mean square normalisation, in one pass over a row that stays in the first-level cache. */
#include <math.h>

#include "../native/vector.h"

/* out [num_rows, features] = x / sqrt(mean(x^2) + eps) * weight; rows of x are `x_stride` apart. */
void rms_norm(float *out, const float *x, int64_t x_stride, const float *weight, int64_t num_rows, int64_t features,
              float eps)
{
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *from = x + row * x_stride;
        vec squares = {0};
        for (int64_t i = 0; i < features; i += WIDTH) {
            vec value = load_first(from + i, features - i < WIDTH ? (int)(features - i) : WIDTH);
            squares += value * value;
        }
        float lanes[WIDTH], sum = 0;
        store(lanes, squares);
        for (int i = 0; i < WIDTH; i++)
            sum += lanes[i];
        const float scale = 1.0f / sqrtf(sum / features + eps);
        for (int64_t i = 0; i < features; i += WIDTH) {
            int count = features - i < WIDTH ? (int)(features - i) : WIDTH;
            store_first(out + row * features + i,
                        load_first(from + i, count) * scale * load_first(weight + i, count), count);
        }
    }
}
