/* Causal attention on views of the pool: prompts, chunks and decoding rows alike, one call per layer.
 *
 * Work is cut into blocks of new tokens of one sequence at one key head, with the G query heads that share it. A block takes one
 * tile of keys after the other, with weights relative to the highest score so far (Milakov and Gimelshein, 2018, algorithm 3). Keys
 * are transposed first, since a score then needs no sum over lanes. Each query's numbers are computed in an order that depends on
 * its context alone: the same bits in any batch, and however its prompt was cut into chunks.
 *
 * Queries, weights, keys and values are multiplied in fp32. Where the pool is in bf16 and the processor multiplies pairs of
 * bf16 (AVX512_BF16), so are they, with sums in fp32: pairs along a head for scores, pairs of positions for values.
 */
#include <math.h>
#include <omp.h>

#include "../native/vector.h"

#define TILE_KEYS 64 /* of 64 numbers: 16 KiB, half a first-level cache */
#define TILE_VECTORS (TILE_KEYS / WIDTH)
/* Queries and vectors of keys, rows and vectors of values whose sums are in registers together: 12 and 16 of 32 with AVX-512, or
 * of 16 with AVX2. Not tuned. */
#define SCORE_ROWS 6
#define SCORE_VECTORS 2
#define VALUE_ROWS 4
#define VALUE_VECTORS 4
/* Products of a score that are added one after the other: of long chains more is lost by rounding. */
#define CHAIN 64
#define LINE 64 /* bytes that memory delivers together */
#define UNROLLED_BY_16 _Pragma("GCC unroll 16")

/* How a block multiplies: FP32 and BF16 are types of the pool, whose numbers are widened. */
enum { IN_PAIRS = 100 };
#define POOL_TYPE(KIND) ((KIND) == IN_PAIRS ? BF16 : (KIND))
#define NUMBERS_OF_LANE(KIND) ((KIND) == IN_PAIRS ? 2 : 1)

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
    const float *sinks; /* [H]: scores that join the denominators of softmax; NULL: none */
} Attention;

/* A query of a block: its context is first .. end. `q`: its numbers, in fp32 or as pairs. `weights` [TILE_KEYS]: its scores with
 * a tile of keys, then its weights; as pairs they are the first half. `highest`: of all scores so far. `sums`: of all weights
 * so far, as they are if that score weighs 1; so is `out`. */
typedef struct {
    int64_t first, end;
    const void *q;
    float *weights, *out, highest;
    vec sums;
} Query;

/* WIDTH lanes of keys, values or queries from number `i` on, each a number or a pair. */
INLINE vec lanes_of(const void *numbers, int64_t i, const int KIND)
{
    if (KIND == BF16)
        return widened_brains((const uint16_t *)numbers + i, WIDTH);
    return load((const float *)((const char *)numbers + i * SIZE_OF(POOL_TYPE(KIND))));
}

