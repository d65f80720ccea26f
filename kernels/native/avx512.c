/* For processors with AVX-512. */
#define VECTOR_BYTES 64
#include "kernels.h"
