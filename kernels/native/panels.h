/* Rows times a weight in panels.
 *
 * A weight W [num_columns, depth] is stored panel after panel: PANEL rows of W, transposed, so that what one step along the
 * depth needs is one or two cache lines and a panel is read from its first byte to its last. The last panel is as wide
 * as what is left. Memory delivers such a stream twice as fast as rows a stride apart.
 *
 * Numbers of a weight are in fp32, bf16 or fp16, and widened to fp32 in registers, which is exact. In bf16 two numbers
 * along the depth may stand side by side, so that a shift and a mask widen them; the depth is even then.
 *
 * A weight may also be in blocks of 16 or 32 numbers of a column, scale * (code - offset) + shift each. Of one block along the
 * depth a panel has the scales of its columns, their shifts where there are any, then the codes: bytes, or two along the
 * depth in one byte, the first in its lower half.
 *
 * Each output number is one chain of fused multiply-adds over the depth, in order, whatever the number of rows, blocks
 * or threads: a row's result does not depend on the rows beside it, bit for bit.
 */
#ifndef LORABATCH_PANELS_H
#define LORABATCH_PANELS_H

#include "vector.h"

/* Three vectors made no difference beyond noise (ADR 14). */
#define PANEL_VECTORS 2
#define PANEL (PANEL_VECTORS * WIDTH)
/* Rows of a block; few rows are one block, as large as registers allow, since every block reads the panel again: 24 sums of 32
 * registers with AVX-512, 12 of 16 with AVX2, beside two vectors of the panel. Twelve rows where rows are many made no difference
 * beyond noise (ADR 12). */
#if VECTOR_BYTES == 64
#define BLOCK_ROWS 8
#define MOST_ROWS 12
#else
#define BLOCK_ROWS 6
#define MOST_ROWS 6
#endif
/* Steps along the depth for which blocks of rows take turns, so that the part of a panel stays in the second cache: 256 KiB in
 * fp32, with AVX2 128. Deeper weights were not measured (ADR 14). */
#define DEPTH_PART 2048
/* Conversion from fp16 takes units that multiply: from this number of blocks on a part of a panel, 64 KiB in fp32, is widened
 * once. Not tuned. */
#define WORTH_WIDENING 4
#define WIDENED_PART 512
/* Bytes ahead of which one block fetches a panel, which it reads once. Not tuned. */
#define STREAM_AHEAD 4096
#define UNROLLED _Pragma("GCC unroll 12")
#define UNROLLED_BY_8 _Pragma("GCC unroll 8")

/* How a weight in blocks is coded, from its type: BLOCKS and a bit for each choice. Without shifts codes have an offset of half
 * their range. */
typedef struct {
    int has_bytes, has_wide_scales, has_shifts, size;
} Coding;

INLINE Coding coding_of(int64_t type)
{
    return (Coding){type >> 8 & 1, type >> 9 & 1, type >> 10 & 1, type >> 11 & 1 ? 16 : 32};
}

/* Bytes of a block of one column. */
INLINE int64_t bytes_of_block(Coding c)
{
    return (c.has_wide_scales ? 4 : 2) * (1 + c.has_shifts) + (c.has_bytes ? c.size : c.size / 2);
}

/* out[rows, columns] = x[rows, depth] W^T + bias; or, where `adds`, out += scaling * x W^T. */
typedef struct {
    float *out;
    const float *x;
    const void *w;     /* panels of `type`: a number format, or that of blocks with their coding */
    const float *bias; /* NULL for none */
    int64_t out_stride, x_stride, depth, num_columns;
    float scaling;
    int adds, type;
} Product;

/* Rows and columns of a product; columns begin with a panel. */
typedef struct {
    int64_t first_row, end_row, first_column, end_column;
} Part;

