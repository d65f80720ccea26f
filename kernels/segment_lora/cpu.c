/* Unmerged LoRA on CPUs: shrink and expand of all segments of a step at one packed layer, in one call.
 *
 * A and B are in panels, see ../native/panels.h: adapters are read once per step, so memory decides, not arithmetic.
 * Pairs in bf16 are multiplied by instructions for them (../native/dots.h) where the processor has those; rows and what
 * they shrink to are rounded to bf16 then.
 */
#include <omp.h>

#include "../native/dots.h"

#define MAX_MEMBERS 4
/* Numbers of B that stay in the second cache. */
#define SMALL_B (128 * 1024)

/* Written by LoraSiteWeights in __init__.py: int64 fields and addresses. */
typedef struct {
    int64_t rank_start, rank_end, column_start, column_end;
    const void *b; /* panels of [out_features of the member, rank] */
    double scaling;
} Member;

typedef struct {
    const void *a; /* panels of [rank, in_features] */
    int64_t rank, type, num_members; /* type: of panels */
    Member members[MAX_MEMBERS];
} Site;

typedef struct {
    int64_t start, end;
    const Site *site; /* NULL: the adapter leaves this layer alone */
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

/* What one call works on. `shrunk`: of each row, in fp32 or in bf16. `codes` [num_tokens, in_features]: rows in bf16. */
typedef struct {
    float *y;
    const float *x;
    float *shrunk;
    uint16_t *codes;
    int64_t y_stride, in_features, shrunk_stride;
} Call;

#if VECTOR_BYTES == 64
/* Some rows and columns, which begin with a panel. */
HAS_DOTS static void multiply_dots(const Dots *p, Part part)
{
    const int64_t num_rows = part.end_row - part.first_row;
    for (int64_t column = part.first_column; column < part.end_column; column += PANEL) {
        /* one vector of sums to a row: fewer rows would wait for their sums */
        const int is_narrow = p->num_columns - column <= WIDTH;
        const int64_t blocks = is_narrow ? (num_rows + MOST_ROWS - 1) / MOST_ROWS : blocks_of(num_rows);
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t row = num_rows * b / blocks, next = num_rows * (b + 1) / blocks;
            const int64_t ahead = blocks == 1 ? STREAM_AHEAD : b == blocks - 1 ? p->groups * PANEL * 4 : 0;
            tiles_of_dots(p, part.first_row + row, next - row, column, ahead, IN_BF16);
        }
    }
}

/* The rows of a segment that are this thread's to encode; threads meet before anyone reads them. */
HAS_DOTS static void encode(const Call *call, const Segment *segment)
{
#pragma omp for schedule(static) nowait
    for (int64_t row = segment->start; row < segment->end; row++)
        encode_pairs(call->codes + row * call->in_features, call->x + row * call->in_features, call->in_features);
}

static void shrink_by_dots(const Call *call, const Segment *segment, Part part)
{
    const Site *site = segment->site;
    const int64_t stride = 2 * call->shrunk_stride, width = call->in_features;
    const Dots dots = {(uint16_t *)call->shrunk + segment->start * stride, stride,
                       (const char *)(call->codes + segment->start * width), width * 2, 0, site->a, 0, 0, width / 2,
                       site->rank, 1, ROUNDED};
    multiply_dots(&dots, part);
}

static void expand_by_dots(const Call *call, const Segment *segment, const Member *member, Part part)
{
    const int64_t stride = 2 * call->shrunk_stride;
    const uint16_t *shrunk = (const uint16_t *)call->shrunk + segment->start * stride + member->rank_start;
    const Dots dots = {call->y + segment->start * call->y_stride + member->column_start, call->y_stride,
                       (const char *)shrunk, stride * 2, 0, member->b, 0, 0, (member->rank_end - member->rank_start) / 2,
                       member->column_end - member->column_start, (float)member->scaling, ADDED};
    multiply_dots(&dots, part);
}
#else
static void encode(const Call *call, const Segment *segment) {}
static void shrink_by_dots(const Call *call, const Segment *segment, Part part) {}
static void expand_by_dots(const Call *call, const Segment *segment, const Member *member, Part part) {}
#endif

