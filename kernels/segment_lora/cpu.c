/* Unmerged LoRA on CPUs: shrink and expand of all segments of a step at one packed layer, in one call.
 *
 * A and B are in panels, see ../native/panels.h: adapters are read once per step, so memory decides, not arithmetic.
 */
#include <omp.h>

#include "../native/panels.h"

#define MAX_MEMBERS 4

/* Written by LoraSiteWeights in __init__.py: int64 fields and addresses. */
typedef struct {
    int64_t rank_start, rank_end, column_start, column_end;
    const void *b; /* panels of [out_features of the member, rank] */
    double scaling;
} Member;

typedef struct {
    const void *a; /* panels of [rank, in_features] */
    int64_t rank, type, num_members; /* type: of panels, FP32 or BF16 */
    Member members[MAX_MEMBERS];
} Site;

typedef struct {
    int64_t start, end;
    const Site *site;
} Segment;

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
    const int64_t work = work_of(num_rows, depth, num_columns), is_by_rows = num_rows > 2 * BLOCK_ROWS;
    const int64_t size = is_by_rows ? BLOCK_ROWS : PANEL, length = is_by_rows ? num_rows : num_columns;
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
            const Product shrink = {scratch + segment->start * scratch_stride, x + segment->start * in_features,
                                    site->a, 0, scratch_stride, in_features, in_features, site->rank, 1, 0, (int)site->type};
            multiply(&shrink, take(&share, segment->end - segment->start, in_features, site->rank));
        }
#pragma omp barrier
        share = share_of(expand_work);
        for (int64_t s = 0; s < num_segments; s++) {
            const Segment *segment = &segments[s];
            for (int64_t m = 0; m < segment->site->num_members; m++) {
                const Member *member = &segment->site->members[m];
                int64_t num_columns = member->column_end - member->column_start;
                const Product expand = {y + segment->start * y_stride + member->column_start,
                                        scratch + segment->start * scratch_stride + member->rank_start, member->b, 0,
                                        y_stride, scratch_stride, member->rank_end - member->rank_start, num_columns,
                                        (float)member->scaling, 1, (int)segment->site->type};
                multiply(&expand, take(&share, segment->end - segment->start, expand.depth, num_columns));
            }
        }
    }
}
