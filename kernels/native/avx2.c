/* For processors with AVX2 with FMA. */
#define VECTOR_BYTES 32
#include "kernels.h"