/* sum + a * b, of numbers or of pairs. */
INLINE vec multiplied(vec a, vec b, vec sum, const int KIND)
{
#if VECTOR_BYTES == 64
    if (KIND == IN_PAIRS) { /* the instruction itself: an intrinsic would want copies of all its callers */
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
#endif
    return fused(a, b, sum);
}

/* WIDTH vectors, transposed: four (three) times, the first half is interleaved with the second. */
INLINE void transpose(vec *v)
{
#if VECTOR_BYTES == 64
    const vec_of_int low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
#else
    const vec_of_int low = {0, 8, 1, 9, 2, 10, 3, 11};
#endif
    UNROLLED_BY_16 for (int n = 1; n < WIDTH; n *= 2) {
        vec to[WIDTH];
        UNROLLED_BY_16 for (int i = 0; i < WIDTH / 2; i++) {
            to[2 * i] = __builtin_shuffle(v[i], v[i + WIDTH / 2], low);
            to[2 * i + 1] = __builtin_shuffle(v[i], v[i + WIDTH / 2], low + WIDTH / 2);
        }
        memcpy(v, to, sizeof to);
    }
}

/* tile [D or pairs of D, SCORE_VECTORS vectors of keys] from keys of positions first .. end; the last is repeated. */
INLINE void transpose_keys(vec *tile, const void *keys, int64_t first, int64_t end, int64_t D, const int KIND)
{
    const int64_t step = WIDTH * NUMBERS_OF_LANE(KIND), size = SIZE_OF(POOL_TYPE(KIND));
    for (int v = 0; v < SCORE_VECTORS; v++)
        for (int64_t d = 0, lane = 0; d < D; d += step, lane += WIDTH) {
            vec rows[WIDTH];
            UNROLLED_BY_16 for (int j = 0; j < WIDTH; j++) {
                const int64_t position = smaller(first + v * WIDTH + j, end - 1);
                rows[j] = lanes_of((const char *)keys + position * D * size, d, KIND);
            }
            transpose(rows);
            UNROLLED_BY_16 for (int j = 0; j < WIDTH; j++)
                tile[(lane + j) * SCORE_VECTORS + v] = rows[j];
        }
}

/* Scores of ROWS queries with transposed keys, from `place` of the tile on: sums of chains of products along the head. `ahead`: as
 * many keys that are fetched meanwhile, or NULL. */
INLINE void scores_of(const Query *queries, const vec *keys, int64_t place, const char *ahead, const int64_t D, const int ROWS,
                      const int KIND)
{
    const int64_t step = SCORE_VECTORS * WIDTH * NUMBERS_OF_LANE(KIND) * SIZE_OF(POOL_TYPE(KIND));
    const int64_t lanes = D / NUMBERS_OF_LANE(KIND);
    vec sums[SCORE_ROWS][SCORE_VECTORS] = {0};
    for (int64_t first = 0; first < lanes; first += CHAIN) {
        vec chains[SCORE_ROWS][SCORE_VECTORS];
        UNROLLED_BY_16 for (int r = 0; r < ROWS; r++)
            UNROLLED_BY_16 for (int v = 0; v < SCORE_VECTORS; v++)
                chains[r][v] = (vec){0};
        for (int64_t d = first; d < smaller(first + CHAIN, lanes); d++) {
            for (int64_t byte = 0; ahead && byte < step; byte += LINE)
                __builtin_prefetch(ahead + d * step + byte);
            UNROLLED_BY_16 for (int r = 0; r < ROWS; r++) {
                const vec q = all_lanes(((const float *)queries[r].q)[d]);
                UNROLLED_BY_16 for (int v = 0; v < SCORE_VECTORS; v++)
                    chains[r][v] = multiplied(q, keys[d * SCORE_VECTORS + v], chains[r][v], KIND);
            }
        }
        UNROLLED_BY_16 for (int r = 0; r < ROWS; r++)
            UNROLLED_BY_16 for (int v = 0; v < SCORE_VECTORS; v++)
                sums[r][v] += chains[r][v];
    }
    UNROLLED_BY_16 for (int r = 0; r < ROWS; r++)
        UNROLLED_BY_16 for (int v = 0; v < SCORE_VECTORS; v++)
            store(queries[r].weights + place + v * WIDTH, sums[r][v]);
}

/* Scores of queries with a tile of keys, of which some see those below `end`. Keys are transposed for few queries, too, so that a
 * score is computed in one order only. */
INLINE void score(const Query *queries, int64_t num_queries, const void *keys, int64_t tile, int64_t end, const int64_t D,
                  const int KIND)
{
    const int64_t step = SCORE_VECTORS * WIDTH;
    vec transposed[D / NUMBERS_OF_LANE(KIND) * SCORE_VECTORS];
    for (int64_t position = larger(tile, queries[0].first / step * step); position < end; position += step) {
        int64_t i = 0;
        while (queries[i].end <= position) /* contexts grow along a block */
            i++;
        transpose_keys(transposed, keys, position, end, D, KIND);
        const char *ahead = (const char *)keys + (position + step) * D * SIZE_OF(POOL_TYPE(KIND));
        for (; i < num_queries; i += SCORE_ROWS, ahead = NULL)
            switch (smaller(num_queries - i, SCORE_ROWS)) {
            case 1: scores_of(queries + i, transposed, position - tile, ahead, D, 1, KIND); break;
            case 2: scores_of(queries + i, transposed, position - tile, ahead, D, 2, KIND); break;
            case 3: scores_of(queries + i, transposed, position - tile, ahead, D, 3, KIND); break;
            case 4: scores_of(queries + i, transposed, position - tile, ahead, D, 4, KIND); break;
            case 5: scores_of(queries + i, transposed, position - tile, ahead, D, 5, KIND); break;
            default: scores_of(queries + i, transposed, position - tile, ahead, D, 6, KIND);
            }
    }
}

#if VECTOR_BYTES == 64
/* WIDTH numbers rounded to bf16. */
INLINE void store_pairs(uint16_t *to, vec v, int count)
{
    __m256i brains;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(brains) : "v"(v));
    _mm256_mask_storeu_epi16(to, (__mmask16)((1u << count) - 1), brains);
}
#else
INLINE void store_pairs(uint16_t *to, vec v, int count) {}
#endif

