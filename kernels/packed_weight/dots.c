/* Linear layers by dot products of groups, see ../native/dots.h. A call encodes the rows first. */
#include "../native/linear.h"
#include "../native/lora.h"

#define MOST_CODE 127.0f
/* Four times WORTH_A_TEAM: an instruction multiplies four numbers of 8 bits in each lane. Not tuned. */
#define DOTS_WORTH_A_TEAM 131072
/* With fewer blocks of rows products wait for memory themselves: decode steps of 16 to 24 rows took 1.5 ms longer (ADR 99). */
#define FEWEST_FETCHING 6

int64_t kinds_of_dots(void) { return dots_of_processor(); }

#if DOTS_OF_BUILD
/* The first `count` numbers, which fit in 8 bits or are all the same in what is stored. */
INLINE HAS_DOTS void store_codes(int8_t *to, int_reg rounded, int count)
{
#if VECTOR_BYTES == 64
    _mm512_mask_cvtsepi32_storeu_epi8(to, (__mmask16)((1u << count) - 1), rounded);
#else
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    const int64_t codes = _mm_cvtsi128_si64(_mm_packs_epi16(halves, halves));
    if (count == WIDTH)
        memcpy(to, &codes, sizeof codes);
    else
        memcpy(to, &codes, count);
#endif
}

/* A row with a number that is not finite has the scale NaN: so has its result. */
HAS_DOTS static Row encode_quads(int32_t *codes, const float *x, int64_t depth, int64_t groups)
{
    vec largest = {0}, poison = {0};
    for (int64_t k = 0; k < depth; k += WIDTH) {
        const vec v = load_first(x + k, depth - k < WIDTH ? (int)(depth - k) : WIDTH);
        largest = (vec)larger_of((reg)largest, (reg)(vec)((vec_of_int)v & INT32_MAX));
        poison += v * 0.0f;
    }
    float most = 0, spoilt = 0;
    for (int i = 0; i < WIDTH; i++) {
        most = largest[i] > most ? largest[i] : most;
        spoilt += poison[i];
    }
    const float per_code = most > 0 ? MOST_CODE / most : 0;
    vec_of_int totals = {0};
    codes[groups - 1] = 0;
    for (int64_t k = 0; k < depth; k += WIDTH) {
        const int count = depth - k < WIDTH ? (int)(depth - k) : WIDTH;
        const int_reg rounded = nearest_whole((reg)(load_first(x + k, count) * per_code));
        totals += (vec_of_int)rounded;
        store_codes((int8_t *)codes + k, rounded, count);
    }
    uint32_t total = 0; /* of codes that are not finite it may overflow */
    for (int i = 0; i < WIDTH; i++)
        total += (uint32_t)totals[i];
    return (Row){most / MOST_CODE + spoilt, (int32_t)total};
}

/* Blocks of rows take turns with a panel; panels and their blocks are dealt out to the threads. The last block fetches the next
 * panel, the others what LoRA will read, where there are enough rows to leave memory idle. */
INLINE HAS_DOTS void multiply_share(const Dots *p, int64_t num_rows, const Lora *lora, const int KIND)
{
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads(), blocks = blocks_of(num_rows);
    const int64_t tiles = (p->num_columns + PANEL - 1) / PANEL * blocks;
    const int64_t first = tiles * thread / threads, last = tiles * (thread + 1) / threads;
    const int64_t fetching = blocks < FEWEST_FETCHING ? 0 : (last - first) * (blocks - 1) / blocks;
    Fetch fetch = fetch_of(lora->segments, lora->num_segments, thread, threads, fetching);
    for (int64_t i = first; i < last; i++) {
        const int64_t b = i % blocks, row = num_rows * b / blocks, next = num_rows * (b + 1) / blocks;
        const int64_t column = i / blocks * PANEL;
        const Ahead ahead = blocks == 1       ? panel_ahead(p, column, STREAM_AHEAD)
                            : b == blocks - 1 ? panel_ahead(p, column, p->groups * PANEL * 4)
                                              : next_part(&fetch, p->groups, panel_ahead(p, column, 0));
        tiles_of_dots(p, row, next - row, column, ahead, KIND);
    }
}

HAS_DOTS static void multiply_in_bf16(const Dots *p, int64_t num_rows, const Lora *lora)
{
    multiply_share(p, num_rows, lora, IN_BF16);
}

HAS_DOTS static void multiply_in_int8(const Dots *p, int64_t num_rows, const Lora *lora)
{
    multiply_share(p, num_rows, lora, IN_INT8);
}

/* A `linear` by dot products of short numbers. `codes`: scratch of num_rows * (groups + 2) numbers, followed by that of `lora_of`. */
static void linear_dots(float *y, const float *x, int64_t num_rows, const Linear *l, Segments segments, int32_t *codes)
{
    const int64_t kind = l->kind, depth = l->depth, num_columns = l->num_columns;
    const int64_t groups = (depth + NUMBERS_OF(kind) - 1) / NUMBERS_OF(kind);
    Row *const rows = (Row *)(codes + num_rows * groups);
    const Dots dots = {y,         num_columns, (const char *)codes, groups * 4,  rows, l->w,
                       l->scales, l->bias,     groups,              num_columns, 1.0f, STORED};
    Lora lora = lora_of(y, num_columns, x, depth, segments, (float *)(rows + num_rows));
    if (kind == IN_BF16) /* the depth of its pairs is even: rows have the same codes */
        lora.codes = (uint16_t *)codes;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
        if (kind == IN_BF16)
            encode_pairs((uint16_t *)(codes + r * groups), x + r * depth, depth);
        else
            rows[r] = encode_quads(codes + r * groups, x + r * depth, depth, groups);
        if (kind == IN_INT8 && r < lora.coded_rows)
            encode_pairs(lora.codes + r * depth, x + r * depth, depth);
    }
    if (kind == IN_INT8)
        multiply_in_int8(&dots, num_rows, &lora);
    else if (DOTS_OF_BUILD >> IN_BF16 & 1)
        multiply_in_bf16(&dots, num_rows, &lora);
    if (segments.count) {
        shrink_all(&lora);
#pragma omp barrier
        expand_all(&lora);
    }
}
#else
static void linear_dots(float *y, const float *x, int64_t num_rows, const Linear *l, Segments segments, int32_t *codes) {}
#endif

/* y [num_rows, num_columns] = x [num_rows, depth] W^T + bias + LoRA of the segments, which may be none. `scratch`: as many
 * numbers as StoredWeight.multiply gives. Threads of a team do not meet at the end. */
static void team_linear(float *y, const float *x, int64_t num_rows, const Linear *l, Segments segments, void *scratch)
{
    if (l->kind == IN_FP32)
        linear_panels(y, x, num_rows, l, segments, scratch);
    else
        linear_dots(y, x, num_rows, l, segments, scratch);
}

void linear(float *y, const float *x, int64_t num_rows, const Linear *l, const Segments *segments, void *scratch)
{
    const int64_t least = l->kind == IN_FP32 ? WORTH_A_TEAM : DOTS_WORTH_A_TEAM;
#pragma omp parallel if (num_rows * l->num_columns * l->depth > least)
    team_linear(y, x, num_rows, l, *segments, scratch);
}
