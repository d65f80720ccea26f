/* Vectors of the width that the including file defines as VECTOR_BYTES (64 or 32), and what all kernels need of them. The
 * file is compiled with the instructions to match: AVX-512, or AVX2 with FMA. */
#ifndef LORABATCH_VECTOR_H
#define LORABATCH_VECTOR_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define WIDTH ((int)(VECTOR_BYTES / sizeof(float)))
#define INLINE static inline __attribute__((always_inline))

/* Number formats. In pairs, and in blocks: of a weight in panels, see panels.h. */
enum { FP32, BF16_PAIRS, FP16, BF16, BLOCKS };
#define SIZE_OF(TYPE) ((TYPE) == FP32 ? 4 : 2)

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

typedef float vec __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vec_of_int __attribute__((vector_size(VECTOR_BYTES)));

INLINE vec load(const float *from)
{
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vec v)
{
    memcpy(to, &v, sizeof v);
}

/* By an instruction: the sum of a vector of zeros and a number is one more addition, since it makes +0 of -0. */
INLINE vec all_lanes(float number)
{
#if VECTOR_BYTES == 64
    return (vec)_mm512_set1_ps(number);
#else
    return (vec)_mm256_set1_ps(number);
#endif
}

/* a * b + c, rounded once. Left to the compiler, some copies of a loop would round twice and others once. */
INLINE vec fused(vec a, vec b, vec c)
{
#if VECTOR_BYTES == 64
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

/* The first `count` lanes; the others are zero and their memory is not touched. */
#if VECTOR_BYTES == 64
INLINE vec load_first(const float *from, int count)
{
    return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
}

INLINE void store_first(float *to, vec v, int count)
{
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)v);
}
#else
INLINE __m256i lanes_below(int count)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE vec load_first(const float *from, int count)
{
    return (vec)_mm256_maskload_ps(from, lanes_below(count));
}

INLINE void store_first(float *to, vec v, int count)
{
    _mm256_maskstore_ps(to, lanes_below(count), (__m256)v);
}
#endif

/* The first `count` numbers in fp16, widened; the others are zero and their memory is not touched. */
INLINE vec widened_halves(const uint16_t *from, int count)
{
#if VECTOR_BYTES == 64
    return (vec)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), from));
#else
    uint16_t halves[WIDTH] = {0};
    memcpy(halves, from, count * sizeof *from);
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
#endif
}

/* The first `count` numbers in bf16, widened; the others are zero and their memory is not touched. */
INLINE vec widened_brains(const uint16_t *from, int count)
{
#if VECTOR_BYTES == 64
    const __m256i brains = count == WIDTH ? _mm256_loadu_si256((const __m256i *)from)
                                          : _mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), from);
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(brains), 16);
#else
    if (count == WIDTH)
        return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
    __m128i brains = _mm_maskload_epi32((const int *)from, _mm256_castsi256_si128(lanes_below(count / 2)));
    if (count & 1) {
        uint16_t last[WIDTH] = {0};
        last[count - 1] = from[count - 1];
        brains = _mm_or_si128(brains, _mm_loadu_si128((const __m128i *)last));
    }
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(brains), 16);
#endif
}

/* The first `count` bytes as whole numbers; the memory of the others is not touched. */
INLINE vec_of_int widened_bytes(const uint8_t *from, int count)
{
    uint8_t bytes[WIDTH] = {0};
    if (count < WIDTH)
        from = memcpy(bytes, from, count);
#if VECTOR_BYTES == 64
    return (vec_of_int)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    return (vec_of_int)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#endif
}

/* WIDTH numbers rounded to bf16, ties to even; NaN stays. */
INLINE void store_brains(uint16_t *to, vec v)
{
    const vec_of_int bits = (vec_of_int)v, odd = (bits >> 16) & 1, is_nan = v != v;
    const vec_of_int rounded = (bits + 0x7fff + odd) >> 16, brains = ((is_nan & 0x7fc0) | (~is_nan & rounded)) & 0xffff;
#if VECTOR_BYTES == 64
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)brains));
#else
    const __m256i packed = _mm256_packus_epi32((__m256i)brains, (__m256i)brains);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#endif
}

/* The larger number of each lane; b where either is NaN. */
INLINE vec larger_lanes(vec a, vec b)
{
#if VECTOR_BYTES == 64
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#endif
}

/* 2^(n + f) for whole n >= -126 and |f| <= 1/2: a polynomial whose largest relative error over these f is least, 2e-9. */
INLINE vec power_of_two(vec n, vec f)
{
    vec power = f * 1.534581208e-4f + 1.339993131e-3f;
    power = power * f + 9.618488958e-3f;
    power = power * f + 5.550328777e-2f;
    power = power * f + 2.402264689e-1f;
    power = power * f + 6.931472057e-1f;
    power = power * f + 1.0f;
#if VECTOR_BYTES == 64
    return (vec)_mm512_scalef_ps((__m512)power, (__m512)n);
#else
    return power * (vec)((__builtin_convertvector(n, vec_of_int) + 127) << 23);
#endif
}

/* Lanes rounded to whole numbers, below 2^22. */
INLINE vec whole(vec x)
{
    const vec shift = (vec){0} + 12582912.0f; /* 1.5 * 2^23 */
    return (x + shift) - shift;
}

/* 2^x for x <= 0. Below -126 the result is no smaller than 2^-126; NaN stays. */
INLINE vec power_of_negative(vec x)
{
    x = larger_lanes((vec){0} - 126.0f, x);
    const vec n = whole(x);
    return power_of_two(n, x - n);
}

/* e^x for x <= 0. Below -87 the result is no smaller than e^-87; NaN stays. */
INLINE vec exponential(vec x)
{
    x = larger_lanes((vec){0} - 87.0f, x);
    const vec n = whole(x * 1.44269504f);
    return power_of_two(n, x * 1.44269504f - n);
}

/* x / (1 + e^-x). */
INLINE vec sigmoid(vec x)
{
    /* e^-|x| cannot overflow: sigmoid is 1 / (1 + e^-|x|) above zero and e^-|x| times that below */
    const vec_of_int is_negative = x < 0;
    const vec power = exponential((vec)((vec_of_int)x | INT32_MIN)), above = 1.0f / (1.0f + power);
    return (vec)((is_negative & (vec_of_int)(power * above)) | (~is_negative & (vec_of_int)above));
}

INLINE vec silu(vec x) { return x * sigmoid(x); }

#if VECTOR_BYTES == 64
static const vec_of_int lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
static const vec_of_int lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

/* Every lane beside the one `distance` lanes away, a power of two. */
INLINE vec exchanged(vec v, const int distance) { return __builtin_shuffle(v, lane_numbers ^ distance); }

/* The sum of all lanes, of halves, then of their halves. */
INLINE float lane_sum(vec v)
{
    for (int distance = WIDTH / 2; distance; distance /= 2)
        v += exchanged(v, distance);
    return v[0];
}

#endif
