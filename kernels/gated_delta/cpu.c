/* The gated delta rule between its projections, token by token: what a row computes depends neither on how its tokens are
 * cut into steps nor on other rows. Columns of a state do not depend on each other, so that a block of them stays in the
 * first-level cache for all tokens of a row. For one token a state is read and written where it is, in whole rows. */
#include <math.h>

#include "../native/vector.h"

/* Columns of a state that one thread takes through a row's tokens, in vectors. */
enum { BLOCK_VECTORS = 4, MOST_KEY_FEATURES = 256, MOST_TAPS = 8 };
#define BLOCK_COLUMNS (BLOCK_VECTORS * WIDTH)
/* Vectors of a state's row that one thread computes together for one token: registers hold three times as many. */
#if VECTOR_BYTES == 64
enum { ROW_VECTORS = 8 };
#else
enum { ROW_VECTORS = 4 };
#endif
#define ROW_COLUMNS (ROW_VECTORS * WIDTH)

/* Sizes of a layer. A token has `channels` features before the convolution, then gates, then two numbers of each value
 * head, in all `stride`. */
struct delta_sizes {
    int64_t key_heads, value_heads, key_size, value_size, taps, channels, stride;
};

/* One vector of channels of one row: the causal convolution and silu, in place. `window`: the latest inputs, oldest
 * first. */
static void convolve(float *x, int64_t num_tokens, int64_t stride, float *window, int is_new, const float *weights,
                     int64_t channels, int64_t taps, int count)
{
    vec latest[MOST_TAPS], weight[MOST_TAPS];
    for (int64_t j = 0; j < taps; j++)
        weight[j] = load_first(weights + j * channels, count);
    for (int64_t j = 0; j < taps - 1; j++)
        latest[j] = is_new ? (vec){0} : load_first(window + j * channels, count);
    for (int64_t t = 0; t < num_tokens; t++) {
        vec sum = {0};
        latest[taps - 1] = load_first(x + t * stride, count);
        for (int64_t j = 0; j < taps; j++) {
            sum = fused(latest[j], weight[j], sum);
            if (j)
                latest[j - 1] = latest[j];
        }
        store_first(x + t * stride, silu(sum), count);
    }
    for (int64_t j = 0; j < taps - 1; j++)
        store_first(window + j * channels, latest[j], count);
}

/* x *= scale / sqrt(sum(x^2) + 1e-6), over one head. */
static void to_unit_length(float *x, int64_t features, float scale)
{
    vec squares = {0};
    for (int64_t i = 0; i < features; i += WIDTH) {
        vec value = load_first(x + i, (int)smaller(features - i, WIDTH));
        squares = fused(value, value, squares);
    }
    scale /= sqrtf(lane_sum(squares) + 1e-6f);
    for (int64_t i = 0; i < features; i += WIDTH) {
        const int count = (int)smaller(features - i, WIDTH);
        store_first(x + i, load_first(x + i, count) * scale, count);
    }
}

/* log(1 + e^x); x itself above 20, where the difference is below the last digit. */
static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* Heads of queries and keys to unit length, queries over the root of their size as well; gates of the state to factors. */
static void prepare(float *token, const struct delta_sizes *s, const float *decay_log, const float *step_bias)
{
    for (int64_t h = 0; h < s->key_heads; h++) {
        to_unit_length(token + h * s->key_size, s->key_size, 1.0f / sqrtf((float)s->key_size));
        to_unit_length(token + (s->key_heads + h) * s->key_size, s->key_size, 1.0f);
    }
    float *write = token + s->stride - 2 * s->value_heads, *decay = write + s->value_heads;
    for (int64_t h = 0; h < s->value_heads; h++) {
        write[h] = 1.0f / (1.0f + expf(-write[h]));
        decay[h] = expf(-expf(decay_log[h]) * softplus(decay[h] + step_bias[h]));
    }
}

/* One token of a block of columns, in `vectors`: state = decay * state + key (write * (value - decay * key state))^T, and
 * its product with the query. `stride`: numbers from one row of the state to the next. */
INLINE void update(float *state, int64_t stride, const int vectors, const float *query, const float *key,
                   const float *value, float *out, float decay, float write, int64_t key_size, int64_t columns)
{
    vec found[ROW_VECTORS], change[ROW_VECTORS], sum[ROW_VECTORS];
    for (int b = 0; b < vectors; b++)
        found[b] = sum[b] = (vec){0};
    for (int64_t i = 0; i < key_size; i++)
        for (int b = 0; b < vectors; b++)
            found[b] = fused(all_lanes(key[i]), load(state + i * stride + b * WIDTH), found[b]);
    for (int b = 0; b < vectors; b++) {
        const int count = (int)larger(0, smaller(columns - b * WIDTH, WIDTH));
        change[b] = (fused(all_lanes(-decay), found[b], load_first(value + b * WIDTH, count))) * write;
    }
    for (int64_t i = 0; i < key_size; i++)
        for (int b = 0; b < vectors; b++) {
            float *place = state + i * stride + b * WIDTH;
            const vec next = fused(all_lanes(key[i]), change[b], load(place) * decay);
            store(place, next);
            sum[b] = fused(all_lanes(query[i]), next, sum[b]);
        }
    for (int b = 0; b < vectors; b++)
        store_first(out + b * WIDTH, sum[b], (int)larger(0, smaller(columns - b * WIDTH, WIDTH)));
}

/* One token of a row through ROW_COLUMNS columns of one head, in place. `state` [key_size, value_size] from the first of
 * these columns on. */
