/* Causal attention on views of the pool: prompts, chunks and decoding rows alike, one call per layer.
 *
 * Work is cut into blocks of BLOCK_TOKENS new tokens of one sequence at one key head, with the G query heads that share
 * it. Each query's numbers are computed in an order that depends on its context alone: the same bits in any batch, and
 * however its prompt was cut into chunks.
 */
#include <math.h>
#include <omp.h>

#include "../native/vector.h"

#define BLOCK_TOKENS 4
#define TILE_KEYS 64 /* of 64 numbers: 16 KiB, half a first-level cache */
#define VALUE_ROWS 4
#define VALUE_VECTORS 4

/* New tokens of one sequence, step rows row_start .. + num_tokens; keys of layer 0 begin at `offset` in the pool. */
typedef struct {
    int64_t row_start, num_tokens, num_past, offset, capacity_tokens;
} Span;

typedef struct {
    float *out;         /* [T, H * D] */
    const float *q;     /* [T, H, D], rows `q_stride` apart */
    const void *pool;   /* of `type`, FP32 or BF16 */
    int64_t type, q_stride, layer, num_kv_heads, per_kv, head_dim, window; /* window 0: none */
    float scale, softcap;                                            /* softcap 0: none */
} Attention;

/* Sums over the lanes of WIDTH vectors, as one vector in their order. */
INLINE vec lane_sums(vec *v)
{
#if VECTOR_BYTES == 64
    const vec_of_int even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
#else
    const vec_of_int even = {0, 2, 4, 6, 8, 10, 12, 14};
#endif
    for (int n = WIDTH / 2; n; n /= 2)
        for (int i = 0; i < n; i++)
            v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], even) + __builtin_shuffle(v[2 * i], v[2 * i + 1], even + 1);
    return v[0];
}

/* WIDTH numbers of keys or values, from number `i` on. */
INLINE vec stored(const void *numbers, int64_t i, const int TYPE)
{
    return TYPE == FP32 ? load((const float *)numbers + i) : widened_brains((const uint16_t *)numbers + i, WIDTH);
}

/* scores[position] = q . key for positions first .. end, WIDTH at a time; more are written up to a whole vector. */
INLINE void scores_of(float *scores, const float *q, const void *keys, int64_t first, int64_t end, const int64_t D,
                      const int TYPE)
{
    for (int64_t position = first; position < end; position += WIDTH) {
        vec sums[WIDTH];
        for (int j = 0; j < WIDTH; j++) {
            const int64_t key = (position + j < end ? position + j : end - 1) * D;
            sums[j] = load(q) * stored(keys, key, TYPE);
            for (int64_t d = WIDTH; d < D; d += WIDTH)
                sums[j] += load(q + d) * stored(keys, key + d, TYPE);
        }
        store(scores + position, lane_sums(sums));
    }
}

/* Scores of positions first .. end become their weights, not yet divided by their sum, which is returned. A score that
 * is NaN or infinite makes the sum NaN, as the distance of infinity to itself is. */
static float weigh(float *scores, int64_t first, int64_t end, float scale, float softcap)
{
    vec largest = (vec){0} - INFINITY;
    float lanes[WIDTH], highest = -INFINITY, sum = 0;
    for (int64_t p = first; softcap != 0 && p < end; p++)
        scores[p] = softcap * tanhf(scores[p] * scale / softcap) / scale;
    int64_t p = first;
    for (; p + WIDTH <= end; p += WIDTH)
        largest = larger_lanes(largest, load(scores + p));
    store(lanes, largest);
    for (int i = 0; i < WIDTH; i++)
        highest = lanes[i] > highest ? lanes[i] : highest;
    for (; p < end; p++)
        highest = scores[p] > highest ? scores[p] : highest;
    vec sums = {0};
    for (p = first; p < end; p += WIDTH) {
        int count = end - p < WIDTH ? (int)(end - p) : WIDTH;
        store_first(scores + p, exponential((load_first(scores + p, count) - highest) * scale), count);
        sums += load_first(scores + p, count);
    }
    store(lanes, sums);
    for (int i = 0; i < WIDTH; i++)
        sum += lanes[i];
    return sum;
}

