/* Linear layers on weights in panels (see ../native/panels.h), and the way into that layout and back. */
#include <omp.h>

#include "../native/panels.h"

/* Below so many multiplications threads take longer to meet than to compute. */
#define WORTH_A_TEAM 32768

#define NUMBERS_OF_LINE 16

enum { FP32, BF16, FP16 };

INLINE float number(const void *x, int64_t i, const int TYPE)
{
    if (TYPE == FP32)
        return ((const float *)x)[i];
    uint16_t half = ((const uint16_t *)x)[i];
    if (TYPE == FP16)
        return _cvtsh_ss(half);
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Rows x [num_rows, depth] become rows first_row and so on of a weight of `total` rows. */
INLINE void pack(float *panels, int64_t first_row, int64_t total, const void *x, int64_t num_rows, int64_t depth,
                 const int TYPE)
{
    for (int64_t row = 0, next; row < num_rows; row = next) {
        const int64_t start = (first_row + row) / PANEL * PANEL, width = smaller(PANEL, total - start);
        float *out = panels + start * depth + (first_row + row - start);
        next = smaller(num_rows, start + PANEL - first_row);
        /* line by line: the same place of all rows would share few sets of the cache */
        for (int64_t first = 0, end; first < depth; first = end) {
            end = smaller(depth, first + NUMBERS_OF_LINE);
            for (int64_t r = row; r < next; r++)
                for (int64_t k = first; k < end; k++)
                    out[k * width + r - row] = number(x, r * depth + k, TYPE);
        }
    }
}

/* In the thread that calls: adapters are read beside steps, and a second team of threads would make OpenMP put the
 * steps' own to sleep between loops. */
void pack_rows(float *panels, int64_t first_row, int64_t total, const void *x, int64_t num_rows, int64_t depth,
               int64_t type)
{
    if (type == FP32)
        pack(panels, first_row, total, x, num_rows, depth, FP32);
    else if (type == BF16)
        pack(panels, first_row, total, x, num_rows, depth, BF16);
    else
        pack(panels, first_row, total, x, num_rows, depth, FP16);
}

void pack_weight(float *panels, const float *w, int64_t num_columns, int64_t depth)
{
#pragma omp parallel for
    for (int64_t start = 0; start < num_columns; start += PANEL)
        pack(panels, start, num_columns, w + start * depth, smaller(PANEL, num_columns - start), depth, FP32);
}

void unpack_weight(float *w, const float *panels, int64_t num_columns, int64_t depth)
{
#pragma omp parallel for
    for (int64_t start = 0; start < num_columns; start += PANEL) {
        const int64_t width = smaller(PANEL, num_columns - start);
        for (int64_t c = 0; c < width; c++)
            for (int64_t k = 0; k < depth; k++)
                w[(start + c) * depth + k] = panels[start * depth + k * width + c];
    }
}

/* Tiles are dealt out panel by panel. */
static void multiply_by_all(const Product *product, int64_t num_rows)
{
    const int64_t num_columns = product->num_columns;
    const int64_t blocks = blocks_of(num_rows), tiles = (num_columns + PANEL - 1) / PANEL * blocks;
#pragma omp parallel if (num_rows * num_columns * product->depth > WORTH_A_TEAM)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const int64_t last = tiles * (thread + 1) / threads;
        for (int64_t i = tiles * thread / threads, next; i < last; i = next) {
            const int64_t column = i / blocks * PANEL, block = i % blocks;
            next = smaller(last, i - block + blocks);
            multiply(product, (Part){num_rows * block / blocks, num_rows * (block + next - i) / blocks, column,
                                     smaller(column + PANEL, num_columns)});
        }
    }
}

/* y [num_rows, num_columns] = x [num_rows, depth] W^T + bias. */
void linear_panels(float *y, const float *x, int64_t num_rows, const float *panels, const float *bias,
                   int64_t num_columns, int64_t depth)
{
    multiply_by_all(&(Product){y, x, panels, bias, num_columns, depth, depth, num_columns, 1, 0}, num_rows);
}

/* y [num_rows, num_columns] += scaling * x [num_rows, depth] W^T. */
void add_linear_panels(float *y, const float *x, int64_t num_rows, const float *panels, int64_t num_columns,
                       int64_t depth, float scaling)
{
    multiply_by_all(&(Product){y, x, panels, 0, num_columns, depth, depth, num_columns, scaling, 1}, num_rows);
}
