/* Causal attention on views of the pool: prompts, chunks and decoding rows alike, one call per layer.
 *
 * Work is cut into blocks of new tokens of one sequence at one key head, with the G query heads that share it. Blocks of many
 * queries transpose tiles of keys first, since a score then needs no sum over lanes. Each query's numbers are computed in an
 * order that depends on its context alone: the same bits in any batch, and however its prompt was cut into chunks.
 *
 * Queries, weights, keys and values are multiplied in fp32. Where the pool is in bf16 and the processor multiplies pairs of
 * bf16 (AVX512_BF16), so are they, with sums in fp32: pairs along a head for scores, pairs of positions for values.
 */
#include <math.h>
#include <omp.h>

#include "../native/vector.h"

#define TILE_KEYS 64 /* of 64 numbers: 16 KiB, half a first-level cache */
/* Queries and vectors of keys, rows and vectors of values whose sums are in registers together. */
#define SCORE_ROWS 4
#define SCORE_VECTORS 2
#define VALUE_ROWS 4
#define VALUE_VECTORS 4
#define WORTH_TRANSPOSING 10
#define LEVELS 5
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
} Attention;

/* A query of a block: its context is first .. end. `q`: its numbers, in fp32 or as pairs. `weights`: its scores by position,
 * then its weights; as pairs they are the first half of the row. */
typedef struct {
    int64_t first, end;
    const void *q;
    float *weights, *out;
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

/* Sums over the lanes of WIDTH vectors, as one vector in their order: of neighbours, then of neighbouring sums. */
INLINE vec lane_sums(vec *v)
{
#if VECTOR_BYTES == 64
    const vec_of_int even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
#else
    const vec_of_int even = {0, 2, 4, 6, 8, 10, 12, 14};
#endif
    UNROLLED_BY_16 for (int n = WIDTH / 2; n; n /= 2)
        UNROLLED_BY_16 for (int i = 0; i < n; i++)
            v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], even) + __builtin_shuffle(v[2 * i], v[2 * i + 1], even + 1);
    return v[0];
}