/* Lanes of `v`, of places `place` and so on, that are first .. end; the others are `otherwise`. */
INLINE vec lanes_between(vec v, int64_t place, int64_t first, int64_t end, float otherwise)
{
    const vec_of_int places = lane_numbers + (int32_t)place;
    const vec_of_int is_seen = (places >= (int32_t)first) & (places < (int32_t)end);
    return (vec)((is_seen & (vec_of_int)v) | (~is_seen & (vec_of_int)all_lanes(otherwise)));
}

/* A query's scores with a tile become its weights. A score that is NaN or infinite makes their sum NaN, as the distance of
 * infinity to itself is. */
INLINE void weigh(Query *query, int64_t tile, float scale, float softcap, int64_t D, const int KIND)
{
    const int64_t first = larger(query->first - tile, 0), end = smaller(query->end - tile, TILE_KEYS);
    const int sees_all = first == 0 && end == TILE_KEYS;
    const float factor = scale * 1.44269504f; /* e^x = 2^(x / log 2) */
    float *scores = query->weights;
    vec found[TILE_VECTORS], largest = all_lanes(-INFINITY);
    for (int64_t p = first; softcap != 0 && p < end; p++)
        scores[p] = softcap * tanhf(scores[p] * scale / softcap) / scale;
    UNROLLED_BY_16 for (int v = 0; v < TILE_VECTORS; v++) {
        found[v] = load(scores + v * WIDTH);
        if (!sees_all)
            found[v] = lanes_between(found[v], v * WIDTH, first, end, -INFINITY);
        largest = larger_lanes(found[v], largest);
    }
    UNROLLED_BY_16 for (int distance = WIDTH / 2; distance; distance /= 2)
        largest = larger_lanes(largest, exchanged(largest, distance));
    if (largest[0] > query->highest) {
        const vec less = power_of_negative(all_lanes((query->highest - largest[0]) * factor));
        query->highest = largest[0];
        query->sums *= less;
        for (int64_t d = 0; d < D; d += WIDTH)
            store(query->out + d, load(query->out + d) * less);
    }
    UNROLLED_BY_16 for (int v = 0; v < TILE_VECTORS; v++) {
        vec weights = power_of_negative(found[v] * factor - query->highest * factor);
        if (!sees_all)
            weights = lanes_between(weights, v * WIDTH, first, end, 0);
        query->sums += weights;
        if (KIND == IN_PAIRS)
            store_pairs((uint16_t *)scores + v * WIDTH, weights, WIDTH);
        else
            store(scores + v * WIDTH, weights);
    }
}

/* Loads WIDTH pairs of the values at positions `p` and `p + 1`, from column `column` on. `is_last`: the second position is not
 * there. */
INLINE void pairs_of_values(vec *pairs, const uint16_t *values, int64_t p, int64_t column, int64_t D, int is_last)
{
#if VECTOR_BYTES == 64
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                         4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i one = _mm512_loadu_si512(values + p * D + column);
    const __m512i other = is_last ? _mm512_setzero_si512() : _mm512_loadu_si512(values + (p + 1) * D + column);
    pairs[0] = (vec)_mm512_permutex2var_epi16(one, low, other);
    pairs[1] = (vec)_mm512_permutex2var_epi16(one, high, other);
#endif
}

