/* Rows times a weight in panels.
 *
 * A weight W [num_columns, depth] is stored panel after panel: PANEL rows of W, transposed, so that what one step along the
 * depth needs is one or two cache lines and a panel is read from its first byte to its last. The last panel is as wide
 * as what is left. Memory delivers such a stream twice as fast as rows a stride apart.
 *
 * Each output number is one chain of fused multiply-adds over the depth, in order, whatever the number of rows, blocks
 * or threads: a row's result does not depend on the rows beside it, bit for bit.
 */
#ifndef LORABATCH_PANELS_H
#define LORABATCH_PANELS_H

#include "vector.h"

#define PANEL_VECTORS 2
#define PANEL (PANEL_VECTORS * WIDTH)
/* Rows of a block; few rows are one block, as large as registers allow, since every block reads the panel again. */
#if VECTOR_BYTES == 64
#define BLOCK_ROWS 8
#define MOST_ROWS 12
#else
#define BLOCK_ROWS 6
#define MOST_ROWS 6
#endif
/* Of a panel, so much stays in the second cache while blocks of rows take turns: 256 KB. */
#define DEPTH_PART 2048
/* One block reads a panel once, as it comes from memory: 4 KB ahead. */
#define STREAM_AHEAD 1024
#define UNROLLED _Pragma("GCC unroll 12")

/* out[rows, columns] = x[rows, depth] W^T + bias; or, where `adds`, out += scaling * x W^T. */
typedef struct {
    float *out;
    const float *x, *w, *bias; /* bias: NULL for none */
    int64_t out_stride, x_stride, depth, num_columns;
    float scaling;
    int adds;
} Product;

/* Rows and columns of a product; columns begin with a panel. */
typedef struct {
    int64_t first_row, end_row, first_column, end_column;
} Part;

/* What a tile covers: along the depth from `first` to `end`; `ahead`: how far on to fetch, in floats. */
typedef struct {
    int64_t row, column, first, end, ahead;
} Place;

/* ROWS x VECTORS sums in registers; of the last vector only `lanes` columns exist. Unless asked to unroll, the compiler
 * keeps some of the sums in memory. */
INLINE void tile(const Product *p, Place at, const int ROWS, const int VECTORS, int lanes)
{
    const int FULL = lanes == WIDTH ? VECTORS : VECTORS - 1;
    const int64_t width = (VECTORS - 1) * WIDTH + lanes;
    const float *x = p->x + at.row * p->x_stride, *w = p->w + at.column * p->depth + at.first * width;
    float *out = p->out + at.row * p->out_stride + at.column;
    vec sums[MOST_ROWS][PANEL_VECTORS];
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++)
        {
            const float *before = out + r * p->out_stride + v * WIDTH;
            sums[r][v] = at.first == 0 ? (vec){0} : v < FULL ? load(before) : load_first(before, lanes);
        }
    for (int64_t k = at.first; k < at.end; k++, w += width) {
        vec values[PANEL_VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            values[v] = v < FULL ? load(w + v * WIDTH) : load_first(w + v * WIDTH, lanes);
            __builtin_prefetch(w + at.ahead + v * WIDTH, 0, 2);
        }
        UNROLLED for (int r = 0; r < ROWS; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                sums[r][v] += x[r * p->x_stride + k] * values[v];
    }
    const float *bias = at.end == p->depth && p->bias ? p->bias + at.column : 0;
    UNROLLED for (int v = 0; v < VECTORS; v++) {
        const int is_full = v < FULL;
        vec shift = (vec){0};
        if (bias)
            shift = is_full ? load(bias + v * WIDTH) : load_first(bias + v * WIDTH, lanes);
        UNROLLED for (int r = 0; r < ROWS; r++) {
            float *to = out + r * p->out_stride + v * WIDTH;
            vec value = sums[r][v];
            if (p->adds)
                value = (is_full ? load(to) : load_first(to, lanes)) + p->scaling * value;
            else if (bias)
                value += shift;
            if (is_full)
                store(to, value);
            else
                store_first(to, value, lanes);
        }
    }
}

static void tile_of_rows(const Product *p, Place at, int64_t num_rows)
{
    const int64_t columns = p->num_columns - at.column;
    switch (num_rows) {
#define CASE(ROWS)                                                                                                     \
    case ROWS:                                                                                                         \
        if (columns >= PANEL)                                                                                          \
            tile(p, at, ROWS, 2, WIDTH);                                                                               \
        else if (columns > WIDTH)                                                                                      \
            tile(p, at, ROWS, 2, (int)columns - WIDTH);                                                                \
        else                                                                                                           \
            tile(p, at, ROWS, 1, (int)columns);                                                                        \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MOST_ROWS == 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

INLINE int64_t blocks_of(int64_t num_rows)
{
    return num_rows <= MOST_ROWS ? 1 : (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
}

/* Blocks of nearly equal numbers of rows take turns with a panel, and the last of them fetches what comes next. */
static void multiply(const Product *p, Part part)
{
    const int64_t num_rows = part.end_row - part.first_row, blocks = blocks_of(num_rows);
    const int64_t step = blocks == 1 || p->adds ? p->depth : DEPTH_PART;
    for (int64_t column = part.first_column; column < part.end_column; column += PANEL)
        for (int64_t first = 0; first < p->depth; first += step) {
            const int64_t end = first + step < p->depth ? first + step : p->depth;
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t row = num_rows * b / blocks, next = num_rows * (b + 1) / blocks;
                const int64_t ahead = blocks == 1 ? STREAM_AHEAD : b == blocks - 1 ? (end - first) * PANEL : 0;
                tile_of_rows(p, (Place){part.first_row + row, column, first, end, ahead}, next - row);
            }
        }
}

#endif
