/* Root mean square normalisation, in one pass over a row that stays in the first-level cache. */
#include <math.h>

#include "../native/vector.h"

/* `out` may be `x`. */
static void normalize(float *out, const float *x, const float *weight, int64_t features, float eps)
{
    vec squares = {0};
    for (int64_t i = 0; i < features; i += WIDTH) {
        vec value = load_first(x + i, features - i < WIDTH ? (int)(features - i) : WIDTH);
        squares += value * value;
    }
    float lanes[WIDTH], sum = 0;
    store(lanes, squares);
    for (int i = 0; i < WIDTH; i++)
        sum += lanes[i];
    const float scale = 1.0f / sqrtf(sum / features + eps);
    for (int64_t i = 0; i < features; i += WIDTH) {
        int count = features - i < WIDTH ? (int)(features - i) : WIDTH;
        store_first(out + i, load_first(x + i, count) * scale * load_first(weight + i, count), count);
    }
}

/* out [num_rows, features] = x / sqrt(mean(x^2) + eps) * weight; rows of x are `x_stride` apart. */
static void team_rms_norm(float *out, const float *x, int64_t x_stride, const float *weight, int64_t num_rows,
                          int64_t features, float eps)
{
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; row++)
        normalize(out + row * features, x + row * x_stride, weight, features, eps);
}

void rms_norm(float *out, const float *x, int64_t x_stride, const float *weight, int64_t num_rows, int64_t features,
              float eps)
{
#pragma omp parallel
    team_rms_norm(out, x, x_stride, weight, num_rows, features, eps);
}