/* out[row][VECTORS columns] += weight times value over positions first .. end of a tile, for ROWS rows. */
INLINE void mix(const Query *queries, const void *values, int64_t column, int64_t tile, int64_t first, int64_t end, int64_t D,
                const int ROWS, const int VECTORS, const int KIND)
{
    const int GROUP = NUMBERS_OF_LANE(KIND);
    vec sums[VALUE_ROWS][VALUE_VECTORS], value[VALUE_VECTORS];
    UNROLLED_BY_16 for (int r = 0; r < ROWS; r++)
        UNROLLED_BY_16 for (int v = 0; v < VECTORS; v++)
            sums[r][v] = load(queries[r].out + column + v * WIDTH);
    for (int64_t p = first; p < end; p += GROUP) {
        UNROLLED_BY_16 for (int v = 0; v < VECTORS; v += GROUP)
            if (KIND == IN_PAIRS)
                pairs_of_values(value + v, values, p, column + v * WIDTH, D, p + 1 == end);
            else
                value[v] = lanes_of(values, p * D + column + v * WIDTH, KIND);
        UNROLLED_BY_16 for (int r = 0; r < ROWS; r++) {
            const vec weight = all_lanes(queries[r].weights[(p - tile) / GROUP]);
            UNROLLED_BY_16 for (int v = 0; v < VECTORS; v++)
                sums[r][v] = multiplied(weight, value[v], sums[r][v], KIND);
        }
    }
    UNROLLED_BY_16 for (int r = 0; r < ROWS; r++)
        UNROLLED_BY_16 for (int v = 0; v < VECTORS; v++)
            store(queries[r].out + column + v * WIDTH, sums[r][v]);
}

INLINE void mix_rows(const Query *queries, const void *values, int64_t column, int64_t tile, int64_t first, int64_t end,
                     int64_t D, int rows, const int VECTORS, const int KIND)
{
    switch (rows) {
    case 1: mix(queries, values, column, tile, first, end, D, 1, VECTORS, KIND); break;
    case 2: mix(queries, values, column, tile, first, end, D, 2, VECTORS, KIND); break;
    case 3: mix(queries, values, column, tile, first, end, D, 3, VECTORS, KIND); break;
    default: mix(queries, values, column, tile, first, end, D, 4, VECTORS, KIND);
    }
}

/* The values of a tile that queries see into all columns of their rows. */
INLINE void mix_all(const Query *queries, int64_t num_queries, const void *values, int64_t tile, int64_t D, const int KIND)
{
    const int GROUP = NUMBERS_OF_LANE(KIND);
    for (int64_t i = 0; i < num_queries; i += VALUE_ROWS) {
        const int rows = (int)smaller(num_queries - i, VALUE_ROWS);
        /* both of a pair, whichever of them is seen */
        const int64_t first = larger(tile, queries[i].first / GROUP * GROUP);
        const int64_t end = smaller(queries[i + rows - 1].end, tile + TILE_KEYS);
        int64_t d = 0;
        for (; d + VALUE_VECTORS * WIDTH <= D; d += VALUE_VECTORS * WIDTH)
            mix_rows(queries + i, values, d, tile, first, end, D, rows, VALUE_VECTORS, KIND);
        for (; d < D; d += GROUP * WIDTH)
            mix_rows(queries + i, values, d, tile, first, end, D, rows, GROUP, KIND);
    }
}

/* Tokens `token` .. `token_end` of a span at one key head: tile of keys after tile, whose scores and weights stay in the first
 * cache. A tile begins at a multiple of TILE_KEYS, wherever contexts do. */