static void walk_in_place(float *state, int is_new, const float *token, float *out, const struct delta_sizes *s,
                          int64_t head, int64_t first_column)
{
    const int64_t key_head = head / (s->value_heads / s->key_heads), place = head * s->value_size + first_column;
    const float *query = token + key_head * s->key_size, *gates = token + s->stride - 2 * s->value_heads;
    for (int64_t i = 0; is_new && i < s->key_size; i++)
        memset(state + i * s->value_size, 0, ROW_COLUMNS * sizeof(float));
    update(state, s->value_size, ROW_VECTORS, query, query + s->key_heads * s->key_size,
           token + 2 * s->key_heads * s->key_size + place, out + place, gates[s->value_heads + head], gates[head],
           s->key_size, ROW_COLUMNS);
}

/* All tokens of a row through a block of columns of one head. `state` [key_size, value_size] from the block on. */
static void walk(float *state, int is_new, const float *tokens, float *out, int64_t num_tokens, const struct delta_sizes *s,
                 int64_t head, int64_t first_column)
{
    float block[MOST_KEY_FEATURES * BLOCK_COLUMNS];
    const int64_t columns = smaller(s->value_size - first_column, BLOCK_COLUMNS);
    const int64_t key_head = head / (s->value_heads / s->key_heads), place = head * s->value_size + first_column;
    memset(block, 0, s->key_size * BLOCK_COLUMNS * sizeof(float));
    for (int64_t i = 0; !is_new && i < s->key_size; i++)
        memcpy(block + i * BLOCK_COLUMNS, state + i * s->value_size, columns * sizeof(float));
    for (int64_t t = 0; t < num_tokens; t++) {
        const float *token = tokens + t * s->stride, *query = token + key_head * s->key_size;
        const float *gates = token + s->stride - 2 * s->value_heads;
        update(block, BLOCK_COLUMNS, BLOCK_VECTORS, query, query + s->key_heads * s->key_size, token + 2 * s->key_heads * s->key_size + place,
               out + t * s->value_heads * s->value_size + place, gates[s->value_heads + head], gates[head], s->key_size,
               columns);
    }
    for (int64_t i = 0; i < s->key_size; i++)
        memcpy(state + i * s->value_size, block + i * BLOCK_COLUMNS, columns * sizeof(float));
}

/* out = out / sqrt(mean(out^2) + eps) * weight * silu(gate), over one head. */
static void gate_norm(float *out, const float *gate, const float *weight, int64_t features, float eps)
{
    vec squares = {0};
    for (int64_t i = 0; i < features; i += WIDTH) {
        vec value = load_first(out + i, (int)smaller(features - i, WIDTH));
        squares = fused(value, value, squares);
    }
    const float scale = 1.0f / sqrtf(lane_sum(squares) / features + eps);
    for (int64_t i = 0; i < features; i += WIDTH) {
        const int count = (int)smaller(features - i, WIDTH);
        const vec normed = load_first(out + i, count) * scale * load_first(weight + i, count);
        store_first(out + i, normed * silu(load_first(gate + i, count)), count);
    }
}

/* projected [num_tokens, channels + values + 2 * value_heads], overwritten; out [num_tokens, values], where values =
 * value_heads * value_size. Tokens first[r] to first[r + 1] are those of row r, whose window [taps - 1, channels] and
 * states [value_heads, key_size, value_size] are at states + places[r]; both are zero where is_new[r]. conv [taps,
 * channels]. */
void gated_delta(float *out, float *projected, float *states, const int64_t *first, const int64_t *places,
                 const uint8_t *is_new, int64_t num_rows, const float *conv, const float *decay_log, const float *step_bias,
                 const float *norm, float eps, int64_t key_heads, int64_t value_heads, int64_t key_size, int64_t value_size,
                 int64_t taps)
{
    const int64_t values = value_heads * value_size, channels = 2 * key_heads * key_size + values;
    const struct delta_sizes sizes = {key_heads,  value_heads, key_size, value_size,
                                      taps,       channels,    channels + values + 2 * value_heads};
    const int64_t vectors = (channels + WIDTH - 1) / WIDTH, blocks = (value_size + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t n = 0; n < num_rows * vectors; n++) {
            const int64_t row = n / vectors, channel = n % vectors * WIDTH;
            convolve(projected + first[row] * sizes.stride + channel, first[row + 1] - first[row], sizes.stride,
                     states + places[row] + channel, is_new[row], conv + channel, channels, taps,
                     (int)smaller(channels - channel, WIDTH));
        }
#pragma omp for schedule(static)
        for (int64_t t = first[0]; t < first[num_rows]; t++)
            prepare(projected + t * sizes.stride, &sizes, decay_log, step_bias);
#pragma omp for schedule(dynamic)
        for (int64_t n = 0; n < num_rows * value_heads * blocks; n++) {
            const int64_t row = n / (value_heads * blocks), head = n / blocks % value_heads, column = n % blocks * BLOCK_COLUMNS;
            float *state = states + places[row] + (taps - 1) * channels + head * key_size * value_size + column;
            if (first[row + 1] - first[row] == 1 && value_size % ROW_COLUMNS == 0) {
                if (column % ROW_COLUMNS == 0)
                    walk_in_place(state, is_new[row], projected + first[row] * sizes.stride, out + first[row] * values, &sizes,
                                  head, column);
                continue;
            }
            walk(state, is_new[row], projected + first[row] * sizes.stride, out + first[row] * values,
                 first[row + 1] - first[row], &sizes, head, column);
        }
#pragma omp for schedule(static)
        for (int64_t n = first[0] * value_heads; n < first[num_rows] * value_heads; n++) {
            const int64_t token = n / value_heads, place = n % value_heads * value_size;
            gate_norm(out + token * values + place, projected + token * sizes.stride + channels + place, norm, value_size,
                      eps);
        }
    }
}
