/* Rows times a weight in panels.
 *
 * A weight W [num_columns, depth] is stored panel after panel: PANEL rows of W, transposed, so that what one step along the
 * depth needs is one or two cache lines and a panel is read from its first byte to its last. The last panel is as wide
 * as what is left. Memory delivers such a stream twice as fast as rows a stride apart.
 *
 * Numbers of a weight are in fp32, bf16 or fp16, and widened to fp32 in registers, which is exact. In bf16 two numbers
 * along the depth may stand side by side, so that a shift and a mask widen them; the depth is even then.
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
/* One block reads a panel once, as it comes from memory: so many bytes ahead. */
#define STREAM_AHEAD 4096
#define UNROLLED _Pragma("GCC unroll 12")

/* out[rows, columns] = x[rows, depth] W^T + bias; or, where `adds`, out += scaling * x W^T. */
typedef struct {
    float *out;
    const float *x;
    const void *w;     /* panels of `type` */
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

/* Hidden: another library's function of this name is not called instead. */
__attribute__((visibility("hidden"))) void multiply(const Product *p, Part part);

#endif