INLINE void block(const Attention *a, const Span *span, int64_t head, int64_t token, int64_t token_end, const int KIND)
{
    const int64_t D = a->head_dim, head_stride = span->capacity_tokens * D, size = SIZE_OF(POOL_TYPE(KIND));
    const int64_t start = span->offset + (2 * a->layer * a->num_kv_heads + head) * head_stride;
    const char *keys = (const char *)a->pool + start * size;
    const char *values = keys + a->num_kv_heads * head_stride * size;
    const int64_t num_queries = (token_end - token) * a->per_kv, end = span->num_past + token_end;
    const int64_t first = a->window ? larger(span->num_past + token + 1 - a->window, 0) : 0;
    if (num_queries <= SCORE_ROWS) /* they wait for memory */
        for (int64_t byte = first * D * size; byte < smaller(first + SCORE_VECTORS * WIDTH, end) * D * size; byte += LINE) {
            __builtin_prefetch(keys + byte);
            __builtin_prefetch(values + byte);
        }
    Query queries[num_queries];
    float weights[num_queries * TILE_KEYS];
    uint16_t pairs[KIND == IN_PAIRS ? num_queries * D : 1];
    for (int64_t i = 0; i < num_queries; i++) {
        int64_t t = token + i / a->per_kv, row = span->row_start + t, at = (head * a->per_kv + i % a->per_kv) * D;
        int64_t context = span->num_past + t + 1;
        const float *q = a->q + row * a->q_stride + at;
        queries[i] = (Query){a->window ? larger(context - a->window, 0) : 0, context, q, weights + i * TILE_KEYS,
                             a->out + row * a->num_kv_heads * a->per_kv * D + at, -INFINITY, {0}};
        if (a->sinks) { /* scores are multiplied by the scale when they are weighed */
            queries[i].highest = a->sinks[at / D] / a->scale;
            queries[i].sums[0] = 1;
        }
        memset(queries[i].out, 0, D * sizeof(float));
        if (KIND == IN_PAIRS) {
            queries[i].q = pairs + i * D;
            for (int64_t d = 0; d < D; d += WIDTH)
                store_pairs(pairs + i * D + d, load(q + d), WIDTH);
        }
    }
    int64_t from = 0, to = 0; /* queries that see something of the tile */
    for (int64_t tile = first / TILE_KEYS * TILE_KEYS; tile < end; tile += TILE_KEYS) {
        const int64_t tile_end = smaller(end, tile + TILE_KEYS);
        while (queries[from].end <= tile)
            from++;
        while (to < num_queries && queries[to].first < tile_end)
            to++;
        if (D == 64) /* the sizes of most models, with addresses known to the compiler */
            score(queries + from, to - from, keys, tile, tile_end, 64, KIND);
        else if (D == 128)
            score(queries + from, to - from, keys, tile, tile_end, 128, KIND);
        else
            score(queries + from, to - from, keys, tile, tile_end, D, KIND);
        for (int64_t i = from; i < to; i++)
            weigh(&queries[i], tile, a->scale, a->softcap, D, KIND);
        mix_all(queries + from, to - from, values, tile, D, KIND);
    }
    for (int64_t i = 0; i < num_queries; i++) {
        const float total = lane_sum(queries[i].sums);
        for (int64_t d = 0; d < D; d++)
            queries[i].out[d] /= total;
    }
}

#define BLOCK(NAME, KIND)                                                                                                      \
    static void NAME(const Attention *a, const Span *span, int64_t head, int64_t token, int64_t token_end)                     \
    {                                                                                                                          \
        block(a, span, head, token, token_end, KIND);                                                                          \
    }
BLOCK(block_fp32, FP32)
BLOCK(block_bf16, BF16)
#if VECTOR_BYTES == 64
BLOCK(block_pairs, IN_PAIRS)
#endif

/* Attend all spans in blocks of `block_tokens`. `block_starts` [num_spans + 1]: number of blocks before each span. */
static void team_attend(const Attention *a, const Span *spans, const int64_t *block_starts, int64_t num_spans,
                        int64_t block_tokens)
{
    void (*attend)(const Attention *, const Span *, int64_t, int64_t, int64_t) =
        a->type == FP32 ? block_fp32 : block_bf16;
#if VECTOR_BYTES == 64
    if (a->type == BF16 && a->head_dim % (2 * WIDTH) == 0 && __builtin_cpu_supports("avx512bf16"))
        attend = block_pairs;
#endif
/* Backwards, since the last blocks of a prompt have the longest contexts. */
#pragma omp for schedule(dynamic)
    for (int64_t item = block_starts[num_spans] * a->num_kv_heads - 1; item >= 0; item--) {
        int64_t low = 0, high = num_spans, number = item / a->num_kv_heads;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if (block_starts[middle] <= number)
                low = middle;
            else
                high = middle;
        }
        int64_t token = (number - block_starts[low]) * block_tokens, end = token + block_tokens;
        attend(a, &spans[low], item % a->num_kv_heads, token, smaller(end, spans[low].num_tokens));
    }
}

void attend_spans(float *out, const float *q, int64_t q_stride, const void *pool, int64_t type, const Span *spans,
                  const int64_t *block_starts, int64_t num_spans, int64_t block_tokens, int64_t layer, int64_t num_kv_heads,
                  int64_t per_kv, int64_t head_dim, int64_t window, float scale, float softcap, const float *sinks,
                  int64_t num_threads)
{
    const Attention a = {out, q, pool, type, q_stride, layer, num_kv_heads, per_kv, head_dim, window, scale, softcap, sinks};
#pragma omp parallel num_threads(num_threads)
    team_attend(&a, spans, block_starts, num_spans, block_tokens);
}