/* out[row][VECTORS columns] += weight times value over positions first .. end, for ROWS rows. */
INLINE void mix(float *const *out, const float *const *weights, const void *values, int64_t column, int64_t first,
                int64_t end, int64_t D, const int ROWS, const int VECTORS, const int TYPE)
{
    vec sums[VALUE_ROWS][VALUE_VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = load(out[r] + v * WIDTH);
    for (int64_t p = first; p < end; p++)
        for (int v = 0; v < VECTORS; v++) {
            vec value = stored(values, p * D + column + v * WIDTH, TYPE);
            for (int r = 0; r < ROWS; r++)
                sums[r][v] = fused(all_lanes(weights[r][p]), value, sums[r][v]);
        }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++)
            store(out[r] + v * WIDTH, sums[r][v]);
}

INLINE void mix_rows(float *const *out, const float *const *weights, const void *values, int64_t column, int64_t first,
                     int64_t end, int64_t D, int rows, const int VECTORS, const int TYPE)
{
    switch (rows) {
    case 1: mix(out, weights, values, column, first, end, D, 1, VECTORS, TYPE); break;
    case 2: mix(out, weights, values, column, first, end, D, 2, VECTORS, TYPE); break;
    case 3: mix(out, weights, values, column, first, end, D, 3, VECTORS, TYPE); break;
    default: mix(out, weights, values, column, first, end, D, 4, VECTORS, TYPE);
    }
}

/* One tile of values into all columns of a block's rows. */
INLINE void mix_tile(float *const *out, const float *const *weights, const void *values, int64_t first, int64_t end,
                     int64_t D, int64_t num_queries, const int TYPE)
{
    for (int64_t i = 0; i < num_queries; i += VALUE_ROWS) {
        int rows = num_queries - i < VALUE_ROWS ? (int)(num_queries - i) : VALUE_ROWS;
        for (int64_t d = 0, vectors; d < D; d += vectors * WIDTH) {
            float *columns[VALUE_ROWS];
            for (int r = 0; r < rows; r++)
                columns[r] = out[i + r] + d;
            vectors = D - d >= VALUE_VECTORS * WIDTH ? VALUE_VECTORS : 1;
            if (vectors == VALUE_VECTORS)
                mix_rows(columns, weights + i, values, d, first, end, D, rows, VALUE_VECTORS, TYPE);
            else
                mix_rows(columns, weights + i, values, d, first, end, D, rows, 1, TYPE);
        }
    }
}

/* A query of a block: its context is first .. end; it reads `q`, and its weights stand in `scores`. */
typedef struct {
    int64_t first, end;
    const float *q;
    float *scores;
} Query;

INLINE void score_tile(const Query *query, const void *keys, int64_t tile, int64_t D, const int TYPE)
{
    int64_t first = larger(query->first, tile), end = smaller(query->end, tile + TILE_KEYS);
    if (D == 64) /* the sizes of most models, with addresses known to the compiler */
        scores_of(query->scores, query->q, keys, first, end, 64, TYPE);
    else if (D == 128)
        scores_of(query->scores, query->q, keys, first, end, 128, TYPE);
    else
        scores_of(query->scores, query->q, keys, first, end, D, TYPE);
}

