/* Linear layers by dot products of groups along the depth: pairs in bf16 (AVX512_BF16) or quads of 8 bits (AVX512_VNNI).
 *
 * Weights are in panels (see ../native/panels.h) of groups, 32 bits each. A call encodes the rows first. In 8 bits a
 * number of a row is code * scale with a scale for each row, a number of the weight (code - 128) * scale with a scale
 * for each column. Sums are exact in int32; in bf16 each sum is one chain over the depth, in order. A row's result does
 * not depend on the rows beside it, bit for bit.
 */
#include <omp.h>

#include "../native/panels.h"

enum { IN_BF16, IN_INT8 };
#define MOST_CODE 127.0f
#define WEIGHT_OFFSET 128
#define WORTH_A_TEAM 131072

#if VECTOR_BYTES == 64
#define HAS_DOTS __attribute__((target("avx512bf16,avx512vnni")))
#define NUMBERS_OF(KIND) ((KIND) == IN_INT8 ? 4 : 2)

/* Which kinds this processor has instructions for, as bits. */
int64_t kinds_of_dots(void)
{
    return (__builtin_cpu_supports("avx512bf16") ? 1 << IN_BF16 : 0) |
           (__builtin_cpu_supports("avx512vnni") ? 1 << IN_INT8 : 0);
}

/* A row as codes: `scale` and the sum of its codes only in 8 bits. */
typedef struct {
    float scale;
    int32_t total;
} Row;

typedef struct {
    float *out;           /* [rows, num_columns] */
    const int32_t *codes; /* [rows, groups] */
    const Row *rows;
    const int32_t *w;            /* panels of groups */
    const float *scales, *bias; /* of columns; bias: NULL for none */
    int64_t groups, num_columns;
} Dots;

HAS_DOTS static void encode_pairs(int32_t *codes, const float *x, int64_t depth)
{
    uint16_t *out = (uint16_t *)codes;
    out[depth - 1 + depth % 2] = 0;
    for (int64_t k = 0; k < depth; k += WIDTH) {
        const int count = depth - k < WIDTH ? (int)(depth - k) : WIDTH;
        const __m256i pairs = (__m256i)_mm512_cvtneps_pbh((__m512)load_first(x + k, count));
        _mm256_mask_storeu_epi16(out + k, (__mmask16)((1u << count) - 1), pairs);
    }
}

/* A row with a number that is not finite has the scale NaN: so has its result. */
HAS_DOTS static Row encode_quads(int32_t *codes, const float *x, int64_t depth, int64_t groups)
{
    vec largest = {0}, poison = {0};
    for (int64_t k = 0; k < depth; k += WIDTH) {
        const vec v = load_first(x + k, depth - k < WIDTH ? (int)(depth - k) : WIDTH);
        largest = (vec)_mm512_max_ps((__m512)largest, _mm512_abs_ps((__m512)v));
        poison += v * 0.0f;
    }
    const float most = _mm512_reduce_max_ps((__m512)largest), per_code = most > 0 ? MOST_CODE / most : 0;
    vec_of_int total = {0};
    codes[groups - 1] = 0;
    for (int64_t k = 0; k < depth; k += WIDTH) {
        const int count = depth - k < WIDTH ? (int)(depth - k) : WIDTH;
        const __m512i rounded = _mm512_cvtps_epi32((__m512)(load_first(x + k, count) * per_code));
        total += (vec_of_int)rounded;
        _mm512_mask_cvtsepi32_storeu_epi8((int8_t *)codes + k, (__mmask16)((1u << count) - 1), rounded);
    }
    return (Row){most / MOST_CODE + _mm512_reduce_add_ps((__m512)poison), _mm512_reduce_add_epi32((__m512i)total)};
}

