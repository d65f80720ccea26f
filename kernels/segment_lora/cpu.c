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

/* ROWS x VECTORS accumulators in registers; of the last vector only `lanes` columns exist. While this panel is
 * computed the next one is fetched. */
INLINE void tile(const Product *p, int64_t row, int64_t column, const int ROWS, const int VECTORS, int lanes)
{
    const float *x = p->x + row * p->x_stride, *w = p->w + column;
    const int FULL = lanes == WIDTH ? VECTORS : VECTORS - 1;
    vec sums[8][PANEL_VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = (vec){0};
    for (int64_t k = 0; k < p->depth; k++, w += p->w_stride) {
        vec values[PANEL_VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            values[v] = v < FULL ? load(w + v * WIDTH) : load_first(w + v * WIDTH, lanes);
            __builtin_prefetch(w + PANEL + v * WIDTH, 0, 2);
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] += x[r * p->x_stride + k] * values[v];
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) {
            float *out = p->out + (row + r) * p->out_stride + column + v * WIDTH;
            if (v < FULL)
                store(out, p->adds ? load(out) + p->scaling * sums[r][v] : sums[r][v]);
            else
                store_first(out, p->adds ? load_first(out, lanes) + p->scaling * sums[r][v] : sums[r][v], lanes);
        }
}

INLINE void rows_of(const Product *p, int64_t num_rows, int64_t column, const int VECTORS, int lanes)
{
    int64_t row = 0;
    for (; row + 8 <= num_rows; row += 8)
        tile(p, row, column, 8, VECTORS, lanes);
    if (num_rows - row >= 4) {
        tile(p, row, column, 4, VECTORS, lanes);
        row += 4;
    }
    if (num_rows - row >= 2) {
        tile(p, row, column, 2, VECTORS, lanes);
        row += 2;
    }
    if (num_rows - row)
        tile(p, row, column, 1, VECTORS, lanes);
}

/* Columns `column` to `end`, at most a panel. */
static void panel(const Product *p, int64_t num_rows, int64_t column, int64_t end)
{
    for (; end - column >= PANEL; column += PANEL)
        rows_of(p, num_rows, column, PANEL_VECTORS, WIDTH);
    for (; end - column >= WIDTH; column += WIDTH)
        rows_of(p, num_rows, column, 1, WIDTH);
    if (column < end)
        rows_of(p, num_rows, column, 1, (int)(end - column));
}

/* A thread's share of a pass: panels whose work lies in `first` .. `last`, counted over all segments. */
typedef struct {
    int64_t first, last, position;
} Share;

static void multiply(const Product *p, int64_t num_rows, int64_t num_columns, Share *share)
{
    for (int64_t column = 0; column < num_columns; column += PANEL) {
        int64_t end = column + PANEL < num_columns ? column + PANEL : num_columns;
        if (share->position >= share->first && share->position < share->last)
            panel(p, num_rows, column, end);
        share->position += num_rows * p->depth * (end - column);
    }
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
        shrink_work += num_rows * site->rank * in_features;
        for (int64_t m = 0; m < site->num_members; m++) {
            const Member *member = &site->members[m];
            expand_work += num_rows * (member->rank_end - member->rank_start) *
                           (member->column_end - member->column_start);
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
            multiply(&shrink, segment->end - segment->start, site->rank, &share);
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
                multiply(&expand, segment->end - segment->start, num_columns, &share);
            }
        }
    }
}
