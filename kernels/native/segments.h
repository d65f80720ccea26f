/* Rows of a step by adapter, and what a thread fetches of adapters while it multiplies something else. */
#ifndef LORABATCH_SEGMENTS_H
#define LORABATCH_SEGMENTS_H

#include "vector.h"

#define MAX_MEMBERS 4

/* Panels of a matrix that lie side by side: its columns up to `end` (of A: ranks). A piece begins and ends with a panel, or
 * lies within one and has a panel of its own. */
typedef struct {
    int64_t end;
    const void *numbers; /* the address that the matrix would begin at if all of it were side by side with these */
} Piece;

typedef struct {
    const char *from;
    int64_t num_bytes;
} Run;

/* Written by AdapterSites in segment_lora/types.py, as SITE, PIECE and RUN of segments.py: int64 fields and addresses. */
typedef struct {
    int64_t rank_start, rank_end, column_start, column_end;
    const Piece *b; /* panels of [out_features of the member, rank] */
    double scaling;
} Member;

typedef struct {
    const Piece *a; /* panels of [rank, in_features] */
    const Run *runs; /* memory of A and all B, in the order in which they are read */
    int64_t num_runs, num_bytes; /* num_bytes: of all runs */
    int64_t rank, type, num_members; /* type: of panels */
    Member members[MAX_MEMBERS];
} Site;

typedef struct {
    int64_t start, end;
    const Site *site; /* NULL: the adapter leaves this layer alone */
} Segment;

/* All segments of a step at one packed layer. */
typedef struct {
    const Segment *first;
    int64_t count, largest_rank; /* 0: none has anything to add */
} Segments;

/* The address from which a tile fetches at its first step along the depth, and how many bytes further at each of the others. */
typedef struct {
    const char *from;
    int64_t step;
} Ahead;

/* A thread's share of what segments read, in parts: memory delivers them while products compute. */
typedef struct {
    const Segment *segment;
    const Run *run;   /* of `segment`; NULL before its first */
    int64_t position; /* in what is left of `segment` from the run on */
    int64_t left, of_part;
} Fetch;

INLINE int64_t bytes_of(const Segment *segment) { return segment->site ? segment->site->num_bytes : 0; }

static Fetch fetch_of(const Segment *segments, int64_t num_segments, int64_t thread, int64_t threads, int64_t num_parts)
{
    int64_t total = 0;
    for (int64_t s = 0; s < num_segments; s++)
        total += bytes_of(&segments[s]);
    if (num_parts == 0)
        return (Fetch){0};
    const int64_t first = total * thread / threads, left = total * (thread + 1) / threads - first;
    /* a segment's last part is shorter */
    const int64_t parts = larger(1, num_parts - num_segments);
    return (Fetch){segments, 0, first, left, (left / parts + 64) & -64};
}

/* The next part, for a tile of `steps` steps; `otherwise` where none is left. */
INLINE Ahead next_part(Fetch *fetch, int64_t steps, Ahead otherwise)
{
    if (!fetch || fetch->left <= 0)
        return otherwise;
    if (!fetch->run) {
        for (int64_t size; fetch->position >= (size = bytes_of(fetch->segment)); fetch->segment++)
            fetch->position -= size;
        fetch->run = fetch->segment->site->runs;
    }
    const Site *site = fetch->segment->site;
    for (; fetch->position >= fetch->run->num_bytes; fetch->run++)
        fetch->position -= fetch->run->num_bytes;
    const int64_t size = smaller(fetch->of_part, fetch->run->num_bytes - fetch->position);
    const Ahead ahead = {fetch->run->from + fetch->position, (size + steps - 1) / steps};
    fetch->position += size;
    fetch->left -= size;
    if (fetch->position == fetch->run->num_bytes) {
        fetch->position = 0;
        if (++fetch->run == site->runs + site->num_runs) {
            fetch->run = 0;
            fetch->segment++;
        }
    }
    return ahead;
}

#endif