INLINE HAS_DOTS void tile_of_dots(const Dots *p, int64_t row, int64_t column, int64_t ahead, const int ROWS,
                                  const int VECTORS, int lanes, const int KIND)
{
    const int FULL = lanes == WIDTH ? VECTORS : VECTORS - 1;
    const int64_t width = (VECTORS - 1) * WIDTH + lanes;
    const int32_t *w = p->w + column * p->groups, *codes = p->codes + row * p->groups;
    vec_of_int sums[MOST_ROWS][PANEL_VECTORS];
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++)
            sums[r][v] = (vec_of_int){0};
    for (int64_t g = 0; g < p->groups; g++, w += width) {
        vec_of_int values[PANEL_VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            const float *from = (const float *)w + v * WIDTH;
            values[v] = (vec_of_int)(v < FULL ? load(from) : load_first(from, lanes));
            __builtin_prefetch((const char *)from + ahead, 0, 2);
        }
        UNROLLED for (int r = 0; r < ROWS; r++) {
            const __m512i of_row = _mm512_set1_epi32(codes[r * p->groups + g]);
            UNROLLED for (int v = 0; v < VECTORS; v++)
                sums[r][v] =
                    KIND == IN_INT8
                        ? (vec_of_int)_mm512_dpbusd_epi32((__m512i)sums[r][v], (__m512i)values[v], of_row)
                        : (vec_of_int)_mm512_dpbf16_ps((__m512)sums[r][v], (__m512bh)values[v], (__m512bh)of_row);
        }
    }
    UNROLLED for (int v = 0; v < VECTORS; v++) {
        const int64_t first = column + v * WIDTH;
        const int count = v < FULL ? WIDTH : lanes;
        const vec shift = p->bias ? load_first(p->bias + first, count) : (vec){0};
        const vec scale = KIND == IN_INT8 ? load_first(p->scales + first, count) : (vec){0};
        UNROLLED for (int r = 0; r < ROWS; r++) {
            vec value = (vec)sums[r][v];
            if (KIND == IN_INT8) {
                const Row of_row = p->rows[row + r];
                const vec total = __builtin_convertvector(sums[r][v] - WEIGHT_OFFSET * of_row.total, vec);
                value = fused(total, scale * of_row.scale, shift);
            } else if (p->bias)
                value += shift;
            store_first(p->out + (row + r) * p->num_columns + first, value, count);
        }
    }
}

INLINE HAS_DOTS void tiles_of_dots(const Dots *p, int64_t row, int64_t num_rows, int64_t column, int64_t ahead,
                                   const int KIND)
{
    const int64_t columns = p->num_columns - column;
    switch (num_rows) {
#define CASE(ROWS)                                                                                                     \
    case ROWS:                                                                                                         \
        if (columns >= PANEL)                                                                                          \
            tile_of_dots(p, row, column, ahead, ROWS, 2, WIDTH, KIND);                                                 \
        else if (columns > WIDTH)                                                                                      \
            tile_of_dots(p, row, column, ahead, ROWS, 2, (int)columns - WIDTH, KIND);                                  \
        else                                                                                                           \
            tile_of_dots(p, row, column, ahead, ROWS, 1, (int)columns, KIND);                                          \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

/* Blocks of rows take turns with a panel; panels and their blocks are dealt out to the threads. */
INLINE HAS_DOTS void multiply_share(const Dots *p, int64_t num_rows, const int KIND)
{
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads(), blocks = blocks_of(num_rows);
    const int64_t tiles = (p->num_columns + PANEL - 1) / PANEL * blocks, last = tiles * (thread + 1) / threads;
    for (int64_t i = tiles * thread / threads; i < last; i++) {
        const int64_t b = i % blocks, row = num_rows * b / blocks, next = num_rows * (b + 1) / blocks;
        const int64_t ahead = blocks == 1 ? STREAM_AHEAD : b == blocks - 1 ? p->groups * PANEL * 4 : 0;
        tiles_of_dots(p, row, next - row, i / blocks * PANEL, ahead, KIND);
    }
}

HAS_DOTS static void multiply_in_bf16(const Dots *p, int64_t num_rows) { multiply_share(p, num_rows, IN_BF16); }
HAS_DOTS static void multiply_in_int8(const Dots *p, int64_t num_rows) { multiply_share(p, num_rows, IN_INT8); }

/* y [num_rows, num_columns] = x [num_rows, depth] W^T + bias. `codes`: scratch of num_rows * (groups + 2) numbers.
 * `scales` (of columns): only in 8 bits. */
void linear_dots(float *y, const float *x, int64_t num_rows, const int32_t *w, const float *scales, const float *bias,
                 int64_t num_columns, int64_t depth, int64_t kind, int32_t *codes)
{
    const int64_t groups = (depth + NUMBERS_OF(kind) - 1) / NUMBERS_OF(kind);
    Row *const rows = (Row *)(codes + num_rows * groups);
    const Dots dots = {y, codes, rows, w, scales, bias, groups, num_columns};
#pragma omp parallel if (num_rows * num_columns * depth > WORTH_A_TEAM)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < num_rows; r++)
            if (kind == IN_INT8)
                rows[r] = encode_quads(codes + r * groups, x + r * depth, depth, groups);
            else
                encode_pairs(codes + r * groups, x + r * depth, depth);
        if (kind == IN_INT8)
            multiply_in_int8(&dots, num_rows);
        else
            multiply_in_bf16(&dots, num_rows);
    }
}
#else
int64_t kinds_of_dots(void) { return 0; }
#endif
