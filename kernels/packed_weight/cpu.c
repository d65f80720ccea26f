/* Linear layers on weights in panels (see ../native/panels.h), and the way into that layout and back. */
#include "../native/linear.h"
#include "../native/lora.h"

/* Multiplications below which threads take longer to meet than to compute: 1,024 cycles at 32 a cycle. Not tuned. */
#define WORTH_A_TEAM 32768

/* Numbers in fp32 of a line of the cache, 64 bytes. */
#define NUMBERS_OF_LINE 16

/* Rows of which as many columns are written at a time: whole lines of the cache, and what is read stays in it. Not tuned. */
#define COLUMNS_AT_ONCE 64

/* How rows are put down: in panels, one after the other, or as columns of a matrix. As in panels.py. */
enum { PANELS, ROWS, COLUMNS };

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

/* A number rounded to bf16, ties to even; NaN stays. */
INLINE uint16_t brain(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Place of the number k along the depth of a column, in a panel of `width` columns. */
INLINE int64_t place_of(int64_t k, int64_t column, int64_t width, const int TYPE)
{
    return TYPE == BF16_PAIRS ? (k / 2 * width + column) * 2 + k % 2 : k * width + column;
}

/* Number i of x becomes number `at` of `to`: in fp32, bf16, or what x is in. */
INLINE void put(void *to, int64_t at, const int TO_TYPE, const void *x, int64_t i, const int TYPE)
{
    if (TO_TYPE == FP32)
        ((float *)to)[at] = number(x, i, TYPE);
    else if (TO_TYPE == FP16 || TYPE == BF16)
        ((uint16_t *)to)[at] = ((const uint16_t *)x)[i];
    else
        ((uint16_t *)to)[at] = brain(number(x, i, TYPE));
}

/* Rows x [num_rows, depth] of TYPE, `stride` numbers apart, become rows first_row and so on of a weight of `total` rows. */
INLINE void pack(void *panels, const int PANELS_TYPE, int64_t first_row, int64_t total, const void *x,
                 int64_t num_rows, int64_t depth, int64_t stride, const int TYPE)
{
    for (int64_t row = 0, next; row < num_rows; row = next) {
        const int64_t start = (first_row + row) / PANEL * PANEL, width = smaller(PANEL, total - start);
        const int64_t column = first_row + row - start;
        next = smaller(num_rows, start + PANEL - first_row);
        /* line by line: the same place of all rows would share few sets of the cache */
        for (int64_t first = 0, end; first < depth; first = end) {
            end = smaller(depth, first + NUMBERS_OF_LINE);
            for (int64_t r = row; r < next; r++)
                for (int64_t k = first; k < end; k++)
                    put(panels, start * depth + place_of(k, column + r - row, width, PANELS_TYPE), PANELS_TYPE, x,
                        r * stride + k, TYPE);
        }
    }
}

/* Packs rows one after the other. */
INLINE void pack_as_rows(void *to, const int TO_TYPE, int64_t first_row, const void *x, int64_t num_rows, int64_t depth,
                         int64_t stride, const int TYPE)
{
    for (int64_t r = 0; r < num_rows; r++)
        for (int64_t k = 0; k < depth; k++)
            put(to, (first_row + r) * depth + k, TO_TYPE, x, r * stride + k, TYPE);
}

/* Packs rows as columns of a matrix [depth, total]. */
INLINE void pack_as_columns(void *to, const int TO_TYPE, int64_t first_row, int64_t total, const void *x,
                            int64_t num_rows, int64_t depth, int64_t stride, const int TYPE)
{
    for (int64_t row = 0, next; row < num_rows; row = next) {
        next = smaller(num_rows, row + COLUMNS_AT_ONCE);
        for (int64_t k = 0; k < depth; k++)
            for (int64_t r = row; r < next; r++)
                put(to, k * total + first_row + r, TO_TYPE, x, r * stride + k, TYPE);
    }
}

/* `to_type`: fp32, bf16 (in pairs only in panels) or what x is in. */
static void pack_rows(void *to, int64_t to_type, int64_t form, int64_t first_row, int64_t total, const void *x,
                      int64_t num_rows, int64_t depth, int64_t stride, int64_t type)
{
#define PANELS_CASE(TO_TYPE, TYPE)                                                                                     \
    if (form == PANELS && to_type == TO_TYPE && type == TYPE)                                                          \
        pack(to, TO_TYPE, first_row, total, x, num_rows, depth, stride, TYPE);
#define CASE(TO_TYPE, TYPE)                                                                                            \
    PANELS_CASE(TO_TYPE, TYPE)                                                                                         \
    if (form == ROWS && to_type == TO_TYPE && type == TYPE)                                                            \
        pack_as_rows(to, TO_TYPE, first_row, x, num_rows, depth, stride, TYPE);                                                \
    if (form == COLUMNS && to_type == TO_TYPE && type == TYPE)                                                         \
        pack_as_columns(to, TO_TYPE, first_row, total, x, num_rows, depth, stride, TYPE);
    CASE(FP32, FP32) CASE(FP32, BF16) CASE(FP32, FP16) CASE(FP16, FP16) CASE(BF16, FP32) CASE(BF16, BF16)
    CASE(BF16, FP16) PANELS_CASE(BF16_PAIRS, BF16) PANELS_CASE(BF16_PAIRS, FP32) PANELS_CASE(BF16_PAIRS, FP16)
#undef CASE
#undef PANELS_CASE
}

/* Rows of a matrix of `total` rows that begins with number `start`; they are `stride` numbers apart where they come from. */
typedef struct {
    int64_t start, to_type, first_row, total, form;
    const void *x;
    int64_t num_rows, depth, stride, type;
} Rows;

/* Rows of many matrices, in the thread that calls: adapters are read beside steps, and a second team of threads would
 * make OpenMP put the steps' own to sleep between loops. */
void pack_matrices(void *numbers, const Rows *rows, int64_t count)
{
    for (const Rows *r = rows; r < rows + count; r++)
        pack_rows((char *)numbers + r->start * SIZE_OF(r->to_type), r->to_type, r->form, r->first_row, r->total, r->x,
                  r->num_rows, r->depth, r->stride, r->type);
}

/* All rows of a weight, by all threads. */
void pack_weight(void *panels, int64_t panels_type, const void *x, int64_t num_columns, int64_t depth, int64_t type)
{
#pragma omp parallel for
    for (int64_t start = 0; start < num_columns; start += PANEL)
        pack_rows(panels, panels_type, PANELS, start, num_columns, (const char *)x + start * depth * SIZE_OF(type),
                  smaller(PANEL, num_columns - start), depth, depth, type);
}

/* Columns of a panel of `width` columns that begins with number `first` of `panels`, as rows in fp32. */
INLINE void unpack(float *w, const void *panels, int64_t first, int64_t width, int64_t depth, const int TYPE)
{
    for (int64_t c = 0; c < width; c++)
        for (int64_t k = 0; k < depth; k++)
            w[c * depth + k] = number(panels, first + place_of(k, c, width, TYPE), TYPE);
}

static void unpack_blocks(float *w, const uint8_t *panel, int64_t width, int64_t depth, Coding coding)
{
    float widened[32 * PANEL];
    for (int64_t first = 0; first < depth; first += coding.size) {
        panel = widen_blocks(widened, panel, width, coding.size, coding);
        for (int64_t c = 0; c < width; c++)
            for (int64_t k = 0; k < coding.size; k++)
                w[c * depth + first + k] = widened[k * width + c];
    }
}

/* In fp32, whatever the panels hold. */
void unpack_weight(float *w, const void *panels, int64_t num_columns, int64_t depth, int64_t type)
{
    const Coding coding = coding_of(type);
#pragma omp parallel for
    for (int64_t start = 0; start < num_columns; start += PANEL) {
        const int64_t first = start * depth, width = smaller(PANEL, num_columns - start);
        if (type == FP32)
            unpack(w + first, panels, first, width, depth, FP32);
        else if (type == BF16_PAIRS)
            unpack(w + first, panels, first, width, depth, BF16_PAIRS);
        else if (type == BF16)
            unpack(w + first, panels, first, width, depth, BF16);
        else if (type & BLOCKS)
            unpack_blocks(w + first, (const uint8_t *)panels + first / coding.size * bytes_of_block(coding), width, depth,
                          coding);
        else
            unpack(w + first, panels, first, width, depth, FP16);
    }
}

/* Tiles are dealt out panel by panel. */
static void multiply_share_of_panels(const Product *product, int64_t num_rows)
{
    const int64_t num_columns = product->num_columns, thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t blocks = blocks_of(num_rows), tiles = (num_columns + PANEL - 1) / PANEL * blocks;
    const int64_t last = tiles * (thread + 1) / threads;
    for (int64_t i = tiles * thread / threads, next; i < last; i = next) {
        const int64_t column = i / blocks * PANEL, block = i % blocks;
        next = smaller(last, i - block + blocks);
        multiply(product, (Part){num_rows * block / blocks, num_rows * (block + next - i) / blocks, column,
                                 smaller(column + PANEL, num_columns)});
    }
}

/* A `linear` whose weight is in panels; `scratch` is that of `lora_of`. */
static void linear_panels(float *y, const float *x, int64_t num_rows, const Linear *l, Segments segments, float *scratch)
{
    const Product product = {y,        x,        l->w,           l->bias, l->num_columns,
                             l->depth, l->depth, l->num_columns, 1,       0, (int)l->type};
    multiply_share_of_panels(&product, num_rows);
    if (segments.count) {
        const Lora lora = lora_of(y, l->num_columns, x, l->depth, segments, scratch);
        add_all(&lora);
    }
}

/* y [num_rows, num_columns] += scaling * x [num_rows, depth] W^T, panels in fp32. */
void add_linear_panels(float *y, const float *x, int64_t num_rows, const float *panels, int64_t num_columns,
                       int64_t depth, float scaling)
{
    const Product product = {y, x, panels, 0, num_columns, depth, depth, num_columns, scaling, 1, FP32};
#pragma omp parallel if (num_rows * num_columns * depth > WORTH_A_TEAM)
    multiply_share_of_panels(&product, num_rows);
}

/* Columns of a panel, for those who pack blocks. */
int panel_columns(void) { return PANEL; }
