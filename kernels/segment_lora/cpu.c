/* Unmerged LoRA on CPUs: shrink and expand of all segments of a step at one packed layer, in one call.
 *
 * Each output number is one chain of fused multiply-adds over the contraction, in order, whatever the number of rows,
 * segments or threads: a row's result does not depend on the rows beside it, bit for bit.
 */
#include <omp.h>

#include "../native/vector.h"

#define MAX_MEMBERS 4
#define PANEL_VECTORS 2
#define PANEL (PANEL_VECTORS * WIDTH)
#if VECTOR_BYTES == 64
#define TILE_ROWS 8
#else
#define TILE_ROWS 4 /* half the registers */
#endif
#define UNROLLED _Pragma("GCC unroll 8")

/* Written by LoraSiteWeights in __init__.py: int64 fields and addresses. */
typedef struct {
    int64_t rank_start, rank_end, column_start, column_end;
    const float *b; /* [rank, out_features of the member] */
    double scaling;
} Member;

typedef struct {
    const float *a; /* [in_features, rank] */
    int64_t rank, num_members;
    Member members[MAX_MEMBERS];
} Site;

typedef struct {
    int64_t start, end;
    const Site *site;
} Segment;

/* out[rows, columns] = x[rows, depth] w[depth, columns], or += scaling times it. */
typedef struct {
    float *out;
    const float *x, *w;
    int64_t out_stride, x_stride, w_stride, depth;
    float scaling;
    int adds;
} Product;

/* Rows and columns of a product. */
typedef struct {
    int64_t first_row, end_row, first_column, end_column;
} Part;

/* ROWS x VECTORS accumulators in registers; of the last vector only `lanes` columns exist. While this panel is
 * computed the next one is fetched. Unless told to unroll, the compiler keeps some of the accumulators in memory. */
INLINE void tile(const Product *p, int64_t row, int64_t column, const int ROWS, const int VECTORS, int lanes)
{
    const float *x = p->x + row * p->x_stride, *w = p->w + column;
    const int FULL = lanes == WIDTH ? VECTORS : VECTORS - 1;
    vec sums[TILE_ROWS][PANEL_VECTORS];
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++)
            sums[r][v] = (vec){0};
    for (int64_t k = 0; k < p->depth; k++, w += p->w_stride) {
        vec values[PANEL_VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            values[v] = v < FULL ? load(w + v * WIDTH) : load_first(w + v * WIDTH, lanes);
            __builtin_prefetch(w + PANEL + v * WIDTH, 0, 2);
        }
        UNROLLED for (int r = 0; r < ROWS; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++)
                sums[r][v] += x[r * p->x_stride + k] * values[v];
    }
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            float *out = p->out + (row + r) * p->out_stride + column + v * WIDTH;
            if (v < FULL)
                store(out, p->adds ? load(out) + p->scaling * sums[r][v] : sums[r][v]);
            else
                store_first(out, p->adds ? load_first(out, lanes) + p->scaling * sums[r][v] : sums[r][v], lanes);
        }
}

/* Of ROWS rows, the columns `column` to `end`. */
INLINE void columns_of(const Product *p, int64_t row, int64_t column, int64_t end, const int ROWS)
{
    for (; end - column >= PANEL; column += PANEL)
        tile(p, row, column, ROWS, PANEL_VECTORS, WIDTH);
    if (end - column > WIDTH)
        tile(p, row, column, ROWS, 2, (int)(end - column) - WIDTH);
    else if (column < end)
        tile(p, row, column, ROWS, 1, (int)(end - column));
}

/* Blocks of nearly equal numbers of rows: weights are read once for each. */
static void multiply(const Product *p, Part part)
{
    const int64_t rows = part.end_row - part.first_row, blocks = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t row = part.first_row + rows * b / blocks, end = part.first_row + rows * (b + 1) / blocks;
        switch (end - row) {
#define CASE(ROWS)                                                                                                     \
    case ROWS:                                                                                                         \
        columns_of(p, row, part.first_column, part.end_column, ROWS);                                                  \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#if TILE_ROWS == 8
            CASE(5) CASE(6) CASE(7) CASE(8)
#endif
        }
    }
}

