/* Unmerged LoRA of all segments of a step at one packed layer: passes that all threads of a team make together.
 *
 * A and B are in panels, see panels.h: adapters are read once per step, so memory decides, not arithmetic. Pairs in bf16
 * are multiplied by instructions for them (dots.h) where the processor has those; rows and what they shrink to are
 * rounded to bf16 then.
 */
#ifndef LORABATCH_LORA_H
#define LORABATCH_LORA_H

#include <omp.h>

#include "dots.h"
#include "segments.h"

/* Numbers of B that stay in the second cache: 512 KiB in fp32, 256 in bf16 (ADR 97). Not tuned. */
#define SMALL_B (128 * 1024)

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

/* Operands of one call. `shrunk`: each row times A, in fp32 or in bf16. `codes` [coded_rows, in_features]: rows in bf16,
 * of those rows that are multiplied so. */
typedef struct {
    float *y;
    const float *x;
    const Segment *segments;
    int64_t num_segments, y_stride, in_features, shrunk_stride, coded_rows, shrink_work, expand_work;
    float *shrunk;
    uint16_t *codes;
} Lora;

INLINE int is_by_dots(const Site *site) { return site->type == BF16_PAIRS && dots_of_processor() >> IN_BF16 & 1; }

/* `scratch`: of each row up to the last segment's end as many numbers as the largest rank, and in_features / 2 more. */
static Lora lora_of(float *y, int64_t y_stride, const float *x, int64_t in_features, Segments segments, float *scratch)
{
    const Segment *first = segments.first;
    const int64_t num_rows = segments.count ? first[segments.count - 1].end : 0;
    Lora lora = {y, x, first, segments.count, y_stride, in_features, segments.largest_rank, 0, 0, 0, scratch,
                 (uint16_t *)(scratch + num_rows * segments.largest_rank)};
    for (int64_t s = 0; s < segments.count; s++) {
        const Site *site = first[s].site;
        if (!site)
            continue;
        lora.coded_rows = is_by_dots(site) ? first[s].end : lora.coded_rows;
        const int64_t rows = first[s].end - first[s].start;
        lora.shrink_work += work_of(rows, in_features, site->rank);
        for (int64_t m = 0; m < site->num_members; m++) {
            const Member *member = &site->members[m];
            lora.expand_work +=
                work_of(rows, member->rank_end - member->rank_start, member->column_end - member->column_start);
        }
    }
    return lora;
}

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
            tiles_of_dots(p, part.first_row + row, next - row, column, panel_ahead(p, column, ahead), IN_BF16);
        }
    }
}

/* Threads meet at the end. */
HAS_DOTS static void encode_for_lora(const Lora *lora)
{
#pragma omp for schedule(static)
    for (int64_t row = 0; row < lora->coded_rows; row++)
        encode_pairs(lora->codes + row * lora->in_features, lora->x + row * lora->in_features, lora->in_features);
}

static void shrink_by_dots(const Lora *lora, const Segment *segment, const Piece *piece, Part part)
{
    const int64_t stride = 2 * lora->shrunk_stride, width = lora->in_features;
    const Dots dots = {(uint16_t *)lora->shrunk + segment->start * stride, stride,
                       (const char *)(lora->codes + segment->start * width), width * 2, 0, piece->numbers, 0, 0,
                       width / 2, piece->end, 1, ROUNDED};
    multiply_dots(&dots, part);
}

static void expand_by_dots(const Lora *lora, const Segment *segment, const Member *member, const Piece *piece, Part part)
{
    const int64_t stride = 2 * lora->shrunk_stride;
    const uint16_t *shrunk = (const uint16_t *)lora->shrunk + segment->start * stride + member->rank_start;
    const Dots dots = {lora->y + segment->start * lora->y_stride + member->column_start, lora->y_stride,
                       (const char *)shrunk, stride * 2, 0, piece->numbers, 0, 0,
                       (member->rank_end - member->rank_start) / 2, piece->end, (float)member->scaling, ADDED};
    multiply_dots(&dots, part);
}
#else
static void encode_for_lora(const Lora *lora) {}
static void shrink_by_dots(const Lora *lora, const Segment *segment, const Piece *piece, Part part) {}
static void expand_by_dots(const Lora *lora, const Segment *segment, const Member *member, const Piece *piece, Part part)
{
}
#endif