/* scores[position] = q . key for positions first .. end, WIDTH at a time; more are written up to a whole vector. */
INLINE void scores_of(const Query *query, const void *keys, int64_t first, int64_t end, const int64_t D, const int KIND)
{
    const int64_t step = WIDTH * NUMBERS_OF_LANE(KIND), size = SIZE_OF(POOL_TYPE(KIND));
    const int q_kind = KIND == IN_PAIRS ? IN_PAIRS : FP32;
    for (int64_t position = first; position < end; position += WIDTH) {
        vec sums[WIDTH];
        UNROLLED_BY_16 for (int j = 0; j < WIDTH; j++) {
            const char *key = (const char *)keys + smaller(position + j, end - 1) * D * size;
            sums[j] = (vec){0};
            UNROLLED_BY_16 for (int64_t d = 0; d < D; d += step)
                sums[j] = multiplied(lanes_of(query->q, d, q_kind), lanes_of(key, d, KIND), sums[j], KIND);
        }
        store(query->weights + position, lane_sums(sums));
    }
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

/* Scores of ROWS queries with a transposed tile. Products are summed as in `scores_of`: chains as many lanes apart, then
 * neighbours, then neighbouring sums. */
INLINE void scores_of_tile(const Query *queries, const vec *tile, int64_t position, const int64_t D, const int ROWS,
                           const int KIND)
{
    const int64_t lanes = D / NUMBERS_OF_LANE(KIND);
    vec sums[LEVELS][SCORE_ROWS][SCORE_VECTORS];
    UNROLLED_BY_16 for (int lane = 0; lane < WIDTH; lane++) {
        vec found[SCORE_ROWS][SCORE_VECTORS];
        UNROLLED_BY_16 for (int r = 0; r < ROWS; r++)
            UNROLLED_BY_16 for (int v = 0; v < SCORE_VECTORS; v++)
                found[r][v] = (vec){0};
        for (int64_t d = lane; d < lanes; d += WIDTH)
            UNROLLED_BY_16 for (int r = 0; r < ROWS; r++) {
                const vec q = all_lanes(((const float *)queries[r].q)[d]);
                UNROLLED_BY_16 for (int v = 0; v < SCORE_VECTORS; v++)
                    found[r][v] = multiplied(q, tile[d * SCORE_VECTORS + v], found[r][v], KIND);
            }
        int level = 0;
        UNROLLED_BY_16 for (; lane >> level & 1; level++)
            UNROLLED_BY_16 for (int r = 0; r < ROWS; r++)
                UNROLLED_BY_16 for (int v = 0; v < SCORE_VECTORS; v++)
                    found[r][v] = sums[level][r][v] + found[r][v];
        UNROLLED_BY_16 for (int r = 0; r < ROWS; r++)
            UNROLLED_BY_16 for (int v = 0; v < SCORE_VECTORS; v++)
                sums[level][r][v] = found[r][v];
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < SCORE_VECTORS; v++)
            store(queries[r].weights + position + v * WIDTH, sums[LEVELS - 1 - (WIDTH == 8)][r][v]);
}

/* Scores of a block's queries; `first` .. `end` are the positions that any of them sees. */
INLINE void score(const Query *queries, int64_t num_queries, const void *keys, int64_t first, int64_t end, const int64_t D,
                  const int KIND)
{
    if (num_queries < WORTH_TRANSPOSING) {
        for (int64_t tile = first; tile < end; tile += TILE_KEYS)
            for (int64_t i = 0; i < num_queries; i++)
                scores_of(&queries[i], keys, larger(queries[i].first, tile), smaller(queries[i].end, tile + TILE_KEYS), D,
                          KIND);
        return;
    }
    vec tile[D / NUMBERS_OF_LANE(KIND) * SCORE_VECTORS];
    for (int64_t position = first; position < end; position += SCORE_VECTORS * WIDTH) {
        int64_t i = 0;
        while (queries[i].end <= position) /* sees nothing of the tile; contexts grow along a block */
            i++;
        transpose_keys(tile, keys, position, end, D, KIND);
        for (; i + SCORE_ROWS <= num_queries; i += SCORE_ROWS)
            scores_of_tile(queries + i, tile, position, D, SCORE_ROWS, KIND);
        for (; i < num_queries; i++)
            scores_of_tile(queries + i, tile, position, D, 1, KIND);
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

/* `count` weights from position `p` on, which come before the scores that are still to be read. */
INLINE void store_weights(float *scores, int64_t p, vec weights, int count, const int KIND)
{
    if (KIND == IN_PAIRS)
        store_pairs((uint16_t *)scores + p, weights, count);
    else if (count == WIDTH)
        store(scores + p, weights);
    else
        store_first(scores + p, weights, count);
}

/* Scores of a query become its weights, not yet divided by their sum, which is returned. A score that is NaN or infinite makes
 * the sum NaN, as the distance of infinity to itself is. Weights as pairs are stored over scores that have been read. */
INLINE float weigh(const Query *query, float scale, float softcap, const int KIND)
{
    const int64_t first = query->first, end = query->end;
    float *scores = query->weights;
    vec largest[4], sums = {0};
    float lanes[WIDTH], highest = -INFINITY, sum = 0;
    for (int64_t p = first; softcap != 0 && p < end; p++)
        scores[p] = softcap * tanhf(scores[p] * scale / softcap) / scale;
    for (int i = 0; i < 4; i++)
        largest[i] = (vec){0} - INFINITY;
    int64_t p = first;
    for (; p + 4 * WIDTH <= end; p += 4 * WIDTH)
        for (int i = 0; i < 4; i++)
            largest[i] = larger_lanes(largest[i], load(scores + p + i * WIDTH));
    store(lanes, larger_lanes(larger_lanes(largest[0], largest[1]), larger_lanes(largest[2], largest[3])));
    for (int i = 0; i < WIDTH; i++)
        highest = lanes[i] > highest ? lanes[i] : highest;
    for (; p < end; p++)
        highest = scores[p] > highest ? scores[p] : highest;
    for (p = first; p + WIDTH <= end; p += WIDTH) {
        const vec weights = exponential((load(scores + p) - highest) * scale);
        sums += weights;
        store_weights(scores, p, weights, WIDTH, KIND);
    }
    if (p < end) {
        store_first(lanes, exponential((load_first(scores + p, (int)(end - p)) - highest) * scale), (int)(end - p));
        const vec weights = load_first(lanes, (int)(end - p));
        sums += weights;
        store_weights(scores, p, weights, (int)(end - p), KIND);
    }
    store(lanes, sums);
    for (int i = 0; i < WIDTH; i++)
        sum += lanes[i];
    return sum;
}

/* Of positions `p` and `p + 1`, WIDTH pairs of neighbours from column `column` on into two vectors. `last`: the second is not
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

/* The block's out[row][VECTORS columns] += weight times value over positions first .. end, for ROWS rows. */
INLINE void mix(const Query *queries, const void *values, int64_t column, int64_t first, int64_t end, int64_t D,
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
            const vec weight = all_lanes(queries[r].weights[p / GROUP]);
            UNROLLED_BY_16 for (int v = 0; v < VECTORS; v++)
                sums[r][v] = multiplied(weight, value[v], sums[r][v], KIND);
        }
    }
    UNROLLED_BY_16 for (int r = 0; r < ROWS; r++)
        UNROLLED_BY_16 for (int v = 0; v < VECTORS; v++)
            store(queries[r].out + column + v * WIDTH, sums[r][v]);
}

INLINE void mix_rows(const Query *queries, const void *values, int64_t column, int64_t first, int64_t end, int64_t D, int rows,
                     const int VECTORS, const int KIND)
{
    switch (rows) {
    case 1: mix(queries, values, column, first, end, D, 1, VECTORS, KIND); break;
    case 2: mix(queries, values, column, first, end, D, 2, VECTORS, KIND); break;
    case 3: mix(queries, values, column, first, end, D, 3, VECTORS, KIND); break;
    default: mix(queries, values, column, first, end, D, 4, VECTORS, KIND);
    }
}

/* All values that a block sees into all columns of its rows, tile after tile. */
INLINE void mix_block(const Query *queries, int64_t num_queries, const void *values, int64_t first, int64_t end, int64_t D,
                      const int KIND)
{
    for (int64_t tile = first; tile < end; tile += TILE_KEYS)
        for (int64_t i = 0; i < num_queries; i += VALUE_ROWS) {
            const int rows = (int)smaller(num_queries - i, VALUE_ROWS);
            const int64_t tile_end = smaller(smaller(end, queries[i + rows - 1].end), tile + TILE_KEYS);
            int64_t d = 0;
            for (; d + VALUE_VECTORS * WIDTH <= D; d += VALUE_VECTORS * WIDTH)
                mix_rows(queries + i, values, d, tile, tile_end, D, rows, VALUE_VECTORS, KIND);
            for (; d < D; d += NUMBERS_OF_LANE(KIND) * WIDTH)
                mix_rows(queries + i, values, d, tile, tile_end, D, rows, NUMBERS_OF_LANE(KIND), KIND);
        }
}

/* Tokens `token` .. `token_end` of a span at one key head. `scratch`: a row of `stride` numbers per query. */
INLINE void block(const Attention *a, const Span *span, int64_t head, int64_t token, int64_t token_end, float *scratch,
                  int64_t stride, const int KIND)
{
    const int64_t D = a->head_dim, head_stride = span->capacity_tokens * D, size = SIZE_OF(POOL_TYPE(KIND));
    const int64_t start = span->offset + (2 * a->layer * a->num_kv_heads + head) * head_stride;
    const char *keys = (const char *)a->pool + start * size;
    const char *values = keys + a->num_kv_heads * head_stride * size;
    const int64_t num_queries = (token_end - token) * a->per_kv, end = span->num_past + token_end;
    Query queries[num_queries];
    uint16_t pairs[KIND == IN_PAIRS ? num_queries * D : 1];
    for (int64_t i = 0; i < num_queries; i++) {
        int64_t t = token + i / a->per_kv, row = span->row_start + t, at = (head * a->per_kv + i % a->per_kv) * D;
        int64_t context = span->num_past + t + 1;
        const float *q = a->q + row * a->q_stride + at;
        queries[i] = (Query){a->window ? larger(context - a->window, 0) : 0, context, q, scratch + i * stride,
                             a->out + row * a->num_kv_heads * a->per_kv * D + at};
        memset(queries[i].out, 0, D * sizeof(float));
        if (KIND == IN_PAIRS) {
            queries[i].q = pairs + i * D;
            for (int64_t d = 0; d < D; d += WIDTH)
                store_pairs(pairs + i * D + d, load(q + d), WIDTH);
        }
    }
    /* both of a pair, whichever of them is seen */
    const int64_t first = queries[0].first / NUMBERS_OF_LANE(KIND) * NUMBERS_OF_LANE(KIND);
    if (D == 64) /* the sizes of most models, with addresses known to the compiler */
        score(queries, num_queries, keys, first, end, 64, KIND);
    else if (D == 128)
        score(queries, num_queries, keys, first, end, 128, KIND);
    else
        score(queries, num_queries, keys, first, end, D, KIND);
    float totals[num_queries];
    for (int64_t i = 0; i < num_queries; i++) {
        const Query *query = &queries[i];
        totals[i] = weigh(query, a->scale, a->softcap, KIND);
        /* of positions that another query of the block sees */
        const int64_t weight_size = KIND == IN_PAIRS ? 2 : 4, past = end + (KIND == IN_PAIRS ? end % 2 : 0);
        memset((char *)query->weights + first * weight_size, 0, (query->first - first) * weight_size);
        memset((char *)query->weights + query->end * weight_size, 0, (past - query->end) * weight_size);
    }
    mix_block(queries, num_queries, values, first, end, D, KIND);
    for (int64_t i = 0; i < num_queries; i++)
        for (int64_t d = 0; d < D; d++)
            queries[i].out[d] /= totals[i];
}

#define BLOCK(NAME, KIND)                                                                                                      \
    static void NAME(const Attention *a, const Span *span, int64_t head, int64_t token, int64_t token_end, float *scratch,     \
                     int64_t stride)                                                                                           \
    {                                                                                                                          \
        block(a, span, head, token, token_end, scratch, stride, KIND);                                                         \
    }
BLOCK(block_fp32, FP32)
BLOCK(block_bf16, BF16)
#if VECTOR_BYTES == 64
BLOCK(block_pairs, IN_PAIRS)
#endif

/* Attend all spans in blocks of `block_tokens`. `block_starts` [num_spans + 1]: number of blocks before each span. `scratch`:
 * per thread block_tokens * per_kv rows of `stride` numbers; stride: the longest context and SCORE_VECTORS vectors more. */
void attend_spans(float *out, const float *q, int64_t q_stride, const void *pool, int64_t type, const Span *spans,
                  const int64_t *block_starts, int64_t num_spans, int64_t block_tokens, int64_t layer, int64_t num_kv_heads,
                  int64_t per_kv, int64_t head_dim, int64_t window, float scale, float softcap, float *scratch,
                  int64_t stride, int64_t num_threads)
{
    Attention a = {out, q, pool, type, q_stride, layer, num_kv_heads, per_kv, head_dim, window, scale, softcap};
    void (*attend)(const Attention *, const Span *, int64_t, int64_t, int64_t, float *, int64_t) =
        type == FP32 ? block_fp32 : block_bf16;
#if VECTOR_BYTES == 64
    if (type == BF16 && head_dim % (2 * WIDTH) == 0 && __builtin_cpu_supports("avx512bf16"))
        attend = block_pairs;
#endif
/* Backwards, since the last blocks of a prompt have the longest contexts. */
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int64_t item = block_starts[num_spans] * num_kv_heads - 1; item >= 0; item--) {
        int64_t low = 0, high = num_spans, number = item / num_kv_heads;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if (block_starts[middle] <= number)
                low = middle;
            else
                high = middle;
        }
        int64_t token = (number - block_starts[low]) * block_tokens, end = token + block_tokens;
        attend(&a, &spans[low], item % num_kv_heads, token, smaller(end, spans[low].num_tokens),
               scratch + omp_get_thread_num() * block_tokens * per_kv * stride, stride);
    }
}
