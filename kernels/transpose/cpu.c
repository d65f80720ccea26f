/* Matrices of 32-bit or 16-bit floats, transposed into fp32. Runs in the thread that calls it: adapters are read beside
 * steps, and a second team of threads would make OpenMP put the steps' own to sleep between loops. */
#include "../native/vector.h"

/* Source rows whose cache lines are read side by side; each fills one line of a target row. */
#define ROWS 16

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

INLINE void transpose(float *out, int64_t out_stride, const void *x, int64_t rows, int64_t columns, const int TYPE)
{
    for (int64_t row = 0; row < rows; row += ROWS) {
        int64_t end = row + ROWS < rows ? row + ROWS : rows;
        for (int64_t column = 0; column < columns; column++)
            for (int64_t r = row; r < end; r++)
                out[column * out_stride + r] = number(x, r * columns + column, TYPE);
    }
}

/* out [columns, rows], its rows `out_stride` apart, from x [rows, columns] of `type`. */
void transpose_to_fp32(float *out, int64_t out_stride, const void *x, int64_t rows, int64_t columns, int64_t type)
{
    if (type == FP32)
        transpose(out, out_stride, x, rows, columns, FP32);
    else if (type == BF16)
        transpose(out, out_stride, x, rows, columns, BF16);
    else
        transpose(out, out_stride, x, rows, columns, FP16);
}
