/* A linear layer as compiled kernels multiply by it. */
#ifndef LORABATCH_LINEAR_H
#define LORABATCH_LINEAR_H

#include "dots.h"

/* Written by LinearRecord in linears.py. */
typedef struct {
    const void *w;              /* panels [num_columns, depth], see panels.h and dots.h */
    const float *scales, *bias; /* of columns; scales: only in 8 bits; bias: NULL for none */
    int64_t num_columns, depth;
    int64_t kind, type; /* of products; type: of panels in products in fp32 */
} Linear;

#endif