/* A thread's share of a pass: work between `first` and `last`, counted over all segments. */
typedef struct {
    int64_t first, last, position;
} Share;

/* A number of the weights is fetched once and multiplied with each row; to fetch it takes as long as eight rows. */
static int64_t work_of(int64_t num_rows, int64_t depth, int64_t num_columns)
{
    return (num_rows + 8) * depth * num_columns;
}

/* The part of the next product that is this thread's: some columns of all rows, or where rows are many some rows. */
static Part take(Share *share, int64_t num_rows, int64_t depth, int64_t num_columns)
{
    const int64_t work = work_of(num_rows, depth, num_columns), is_by_rows = num_rows > 2 * TILE_ROWS;
    const int64_t size = is_by_rows ? TILE_ROWS : PANEL, length = is_by_rows ? num_rows : num_columns;
    const int64_t num_units = (length + size - 1) / size;
    const int64_t first = share->first - share->position, last = share->last - share->position;
    share->position += work;
    if (last <= 0 || first >= work)
        return (Part){0, 0, 0, 0};
    /* both threads round the place between them in the same way */
    int64_t start = first <= 0 ? 0 : (2 * first * num_units + work) / (2 * work) * size;
    int64_t end = last >= work ? length : (2 * last * num_units + work) / (2 * work) * size;
    start = start < length ? start : length;
    end = end < length ? end : length;
    return is_by_rows ? (Part){start, end, 0, num_columns} : (Part){0, num_rows, start, end};
}

static Share share_of(int64_t total)
{
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    return (Share){total * thread / threads, total * (thread + 1) / threads, 0};
}

/* y [num_tokens, y_stride] += LoRA of x [num_tokens, in_features]; `scratch` holds the shrunk rows,
 * [num_tokens, scratch_stride], with scratch_stride >= the largest rank of a segment's site. */
void lora_add(float *y, int64_t y_stride, const float *x, int64_t in_features, const Segment *segments,
              int64_t num_segments, float *scratch, int64_t scratch_stride)
{
    int64_t shrink_work = 0, expand_work = 0;
    for (int64_t s = 0; s < num_segments; s++) {
        const Site *site = segments[s].site;
        int64_t num_rows = segments[s].end - segments[s].start;
        shrink_work += work_of(num_rows, in_features, site->rank);
        for (int64_t m = 0; m < site->num_members; m++) {
            const Member *member = &site->members[m];
            expand_work += work_of(num_rows, member->rank_end - member->rank_start,
                                   member->column_end - member->column_start);
        }
    }
#pragma omp parallel
    {
        Share share = share_of(shrink_work);
        for (int64_t s = 0; s < num_segments; s++) {
            const Segment *segment = &segments[s];
            const Site *site = segment->site;
            Product shrink = {scratch + segment->start * scratch_stride, x + segment->start * in_features, site->a,
                              scratch_stride, in_features, site->rank, in_features, 1, 0};
            multiply(&shrink, take(&share, segment->end - segment->start, in_features, site->rank));
        }
#pragma omp barrier
        share = share_of(expand_work);
        for (int64_t s = 0; s < num_segments; s++) {
            const Segment *segment = &segments[s];
            for (int64_t m = 0; m < segment->site->num_members; m++) {
                const Member *member = &segment->site->members[m];
                int64_t num_columns = member->column_end - member->column_start;
                Product expand = {y + segment->start * y_stride + member->column_start,
                                  scratch + segment->start * scratch_stride + member->rank_start, member->b,
                                  y_stride, scratch_stride, num_columns, member->rank_end - member->rank_start,
                                  (float)member->scaling, 1};
                multiply(&expand, take(&share, segment->end - segment->start, expand.depth, num_columns));
            }
        }
    }
}