/* Tokens `token` .. `token_end` of a span at one key head. `scratch`: a row of `stride` numbers per query. */
INLINE void block(const Attention *a, const Span *span, int64_t head, int64_t token, int64_t token_end, float *scratch,
                  int64_t stride, const int TYPE)
{
    const int64_t D = a->head_dim, head_stride = span->capacity_tokens * D;
    const int64_t start = span->offset + (2 * a->layer * a->num_kv_heads + head) * head_stride;
    const char *keys = (const char *)a->pool + start * SIZE_OF(TYPE);
    const char *values = keys + a->num_kv_heads * head_stride * SIZE_OF(TYPE);
    const int64_t num_queries = (token_end - token) * a->per_kv, end = span->num_past + token_end;
    Query queries[num_queries];
    float *out[num_queries];
    const float *weights[num_queries];
    for (int64_t i = 0; i < num_queries; i++) {
        int64_t t = token + i / a->per_kv, row = span->row_start + t, at = (head * a->per_kv + i % a->per_kv) * D;
        int64_t context = span->num_past + t + 1;
        queries[i] = (Query){a->window ? larger(context - a->window, 0) : 0, context, a->q + row * a->q_stride + at,
                             scratch + i * stride};
        weights[i] = queries[i].scores;
        out[i] = a->out + row * a->num_kv_heads * a->per_kv * D + at;
        memset(out[i], 0, D * sizeof(float));
    }
    const int64_t first = queries[0].first;
    for (int64_t tile = first; tile < end; tile += TILE_KEYS)
        for (int64_t i = 0; i < num_queries; i++)
            score_tile(&queries[i], keys, tile, D, TYPE);
    float totals[num_queries];
    for (int64_t i = 0; i < num_queries; i++) {
        totals[i] = weigh(queries[i].scores, queries[i].first, queries[i].end, a->scale, a->softcap);
        /* of positions that another query of the block sees */
        memset(queries[i].scores + first, 0, (queries[i].first - first) * sizeof(float));
        memset(queries[i].scores + queries[i].end, 0, (end - queries[i].end) * sizeof(float));
    }
    for (int64_t tile = first; tile < end; tile += TILE_KEYS)
        mix_tile(out, weights, values, tile, smaller(end, tile + TILE_KEYS), D, num_queries, TYPE);
    for (int64_t i = 0; i < num_queries; i++)
        for (int64_t d = 0; d < D; d++)
            out[i][d] /= totals[i];
}

static void block_fp32(const Attention *a, const Span *span, int64_t head, int64_t token, int64_t token_end,
                       float *scratch, int64_t stride)
{
    block(a, span, head, token, token_end, scratch, stride, FP32);
}

static void block_bf16(const Attention *a, const Span *span, int64_t head, int64_t token, int64_t token_end,
                       float *scratch, int64_t stride)
{
    block(a, span, head, token, token_end, scratch, stride, BF16);
}

/* Attend all spans. `block_starts` [num_spans + 1]: number of blocks before each span. `scratch`: per thread
 * BLOCK_TOKENS * per_kv rows of `stride` numbers; stride: the longest context and one vector more. */
void attend_spans(float *out, const float *q, int64_t q_stride, const void *pool, int64_t type, const Span *spans,
                  const int64_t *block_starts, int64_t num_spans, int64_t layer, int64_t num_kv_heads, int64_t per_kv,
                  int64_t head_dim, int64_t window, float scale, float softcap, float *scratch, int64_t stride,
                  int64_t num_threads)
{
    Attention a = {out, q, pool, type, q_stride, layer, num_kv_heads, per_kv, head_dim, window, scale, softcap};
#pragma omp parallel for schedule(dynamic, 4) num_threads(num_threads)
    for (int64_t item = 0; item < block_starts[num_spans] * num_kv_heads; item++) {
        int64_t low = 0, high = num_spans, number = item / num_kv_heads;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if (block_starts[middle] <= number)
                low = middle;
            else
                high = middle;
        }
        int64_t token = (number - block_starts[low]) * BLOCK_TOKENS, end = token + BLOCK_TOKENS;
        (type == FP32 ? block_fp32 : block_bf16)(&a, &spans[low], item % num_kv_heads, token,
                                                 smaller(end, spans[low].num_tokens),
                                                 scratch + omp_get_thread_num() * BLOCK_TOKENS * per_kv * stride, stride);
    }
}
