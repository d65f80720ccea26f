/* Rows times a weight in panels of groups, by instructions that multiply and add a whole group: pairs in bf16
 * (AVX512_BF16) or quads of 8 bits (AVX512_VNNI, or AVX_VNNI where vectors are those of AVX2).
 *
 * A group is 32 bits, of a row (`codes`) as of a column. In 8 bits a number of a row is code * scale with a scale for
 * each row, a number of the weight (code - 128) * scale with a scale for each column. Sums are exact in int32; in bf16
 * each sum is one chain over the depth, in order. A row's result does not depend on the rows beside it, bit for bit.
 */
#ifndef LORABATCH_DOTS_H
#define LORABATCH_DOTS_H

#include "panels.h"
#include "segments.h"

enum { IN_BF16, IN_INT8, IN_FP32 };
#define WEIGHT_OFFSET 128
#define NUMBERS_OF(KIND) ((KIND) == IN_INT8 ? 4 : 2)

#if VECTOR_BYTES == 64
#define DOTS_OF_BUILD (1 << IN_BF16 | 1 << IN_INT8)
#define HAS_DOTS __attribute__((target("avx512bf16,avx512vnni")))
#elif __clang_major__ >= 12 || (!defined(__clang__) && __GNUC__ >= 11)
#define DOTS_OF_BUILD (1 << IN_INT8)
#define HAS_DOTS __attribute__((target("avxvnni")))
#else
#define DOTS_OF_BUILD 0
#endif

#if DOTS_OF_BUILD
/* A row as codes: `scale` and the sum of its codes only in 8 bits. */
typedef struct {
    float scale;
    int32_t total;
} Row;

/* The uses of sums: out = sum + bias; the same rounded to bf16, without a bias; out += scaling * sum. */
enum { STORED, ROUNDED, ADDED };

typedef struct {
    void *out; /* [rows, out_stride], in bf16 where sums are rounded, else in fp32 */
    int64_t out_stride;
    const char *codes;           /* of the rows, codes_stride bytes apart, perhaps not aligned */
    int64_t codes_stride;
    const Row *rows;
    const int32_t *w;           /* panels of groups */
    const float *scales, *bias; /* of columns; bias: NULL for none */
    int64_t groups, num_columns;
    float scaling;
    int ending;
} Dots;

#if VECTOR_BYTES == 64
typedef __m512 reg;
typedef __m512i int_reg;
#define larger_of _mm512_max_ps
#define nearest_whole _mm512_cvtps_epi32
#define all_groups _mm512_set1_epi32
#define dot_quads _mm512_dpbusd_epi32
#define dot_pairs(SUM, A, B) _mm512_dpbf16_ps(SUM, (__m512bh)(A), (__m512bh)(B))

