/* Chooses a token of each row, or of those that its mask allows: the largest logit, or a draw after temperature, top-k
 * and top-p, in that order. */
#include <math.h>
#include <stdlib.h>

#include "../native/vector.h"

/* Weights are summed in parts of a vocabulary, so that a draw walks through one part alone. */
#define PARTS 1024
#define LEAST_PART 256
/* Top-p counts weights by their exponent, from 0 to -FAR; what is smaller is one class. */
#define CLASSES 512
#define FAR 40.0
/* The k largest are looked for within this distance of the largest, then twice as far and so on. */
#define NEAR 4.0f
#define NOT_NEAR 256.0f
#define NO_TOKEN (-1)
/* Of all weights: where less is left, sums of what is left are not exact enough. */
#define LEAST_LEFT 1e-6

/* Eight lanes in every build: sums have the same bits in all. No function with them is called but inlined. */
#define LANES 8
#pragma GCC diagnostic ignored "-Wpsabi"
typedef double lanes __attribute__((vector_size(LANES * sizeof(double))));
typedef int64_t lanes_of_int __attribute__((vector_size(LANES * sizeof(int64_t))));
typedef float floats __attribute__((vector_size(LANES * sizeof(float))));

/* A row of logits; `largest` of them; `slope`: 1 / temperature. */
struct row {
    const float *logits;
    int64_t vocab_size;
    double largest, slope;
};

/* Logits from `first` on, minus infinity behind the vocabulary, as exponents of weights: none above 0. */
INLINE lanes exponents(const struct row *row, int64_t first)
{
    floats found;
    if (first + LANES <= row->vocab_size) {
        memcpy(&found, row->logits + first, sizeof found);
    } else {
        found = (floats){0} - INFINITY;
        memcpy(&found, row->logits + first, (row->vocab_size - first) * sizeof(float));
    }
    return (__builtin_convertvector(found, lanes) - row->largest) * row->slope;
}

/* e^x for x <= 0, to some 1e-14 of it; 0 below -708. 2^n times the series of e^f, |f| <= ln(2) / 2. */
INLINE lanes powers(lanes x)
{
    const lanes shift = (lanes){0} + 6755399441055744.0; /* 1.5 * 2^52 rounds to whole numbers */
    const lanes_of_int is_seen = x >= -708.0;
    x = (lanes)((lanes_of_int)x & is_seen);
    const lanes shifted = x * 1.4426950408889634 + shift, n = shifted - shift;
    const lanes f = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10;
    lanes series = f * (1.0 / 39916800) + 1.0 / 3628800;
    series = series * f + 1.0 / 362880;
    series = series * f + 1.0 / 40320;
    series = series * f + 1.0 / 5040;
    series = series * f + 1.0 / 720;
    series = series * f + 1.0 / 120;
    series = series * f + 1.0 / 24;
    series = series * f + 1.0 / 6;
    series = series * f + 0.5;
    series = series * f + 1.0;
    series = series * f + 1.0;
    const lanes_of_int scale = ((lanes_of_int)shifted + 1023) << 52;
    return (lanes)((lanes_of_int)(series * (lanes)scale) & is_seen);
}