static void shrink(const Call *call, const Segment *segment, Part part)
{
    const Site *site = segment->site;
    const Product product = {call->shrunk + segment->start * call->shrunk_stride,
                             call->x + segment->start * call->in_features, site->a, 0, call->shrunk_stride,
                             call->in_features, call->in_features, site->rank, 1, 0, (int)site->type};
    multiply(&product, part);
}

static void expand(const Call *call, const Segment *segment, const Member *member, Part part)
{
    const Product product = {call->y + segment->start * call->y_stride + member->column_start,
                             call->shrunk + segment->start * call->shrunk_stride + member->rank_start, member->b, 0,
                             call->y_stride, call->shrunk_stride, member->rank_end - member->rank_start,
                             member->column_end - member->column_start, (float)member->scaling, 1,
                             (int)segment->site->type};
    multiply(&product, part);
}

/* Block of rows after block, each at all columns, where B stays in the second cache: rows of y are then read and written
 * in order. A panel at all rows takes two lines of each, which no processor fetches ahead. */
static void expand_rows(const Call *call, const Segment *segment, const Member *member, Part part, int64_t by_dots)
{
    const int64_t rank = member->rank_end - member->rank_start, num_rows = part.end_row - part.first_row;
    const int is_small = rank * (part.end_column - part.first_column) <= SMALL_B;
    const int64_t blocks = is_small ? blocks_of(num_rows) : 1;
    for (int64_t b = 0; b < blocks && num_rows; b++)
        (by_dots ? expand_by_dots : expand)(call, segment, member,
                                            (Part){part.first_row + num_rows * b / blocks,
                                                   part.first_row + num_rows * (b + 1) / blocks, part.first_column,
                                                   part.end_column});
}

/* y [num_tokens, y_stride] += LoRA of x [num_tokens, in_features]. `scratch`: of each row up to the last segment's end
 * scratch_stride numbers, the largest rank of a segment's site at least, and in_features / 2 more. */
void lora_add(float *y, int64_t y_stride, const float *x, int64_t in_features, const Segment *segments,
              int64_t num_segments, float *scratch, int64_t scratch_stride)
{
    const int64_t num_rows = segments[num_segments - 1].end, has_dots = dots_of_processor() >> IN_BF16 & 1;
    const Call call = {y, x, scratch, (uint16_t *)(scratch + num_rows * scratch_stride), y_stride, in_features,
                       scratch_stride};
    int64_t shrink_work = 0, expand_work = 0, is_encoded = 0;
    for (int64_t s = 0; s < num_segments; s++) {
        const Site *site = segments[s].site;
        if (!site)
            continue;
        const int64_t rows = segments[s].end - segments[s].start;
        is_encoded |= has_dots && site->type == BF16_PAIRS;
        shrink_work += work_of(rows, in_features, site->rank);
        for (int64_t m = 0; m < site->num_members; m++) {
            const Member *member = &site->members[m];
            expand_work +=
                work_of(rows, member->rank_end - member->rank_start, member->column_end - member->column_start);
        }
    }
#pragma omp parallel
    {
        if (is_encoded) {
            for (int64_t s = 0; s < num_segments; s++)
                if (segments[s].site && segments[s].site->type == BF16_PAIRS)
                    encode(&call, &segments[s]);
#pragma omp barrier
        }
        Share share = share_of(shrink_work);
        for (int64_t s = 0; s < num_segments; s++) {
            const Segment *segment = &segments[s];
            const Site *site = segment->site;
            if (!site)
                continue;
            const Part part = take(&share, segment->end - segment->start, in_features, site->rank);
            (has_dots && site->type == BF16_PAIRS ? shrink_by_dots : shrink)(&call, segment, part);
        }
#pragma omp barrier
        share = share_of(expand_work);
        for (int64_t s = 0; s < num_segments; s++) {
            const Segment *segment = &segments[s];
            const Site *site = segment->site;
            for (int64_t m = 0; site && m < site->num_members; m++) {
                const Member *member = &site->members[m];
                const Part part = take(&share, segment->end - segment->start, member->rank_end - member->rank_start,
                                       member->column_end - member->column_start);
                expand_rows(&call, segment, member, part, has_dots && site->type == BF16_PAIRS);
            }
        }
    }
}