static void shrink(const Lora *lora, const Segment *segment, const Piece *piece, Part part)
{
    const Product product = {lora->shrunk + segment->start * lora->shrunk_stride,
                             lora->x + segment->start * lora->in_features, piece->numbers, 0, lora->shrunk_stride,
                             lora->in_features, lora->in_features, piece->end, 1, 0, (int)segment->site->type};
    multiply(&product, part);
}

static void expand(const Lora *lora, const Segment *segment, const Member *member, const Piece *piece, Part part)
{
    const Product product = {lora->y + segment->start * lora->y_stride + member->column_start,
                             lora->shrunk + segment->start * lora->shrunk_stride + member->rank_start, piece->numbers,
                             0, lora->y_stride, lora->shrunk_stride, member->rank_end - member->rank_start, piece->end,
                             (float)member->scaling, 1, (int)segment->site->type};
    multiply(&product, part);
}

/* Cuts off the columns of `part` that come before the end of a piece. */
INLINE Part take_piece(const Piece *piece, Part *part)
{
    Part taken = *part;
    taken.end_column = part->first_column = larger(part->first_column, smaller(piece->end, part->end_column));
    return taken;
}

static void shrink_part(const Lora *lora, const Segment *segment, Part part)
{
    const int by_dots = is_by_dots(segment->site);
    for (const Piece *piece = segment->site->a; part.first_column < part.end_column; piece++)
        (by_dots ? shrink_by_dots : shrink)(lora, segment, piece, take_piece(piece, &part));
}

static void expand_part(const Lora *lora, const Segment *segment, const Member *member, Part part, int by_dots)
{
    for (const Piece *piece = member->b; part.first_column < part.end_column; piece++)
        (by_dots ? expand_by_dots : expand)(lora, segment, member, piece, take_piece(piece, &part));
}

/* Block of rows after block, each at all columns, where B stays in the second cache: rows of y are then read and written
 * in order. A panel at all rows takes two lines of each, which no processor fetches ahead. */
static void expand_rows(const Lora *lora, const Segment *segment, const Member *member, Part part)
{
    const int by_dots = is_by_dots(segment->site);
    const int64_t rank = member->rank_end - member->rank_start, num_rows = part.end_row - part.first_row;
    const int is_small = rank * (part.end_column - part.first_column) <= SMALL_B;
    const int64_t blocks = is_small ? blocks_of(num_rows) : 1;
    for (int64_t b = 0; b < blocks && num_rows; b++)
        expand_part(lora, segment, member,
                    (Part){part.first_row + num_rows * b / blocks, part.first_row + num_rows * (b + 1) / blocks,
                           part.first_column, part.end_column},
                    by_dots);
}

/* Multiplies rows by A. Rows are encoded before; threads meet before anyone reads what they shrink to. */
static void shrink_all(const Lora *lora)
{
    Share share = share_of(lora->shrink_work);
    for (int64_t s = 0; s < lora->num_segments; s++) {
        const Segment *segment = &lora->segments[s];
        const Site *site = segment->site;
        if (!site)
            continue;
        shrink_part(lora, segment, take(&share, segment->end - segment->start, lora->in_features, site->rank));
    }
}

static void expand_all(const Lora *lora)
{
    Share share = share_of(lora->expand_work);
    for (int64_t s = 0; s < lora->num_segments; s++) {
        const Segment *segment = &lora->segments[s];
        const Site *site = segment->site;
        for (int64_t m = 0; site && m < site->num_members; m++) {
            const Member *member = &site->members[m];
            const Part part = take(&share, segment->end - segment->start, member->rank_end - member->rank_start,
                                   member->column_end - member->column_start);
            expand_rows(lora, segment, member, part);
        }
    }
}

/* All passes. Threads meet before they add to y. */
static void add_all(const Lora *lora)
{
    if (lora->coded_rows)
        encode_for_lora(lora);
    shrink_all(lora);
#pragma omp barrier
    expand_all(lora);
}

#endif