INLINE double sum_of(lanes v)
{
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

/* The first of the largest logits; NO_TOKEN where they have NaN or the largest is infinite. */
static int64_t first_largest(const float *logits, int64_t vocab_size)
{
    float largest = -INFINITY;
    int64_t best = 0;
    vec_of_int is_bad = {0};
    for (int64_t first = 0; first < vocab_size; first += LEAST_PART) {
        const int64_t end = smaller(first + LEAST_PART, vocab_size);
        vec most = all_lanes(-INFINITY);
        int64_t i = first;
        for (; i + WIDTH <= end; i += WIDTH) {
            const vec v = load(logits + i);
            is_bad |= v != v;
            most = larger_lanes(v, most);
        }
        float of_lanes[WIDTH], of_part = -INFINITY;
        store(of_lanes, most);
        for (int lane = 0; lane < WIDTH; lane++)
            of_part = of_lanes[lane] > of_part ? of_lanes[lane] : of_part;
        for (; i < end; i++) {
            if (logits[i] != logits[i])
                return NO_TOKEN;
            of_part = logits[i] > of_part ? logits[i] : of_part;
        }
        if (of_part > largest) {
            largest = of_part;
            best = first;
        }
    }
    for (int lane = 0; lane < WIDTH; lane++)
        if (is_bad[lane])
            return NO_TOKEN;
    if (!isfinite(largest))
        return NO_TOKEN;
    while (logits[best] != largest)
        best++;
    return best;
}

/* Tokens of each of at most PARTS parts of a vocabulary. */
INLINE int64_t part_size(int64_t vocab_size)
{
    const int64_t size = (vocab_size + PARTS - 1) / PARTS;
    return size < LEAST_PART ? LEAST_PART : (size + LANES - 1) / LANES * LANES;
}

/* Sums of the weights of each part; returns the total. */
static double part_sums(const struct row *row, double *sums)
{
    const int64_t size = part_size(row->vocab_size);
    double total = 0;
    for (int64_t first = 0, part = 0; first < row->vocab_size; first += size, part++) {
        const int64_t end = smaller(first + size, row->vocab_size);
        lanes sum = {0};
        for (int64_t i = first; i < end; i += LANES)
            sum += powers(exponents(row, i));
        sums[part] = sum_of(sum);
        total += sums[part];
    }
    return total;
}

/* In order of ids, the first token whose running sum exceeds `u` times the total. */
static int64_t drawn_by_id(const struct row *row, double u)
{
    double sums[PARTS + 1];
    const double target = u * part_sums(row, sums);
    const int64_t size = part_size(row->vocab_size);
    double reached = 0;
    int64_t first = 0, last = 0;
    for (int part = 0; first + size < row->vocab_size && reached + sums[part] <= target; part++, first += size)
        reached += sums[part];
    for (; first < row->vocab_size; first += LANES) {
        const lanes weights = powers(exponents(row, first));
        for (int lane = 0; lane < LANES; lane++) {
            reached += weights[lane];
            if (reached > target)
                return first + lane;
            last = weights[lane] > 0 ? first + lane : last;
        }
    }
    return last; /* for rounding */
}

/* Rises as the logit falls, then with the id. */
INLINE uint64_t key_of(float logit, int64_t token)
{
    uint32_t bits;
    logit += 0.0f; /* -0 is 0 */
    memcpy(&bits, &logit, sizeof bits);
    bits = bits >> 31 ? bits : ~bits & 0x7fffffff;
    return (uint64_t)bits << 32 | (uint64_t)token;
}

INLINE int64_t token_of(uint64_t key)
{
    return (int64_t)(key & UINT32_MAX);
}

static int in_order(const void *a, const void *b)
{
    const uint64_t first = *(const uint64_t *)a, second = *(const uint64_t *)b;
    return (first > second) - (first < second);
}

/* The `count` smallest of `keys` [num_keys] come first, in any order. */
static void select_first(uint64_t *keys, int64_t num_keys, int64_t count)
{
    int64_t low = 0, high = num_keys - 1;
    while (low < high) {
        const uint64_t pivot = keys[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (keys[i] < pivot)
                i++;
            while (keys[j] > pivot)
                j--;
            if (i <= j) {
                const uint64_t other = keys[i];
                keys[i++] = keys[j];
                keys[j--] = other;
            }
        }
        if (count <= j)
            high = j;
        else if (count >= i)
            low = i;
        else
            return;
    }
}

static uint64_t *memory_for(int64_t count)
{
    uint64_t *memory = malloc((count + 1) * sizeof *memory);
    if (memory == NULL)
        abort(); /* a wrong token would be worse */
    return memory;
}

/* The `count` largest logits, in order; the caller frees them. */
static uint64_t *largest_keys(const struct row *row, int64_t count)
{
    uint64_t *keys = memory_for(row->vocab_size);
    for (float distance = NEAR;; distance *= 2) {
        const float least = distance < NOT_NEAR ? (float)row->largest - distance : -INFINITY;
        int64_t num_keys = 0;
        for (int64_t token = 0; token < row->vocab_size; token++) {
            keys[num_keys] = key_of(row->logits[token], token);
            num_keys += row->logits[token] >= least;
        }
        if (num_keys >= count) {
            select_first(keys, num_keys, count);
            qsort(keys, count, sizeof *keys, in_order);
            return keys;
        }
    }
}

/* The first token in order whose running sum, from `reached` on, exceeds the target. */
static int64_t walked(const uint64_t *keys, const double *weights, int64_t count, double reached, double target)
{
    int64_t last = 0; /* for rounding */
    for (int64_t i = 0; i < count && reached <= target; i++) {
        reached += weights[i];
        last = weights[i] > 0 ? i : last;
    }
    return token_of(keys[last]);
}

/* Weights of the tokens at these keys; one spare vector is allotted. The caller frees them. */
static double *weights_of(const struct row *row, const uint64_t *keys, int64_t count)
{
    double *weights = (double *)memory_for(count + LANES);
    for (int64_t i = 0; i < count; i += LANES) {
        lanes x = {0};
        for (int lane = 0; lane < LANES && i + lane < count; lane++)
            x[lane] = ((double)row->logits[token_of(keys[i + lane])] - row->largest) * row->slope;
        x = powers(x);
        memcpy(weights + i, &x, sizeof x);
    }
    return weights;
}

/* How many of the first weights are kept: those behind which the sum, from `reached` on, has not come to `goal`, and
 * one at least. `reached` becomes what they add up to. */
static int64_t num_kept(const double *weights, int64_t count, double goal, double *reached)
{
    int64_t kept = 0;
    while (kept < count && (kept == 0 || *reached < goal))
        *reached += weights[kept++];
    return kept;
}

static int64_t drawn_of_largest(const struct row *row, int64_t top_k, double top_p, double u)
{
    int64_t count = smaller(top_k, row->vocab_size);
    uint64_t *keys = largest_keys(row, count);
    double *weights = weights_of(row, keys, count), total = 0, reached = 0;
    for (int64_t i = 0; i < count; i++)
        total += weights[i];
    if (top_p < 1)
        count = num_kept(weights, count, top_p * total, &reached);
    else
        reached = total;
    const int64_t token = walked(keys, weights, count, 0, u * reached);
    free(keys);
    free(weights);
    return token;
}

INLINE int class_of(double exponent)
{
    return exponent > -FAR ? (int)(exponent * (-(CLASSES - 1) / FAR)) : CLASSES - 1;
}

/* The tokens of one class, in order; the caller frees them. */
static uint64_t *keys_of_class(const struct row *row, int wanted, int64_t count)
{
    uint64_t *keys = memory_for(count);
    int64_t found = 0;
    for (int64_t first = 0; first < row->vocab_size; first += LANES) {
        const lanes x = exponents(row, first);
        const int64_t end = smaller(LANES, row->vocab_size - first);
        for (int lane = 0; lane < end; lane++)
            if (class_of(x[lane]) == wanted)
                keys[found++] = key_of(row->logits[first + lane], first + lane);
    }
    qsort(keys, count, sizeof *keys, in_order);
    return keys;
}

/* Classes hold falling weights, so that two of them need be sorted: where the kept ones end, and the drawn one's. */
static int64_t drawn_of_top_p(const struct row *row, double top_p, double u)
{
    double sums[CLASSES] = {0}, total = 0;
    int64_t counts[CLASSES] = {0};
    for (int64_t first = 0; first < row->vocab_size; first += LANES) {
        const lanes x = exponents(row, first), weights = powers(x);
        const int64_t end = smaller(LANES, row->vocab_size - first);
        for (int lane = 0; lane < end; lane++) {
            const int class = class_of(x[lane]);
            sums[class] += weights[lane];
            counts[class]++;
        }
    }
    int last = 0;
    for (int class = 0; class < CLASSES; class++) {
        total += sums[class];
        last = counts[class] ? class : last;
    }
    int ending = 0;
    double before = 0;
    while (ending < last && (counts[ending] == 0 || before + sums[ending] < top_p * total))
        before += sums[ending++];
    uint64_t *keys = keys_of_class(row, ending, counts[ending]);
    double *weights = weights_of(row, keys, counts[ending]), kept = before;
    int64_t count = num_kept(weights, counts[ending], top_p * total, &kept);
    const double target = u * kept;
    if (target < before) {
        free(keys);
        free(weights);
        before = 0;
        for (ending = 0; counts[ending] == 0 || before + sums[ending] <= target; ending++)
            before += sums[ending];
        count = counts[ending];
        keys = keys_of_class(row, ending, count);
        weights = weights_of(row, keys, count);
    }
    const int64_t token = walked(keys, weights, count, before, target);
    free(keys);
    free(weights);
    return token;
}

/* In order of ids, the first token of those not taken whose running sum, from `reached` on, exceeds the target. */
static int64_t walked_by_id(const struct row *row, int64_t first, double reached, double target, const int64_t *taken,
                            int64_t num_taken)
{
    int64_t last = NO_TOKEN; /* for rounding */
    for (; first < row->vocab_size; first += LANES) {
        const lanes weights = powers(exponents(row, first));
        for (int lane = 0; lane < LANES; lane++) {
            int is_taken = !(weights[lane] > 0);
            for (int64_t i = 0; i < num_taken; i++)
                is_taken |= taken[i] == first + lane;
            if (is_taken)
                continue;
            reached += weights[lane];
            last = first + lane;
            if (reached > target)
                return last;
        }
    }
    return last;
}

/* Draws without replacement. tokens [1 + count]: the first is given; NO_TOKEN where too little is left. */
static void draw_more(int64_t *tokens, int64_t count, const struct row *row, const double *uniforms)
{
    double sums[PARTS + 1], left = part_sums(row, sums);
    const double least = left * LEAST_LEFT;
    const int64_t size = part_size(row->vocab_size);
    for (int64_t i = 0; i < count; i++) {
        const int64_t drawn = tokens[i];
        const double weight = powers((lanes){0} + ((double)row->logits[drawn] - row->largest) * row->slope)[0];
        sums[drawn / size] -= weight;
        left -= weight;
        int64_t next = NO_TOKEN, first = 0;
        if (left > least) {
            double reached = 0;
            for (; first + size < row->vocab_size && reached + sums[first / size] <= uniforms[i] * left; first += size)
                reached += sums[first / size];
            next = walked_by_id(row, first, reached, uniforms[i] * left, tokens, i + 1);
        }
        tokens[i + 1] = next;
        if (next == NO_TOKEN) {
            for (int64_t rest = i + 1; rest < count; rest++)
                tokens[rest + 1] = NO_TOKEN;
            return;
        }
    }
}

/* The largest logits. tokens [1 + count]: the first is given; NO_TOKEN where nothing is left. */
static void list_largest(int64_t *tokens, int64_t count, const struct row *row)
{
    const int64_t found = smaller(count + 1, row->vocab_size);
    uint64_t *keys = largest_keys(row, found);
    for (int64_t i = 1; i <= count; i++) {
        const int64_t token = i < found ? token_of(keys[i]) : NO_TOKEN;
        tokens[i] = token != NO_TOKEN && row->logits[token] > -INFINITY ? token : NO_TOKEN;
    }
    free(keys);
}

static int64_t chosen(const float *logits, int64_t vocab_size, double temperature, int64_t top_k, double top_p, double u)
{
    const int64_t largest = first_largest(logits, vocab_size);
    if (temperature == 0 || largest == NO_TOKEN)
        return largest;
    /* Below 1e-300 only the largest are left, as at it. */
    const struct row row = {logits, vocab_size, logits[largest], 1 / (temperature < 1e-300 ? 1e-300 : temperature)};
    if (top_k > 0)
        return drawn_of_largest(&row, top_k, top_p, u);
    return top_p < 1 ? drawn_of_top_p(&row, top_p, u) : drawn_by_id(&row, u);
}

/* Logits of allowed tokens, side by side in `to`; how many there are. */
static int64_t gathered(float *to, const float *logits, int64_t vocab_size, const uint32_t *allowed, int64_t num_words)
{
    int64_t count = 0;
    for (int64_t word = 0; word < num_words && word * 32 < vocab_size; word++) {
        const float *from = logits + word * 32;
        const int64_t left = vocab_size - word * 32;
        uint32_t bits = left < 32 ? allowed[word] & ((1u << left) - 1) : allowed[word];
        if (bits == UINT32_MAX) {
            memcpy(to + count, from, 32 * sizeof *from);
            count += 32;
            continue;
        }
        for (; bits; bits &= bits - 1)
            to[count++] = from[__builtin_ctz(bits)];
    }
    return count;
}

/* The allowed token with so many allowed ones before it. */
static int64_t token_at(int64_t place, const uint32_t *allowed)
{
    int64_t word = 0;
    for (int count; place >= (count = __builtin_popcount(allowed[word])); word++)
        place -= count;
    uint32_t bits = allowed[word];
    for (; place > 0; place--)
        bits &= bits - 1;
    return word * 32 + __builtin_ctz(bits);
}

static int64_t chosen_of_allowed(const float *logits, int64_t vocab_size, const uint32_t *allowed, int64_t num_words,
                                 double temperature, int64_t top_k, double top_p, double u)
{
    float *left = (float *)memory_for(vocab_size / 2 + 1);
    const int64_t count = gathered(left, logits, vocab_size, allowed, num_words);
    const int64_t place = count ? chosen(left, count, temperature, top_k, top_p, u) : NO_TOKEN;
    free(left);
    return place == NO_TOKEN ? NO_TOKEN : token_at(place, allowed);
}

/* tokens [num_rows]. logits […, vocab_size], rows `stride` apart, of which row i is number places[i]; the others
 * [num_rows]. allowed [num_rows, num_words], a bit for each token, or NULL: all tokens of all rows are. */
void choose_tokens(int64_t *tokens, const float *logits, int64_t stride, int64_t vocab_size, const int64_t *places,
                   const double *temperatures, const int64_t *top_k, const double *top_p, const double *uniforms,
                   int64_t num_rows, const uint32_t *allowed, int64_t num_words)
{
#pragma omp parallel for schedule(dynamic) if (num_rows > 1)
    for (int64_t i = 0; i < num_rows; i++) {
        const float *row = logits + places[i] * stride;
        tokens[i] = allowed ? chosen_of_allowed(row, vocab_size, allowed + i * num_words, num_words, temperatures[i],
                                                top_k[i], top_p[i], uniforms[i])
                            : chosen(row, vocab_size, temperatures[i], top_k[i], top_p[i], uniforms[i]);
    }
}

/* tokens [num_rows, 1 + count]: the first of each row is what `choose_tokens` chose, the others what it would have chosen
 * without those before. uniforms [num_rows, count]; the rest as there, without cuts. */
void choose_further_tokens(int64_t *tokens, int64_t count, const float *logits, int64_t stride, int64_t vocab_size,
                           const int64_t *places, const double *temperatures, const double *uniforms, int64_t num_rows)
{
#pragma omp parallel for schedule(dynamic) if (num_rows > 1)
    for (int64_t i = 0; i < num_rows; i++) {
        int64_t *found = tokens + i * (count + 1);
        const double temperature = temperatures[i];
        const float *of_row = logits + places[i] * stride;
        const int64_t largest = temperature > 0 ? first_largest(of_row, vocab_size) : found[0];
        const struct row row = {of_row, vocab_size, of_row[largest], 1 / (temperature < 1e-300 ? 1e-300 : temperature)};
        if (temperature > 0)
            draw_more(found, count, &row, uniforms + i * count);
        else
            list_largest(found, count, &row);
    }
}