INLINE int64_t blocks_of(int64_t num_rows)
{
    return num_rows <= MOST_ROWS ? 1 : (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
}

/* Numbers along the depth that stand side by side. */
#define GROUP_OF(TYPE) ((TYPE) == BF16_PAIRS ? 2 : 1)

/* A tile's part of a panel: along the depth from `first` to `end`. `w`: the panel from `first` on; `ahead`: how far on to
 * fetch, in bytes. */
typedef struct {
    int64_t row, column, first, end;
    const void *w;
    int64_t ahead;
} Place;

INLINE vec load_lanes(const float *from, int count, const int IS_FULL)
{
    return IS_FULL ? load(from) : load_first(from, count);
}

INLINE void store_lanes(float *to, vec v, int count, const int IS_FULL)
{
    if (IS_FULL)
        store(to, v);
    else
        store_first(to, v, count);
}

/* The numbers at place `n` of a group of columns, which begins at `w`, for its columns from `column` on. */
INLINE vec numbers(const char *w, int column, int n, int count, const int IS_FULL, const int TYPE)
{
    if (TYPE == FP16)
        return widened_halves((const uint16_t *)w + column, count);
    if (TYPE == BF16)
        return widened_brains((const uint16_t *)w + column, count);
    const float *from = (const float *)w + column;
    const vec found = load_lanes(from, count, IS_FULL);
    if (TYPE == FP32)
        return found;
    return (vec)(n == 0 ? (vec_of_int)found << 16 : (vec_of_int)found & (int32_t)0xffff0000);
}

/* ROWS x VECTORS sums in registers; of the vectors after the first FULL only `lanes` columns exist. Unless asked to unroll, the compiler
 * keeps some of the sums in memory. */
INLINE void tile(const Product *p, Place at, const int ROWS, const int VECTORS, const int FULL, int lanes,
                 const int TYPE)
{
    const int GROUP = GROUP_OF(TYPE);
    const int64_t width = (VECTORS - 1) * WIDTH + lanes;
    const float *x = p->x + at.row * p->x_stride;
    const char *w = at.w;
    float *out = p->out + at.row * p->out_stride + at.column;
    vec sums[MOST_ROWS][PANEL_VECTORS];
    /* each question once: asked of every sum, they would take the compiler most of its time */
    if (at.first == 0)
        UNROLLED for (int r = 0; r < ROWS; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                sums[r][v] = (vec){0};
    else
        UNROLLED for (int r = 0; r < ROWS; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                sums[r][v] = load_lanes(out + r * p->out_stride + v * WIDTH, lanes, v < FULL);
    for (int64_t k = at.first; k < at.end; k += GROUP, w += width * GROUP * SIZE_OF(TYPE)) {
        UNROLLED for (int v = 0; v < VECTORS; v++)
            __builtin_prefetch(w + at.ahead + v * WIDTH * GROUP * SIZE_OF(TYPE), 0, 2);
        UNROLLED for (int n = 0; n < GROUP; n++) {
            vec values[PANEL_VECTORS];
            UNROLLED for (int v = 0; v < VECTORS; v++)
                values[v] = numbers(w, v * WIDTH, n, v < FULL ? WIDTH : lanes, v < FULL, TYPE);
            UNROLLED for (int r = 0; r < ROWS; r++)
                UNROLLED for (int v = 0; v < VECTORS; v++)
                    sums[r][v] = fused(all_lanes(x[r * p->x_stride + k + n]), values[v], sums[r][v]);
        }
    }
    if (p->adds)
        UNROLLED for (int r = 0; r < ROWS; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++)
            {
                const vec before = load_lanes(out + r * p->out_stride + v * WIDTH, lanes, v < FULL);
                sums[r][v] = fused(all_lanes(p->scaling), sums[r][v], before);
            }
    else if (at.end == p->depth && p->bias)
        UNROLLED for (int v = 0; v < VECTORS; v++)
        {
            const vec shift = load_lanes(p->bias + at.column + v * WIDTH, lanes, v < FULL);
            UNROLLED for (int r = 0; r < ROWS; r++)
                sums[r][v] += shift;
        }
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++)
        {
            store_lanes(out + r * p->out_stride + v * WIDTH, sums[r][v], lanes, v < FULL);
        }
}

INLINE void tile_of_rows(const Product *p, Place at, int64_t num_rows, const int TYPE)
{
    const int64_t columns = p->num_columns - at.column;
    switch (num_rows) {
#define CASE(ROWS)                                                                                                     \
    case ROWS:                                                                                                         \
        if (columns >= PANEL)                                                                                          \
            tile(p, at, ROWS, 2, 2, WIDTH, TYPE);                                                                      \
        else if (columns > WIDTH)                                                                                      \
            tile(p, at, ROWS, 2, 1, (int)columns - WIDTH, TYPE);                                                       \
        else                                                                                                           \
            tile(p, at, ROWS, 1, 0, (int)columns, TYPE);                                                               \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MOST_ROWS == 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

/* Blocks of nearly equal numbers of rows take turns with a part of a panel, and the last of them fetches what comes next. */
INLINE void multiply_by_part(const Product *p, Part part, Place at, int64_t ahead, const int TYPE)
{
    const int64_t num_rows = part.end_row - part.first_row, blocks = blocks_of(num_rows);
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t row = num_rows * b / blocks, next = num_rows * (b + 1) / blocks;
        at.row = part.first_row + row;
        at.ahead = b == blocks - 1 ? ahead : 0;
        tile_of_rows(p, at, next - row, TYPE);
    }
}

/* Multiplies panels in fp32, and those that are widened to it. */
static void multiply_fp32_by_part(const Product *p, Part part, Place at, int64_t ahead)
{
    multiply_by_part(p, part, at, ahead, FP32);
}

INLINE void multiply_as(const Product *p, Part part, const int TYPE)
{
    const int64_t blocks = blocks_of(part.end_row - part.first_row);
    const int is_widened = TYPE == FP16 && blocks >= WORTH_WIDENING;
    const int64_t step = is_widened ? WIDENED_PART : blocks == 1 || p->adds ? p->depth : DEPTH_PART;
    float widened[WIDENED_PART * PANEL];
    for (int64_t column = part.first_column; column < part.end_column; column += PANEL) {
        const int64_t left = p->num_columns - column, width = left < PANEL ? left : PANEL;
        for (int64_t first = 0; first < p->depth; first += step) {
            const int64_t end = first + step < p->depth ? first + step : p->depth, size = (end - first) * width;
            const char *w = (const char *)p->w + (column * p->depth + first * width) * SIZE_OF(TYPE);
            const int64_t ahead = blocks == 1 ? STREAM_AHEAD : size * SIZE_OF(TYPE);
            const Place at = {0, column, first, end, is_widened ? (const void *)widened : w, 0};
            if (is_widened) {
                for (int64_t i = 0; i < size; i += WIDTH) {
                    const int count = size - i < WIDTH ? (int)(size - i) : WIDTH;
                    store_first(widened + i, widened_halves((const uint16_t *)w + i, count), count);
                    __builtin_prefetch(w + (size + i) * SIZE_OF(TYPE), 0, 2);
                }
                multiply_fp32_by_part(p, part, at, 0);
            } else if (TYPE == FP32)
                multiply_fp32_by_part(p, part, at, ahead);
            else
                multiply_by_part(p, part, at, ahead, TYPE);
        }
    }
}

INLINE vec scales_at(const uint8_t *from, int64_t column, int count, Coding c)
{
    return c.has_wide_scales ? load_first((const float *)from + column, count)
                             : widened_halves((const uint16_t *)from + column, count);
}

/* A block of a panel of `width` columns: scales and shifts of WIDTH or fewer columns, and where their codes begin. */
typedef struct {
    vec scale, shift;
    const uint8_t *codes;
} Block;

INLINE Block block_at(const uint8_t *from, int64_t width, int64_t column, int count, Coding c)
{
    const int64_t scale_bytes = width * (c.has_wide_scales ? 4 : 2);
    const vec scale = scales_at(from, column, count, c);
    /* times a power of two: not rounded */
    const vec shift = c.has_shifts ? scales_at(from + scale_bytes, column, count, c) : scale * (c.has_bytes ? -128.0f : -8.0f);
    return (Block){scale, shift, from + scale_bytes * (1 + c.has_shifts) + column};
}

/* Numbers of codes; `is_upper`: of those in the upper halves of bytes. */
INLINE vec numbers_of(vec_of_int found, vec scale, vec shift, const int HAS_BYTES, const int is_upper)
{
    const vec_of_int codes = HAS_BYTES ? found : is_upper ? found >> 4 : found & 15;
    return fused(scale, __builtin_convertvector(codes, vec), shift);
}

/* WIDTH or fewer columns of a block, `width` numbers apart, in fp32. */
INLINE void widen_columns(float *to, Block b, int64_t width, int count, Coding c, const int IS_FULL, const int HAS_BYTES)
{
    UNROLLED_BY_8 for (int k = 0; k < c.size; k += HAS_BYTES ? 1 : 2, b.codes += width) {
        const vec_of_int found = widened_bytes(b.codes, IS_FULL ? WIDTH : count);
        store_lanes(to + k * width, numbers_of(found, b.scale, b.shift, HAS_BYTES, 0), count, IS_FULL);
        if (!HAS_BYTES)
            store_lanes(to + (k + 1) * width, numbers_of(found, b.scale, b.shift, 0, 1), count, IS_FULL);
    }
}

/* One block of `width` columns at `from`, in fp32. */
INLINE void widen_block(float *to, const uint8_t *from, int64_t width, Coding c, const int HAS_BYTES)
{
    for (int64_t column = 0; column < width; column += WIDTH) {
        const int count = (int)smaller(WIDTH, width - column);
        const Block b = block_at(from, width, column, count, c);
        if (count == WIDTH)
            widen_columns(to + column, b, width, WIDTH, c, 1, HAS_BYTES);
        else
            widen_columns(to + column, b, width, count, c, 0, HAS_BYTES);
    }
}

/* `depth` numbers of each of `width` columns. */
static const uint8_t *widen_blocks(float *to, const uint8_t *from, int64_t width, int64_t depth, Coding c)
{
    for (int64_t k = 0; k < depth; k += c.size, to += c.size * width, from += width * bytes_of_block(c)) {
        const int64_t columns = width == PANEL ? PANEL : width;
        if (c.has_bytes)
            widen_block(to, from, columns, c, 1);
        else
            widen_block(to, from, columns, c, 0);
    }
    return from;
}

/* Few rows and a whole panel, whose numbers stay in registers. */
INLINE void tile_of_blocks(const Product *p, Part part, int64_t column, const uint8_t *w, Coding c, const int ROWS,
                           const int HAS_BYTES)
{
    const float *x = p->x + part.first_row * p->x_stride;
    float *out = p->out + part.first_row * p->out_stride + column;
    vec sums[MOST_ROWS][PANEL_VECTORS];
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < PANEL_VECTORS; v++)
            sums[r][v] = (vec){0};
    for (int64_t first = 0; first < p->depth; first += c.size, w += PANEL * bytes_of_block(c)) {
        Block b[PANEL_VECTORS];
        UNROLLED for (int v = 0; v < PANEL_VECTORS; v++)
            b[v] = block_at(w, PANEL, v * WIDTH, WIDTH, c);
        const uint8_t *codes = b[0].codes;
        for (int64_t k = first; k < first + c.size; k += HAS_BYTES ? 1 : 2, codes += PANEL) {
            __builtin_prefetch(codes + STREAM_AHEAD, 0, 2);
            vec_of_int found[PANEL_VECTORS];
            UNROLLED for (int v = 0; v < PANEL_VECTORS; v++)
                found[v] = widened_bytes(codes + v * WIDTH, WIDTH);
            /* unrolled, some of the sums of four and more rows would be kept in memory */
            for (int n = 0; n < (HAS_BYTES ? 1 : 2); n++) {
                vec values[PANEL_VECTORS];
                UNROLLED for (int v = 0; v < PANEL_VECTORS; v++)
                    values[v] = numbers_of(found[v], b[v].scale, b[v].shift, HAS_BYTES, n);
                UNROLLED for (int r = 0; r < ROWS; r++)
                    UNROLLED for (int v = 0; v < PANEL_VECTORS; v++)
                        sums[r][v] = fused(all_lanes(x[r * p->x_stride + k + n]), values[v], sums[r][v]);
            }
        }
    }
    UNROLLED for (int v = 0; v < PANEL_VECTORS; v++)
    {
        const vec shift = p->bias ? load(p->bias + column + v * WIDTH) : (vec){0};
        UNROLLED for (int r = 0; r < ROWS; r++)
            store(out + r * p->out_stride + v * WIDTH, p->bias ? sums[r][v] + shift : sums[r][v]);
    }
}

INLINE void tile_of_few_rows(const Product *p, Part part, int64_t column, const uint8_t *w, Coding c, const int HAS_BYTES)
{
    switch (part.end_row - part.first_row) {
#define CASE(ROWS)                                                                                                     \
    case ROWS:                                                                                                         \
        tile_of_blocks(p, part, column, w, c, ROWS, HAS_BYTES);                                                        \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MOST_ROWS == 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

static void multiply_blocks(const Product *p, Part part)
{
    const Coding c = coding_of(p->type);
    const int is_few = part.end_row - part.first_row <= MOST_ROWS;
    float widened[WIDENED_PART * PANEL];
    for (int64_t column = part.first_column; column < part.end_column; column += PANEL) {
        const uint8_t *w = (const uint8_t *)p->w + column * (p->depth / c.size) * bytes_of_block(c);
        const int64_t width = smaller(PANEL, p->num_columns - column);
        if (is_few && width == PANEL && c.has_bytes)
            tile_of_few_rows(p, part, column, w, c, 1);
        else if (is_few && width == PANEL)
            tile_of_few_rows(p, part, column, w, c, 0);
        else
            for (int64_t first = 0, end; first < p->depth; first = end) {
                end = smaller(p->depth, first + WIDENED_PART);
                w = widen_blocks(widened, w, width, end - first, c);
                multiply_fp32_by_part(p, part, (Place){0, column, first, end, widened, 0}, 0);
            }
    }
}

/* Not inlined: the compiler takes long over its tiles. */
__attribute__((noinline)) static void multiply(const Product *p, Part part)
{
    if (p->type == FP32)
        multiply_as(p, part, FP32);
    else if (p->type == BF16_PAIRS)
        multiply_as(p, part, BF16_PAIRS);
    else if (p->type == BF16)
        multiply_as(p, part, BF16);
    else if (p->type & BLOCKS)
        multiply_blocks(p, part);
    else
        multiply_as(p, part, FP16);
}

#endif