INLINE HAS_DOTS void store_rounded(uint16_t *to, vec v, int count)
{
    _mm256_mask_storeu_epi16(to, (__mmask16)((1u << count) - 1), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}

/* A row's numbers in bf16. A depth that is odd is filled up with a zero. */
HAS_DOTS static void encode_pairs(uint16_t *codes, const float *x, int64_t depth)
{
    codes[depth - 1 + depth % 2] = 0;
    for (int64_t k = 0; k < depth; k += WIDTH) {
        const int count = depth - k < WIDTH ? (int)(depth - k) : WIDTH;
        store_rounded(codes + k, load_first(x + k, count), count);
    }
}
#else
typedef __m256 reg;
typedef __m256i int_reg;
#define larger_of _mm256_max_ps
#define nearest_whole _mm256_cvtps_epi32
#define all_groups _mm256_set1_epi32
#define dot_quads _mm256_dpbusd_avx_epi32
/* Not in this build. */
#define dot_pairs(SUM, A, B) (SUM)
#define store_rounded(TO, V, COUNT)
#define encode_pairs(CODES, X, DEPTH)
#endif

INLINE HAS_DOTS void end_dots(const Dots *p, int64_t row, int64_t column, int count, vec value, vec shift)
{
    const int64_t first = row * p->out_stride + column;
    if (p->ending == ROUNDED) {
        store_rounded((uint16_t *)p->out + first, value, count);
        return;
    }
    float *to = (float *)p->out + first;
    const vec sum = p->ending == ADDED ? fused(all_lanes(p->scaling), value, load_first(to, count)) : value + shift;
    store_first(to, sum, count);
}

INLINE HAS_DOTS void tile_of_dots(const Dots *p, int64_t row, int64_t column, Ahead ahead, const int ROWS,
                                  const int VECTORS, int lanes, const int KIND)
{
    const int FULL = lanes == WIDTH ? VECTORS : VECTORS - 1;
    const int64_t width = (VECTORS - 1) * WIDTH + lanes;
    const int32_t *w = p->w + column * p->groups;
    const char *codes = p->codes + row * p->codes_stride;
    /* Each kind has sums of its own type: of one that is cast at every step, compilers keep a copy in memory. */
    reg sums[MOST_ROWS][PANEL_VECTORS];
    vec_of_int totals[MOST_ROWS][PANEL_VECTORS];
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            sums[r][v] = (reg)(vec){0};
            totals[r][v] = (vec_of_int){0};
        }
    for (int64_t g = 0; g < p->groups; g++, w += width, ahead.from += ahead.step) {
        int_reg values[PANEL_VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            const float *from = (const float *)w + v * WIDTH;
            values[v] = (int_reg)(v < FULL ? load(from) : load_first(from, lanes));
            __builtin_prefetch(ahead.from + v * VECTOR_BYTES, 0, 2);
        }
        UNROLLED for (int r = 0; r < ROWS; r++) {
            int32_t group;
            memcpy(&group, codes + r * p->codes_stride + g * sizeof group, sizeof group);
            const int_reg of_row = all_groups(group);
            UNROLLED for (int v = 0; v < VECTORS; v++)
                if (KIND == IN_INT8)
                    totals[r][v] = (vec_of_int)dot_quads((int_reg)totals[r][v], values[v], of_row);
                else
                    sums[r][v] = dot_pairs(sums[r][v], values[v], of_row);
        }
    }
    UNROLLED for (int v = 0; v < VECTORS; v++) {
        const int64_t first = column + v * WIDTH;
        const int count = v < FULL ? WIDTH : lanes;
        const vec shift = p->bias ? load_first(p->bias + first, count) : (vec){0};
        const vec scale = KIND == IN_INT8 ? load_first(p->scales + first, count) : (vec){0};
        UNROLLED for (int r = 0; r < ROWS; r++) {
            if (KIND == IN_INT8) {
                const Row of_row = p->rows[row + r];
                const vec_of_int exact = totals[r][v] - WEIGHT_OFFSET * of_row.total;
                const vec total = __builtin_convertvector(exact, vec);
                store_first((float *)p->out + (row + r) * p->out_stride + first,
                            fused(total, scale * of_row.scale, shift), count);
            } else
                end_dots(p, row + r, first, count, (vec)sums[r][v], shift);
        }
    }
}

/* The addresses to fetch of the panel that begins with a column, from `bytes` on. */
INLINE Ahead panel_ahead(const Dots *p, int64_t column, int64_t bytes)
{
    const int64_t width = smaller(PANEL, p->num_columns - column);
    return (Ahead){(const char *)(p->w + column * p->groups) + bytes, width * (int64_t)sizeof *p->w};
}

INLINE HAS_DOTS void tiles_of_dots(const Dots *p, int64_t row, int64_t num_rows, int64_t column, Ahead ahead,
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
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MOST_ROWS == 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}
#endif

/* Which kinds this processor has instructions for, as bits. */
INLINE int64_t dots_of_processor(void)
{
#if VECTOR_BYTES == 64
    return (__builtin_cpu_supports("avx512bf16") ? 1 << IN_BF16 : 0) |
           (__builtin_cpu_supports("avx512vnni") ? 1 << IN_INT8 : 0);
#elif DOTS_OF_BUILD
    return __builtin_cpu_supports("avxvnni") ? 1 << IN_INT8 : 0;
#else
    return 0;
#endif
}

#endif
