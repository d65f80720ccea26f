/* Chooses a token of each row, or of those that its mask allows: the largest logit, or a draw after temperature, top-k
 * and top-p, in that order. */
#include <math.h>
#include <stdlib.h>

#include "../native/vector.h"

/* Weights are summed in parts of a vocabulary, so that a draw walks through one part alone: at most PARTS, whose sums are 8 KiB,
 * of LEAST_PART tokens or more. Not tuned. */
#define PARTS 1024
#define LEAST_PART 256
/* Top-p adds up weights by their exponent, from 0 to FAR, in CLASSES whose sums and counts are 8 KiB; what is smaller has no
 * weight. Not tuned. */
#define CLASSES 512
#define FAR (-48.0f)
/* The k largest are looked for within this distance of the largest, then twice as far and so on. Not tuned. */
#define NEAR 4.0f
#define NOT_NEAR 256.0f
#define NO_TOKEN (-1)
/* When less than 2^-LEAST_LEFT of all weights is left, too few bits of what is left are in them. */
#define LEAST_LEFT 20

/* Numbers of a vector of the build. No function with them is called but inlined. */
#define LANES WIDTH
#pragma GCC diagnostic ignored "-Wpsabi"
typedef float floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t ints __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint64_t lanes __attribute__((vector_size(LANES * sizeof(uint64_t))));

/* A row of logits; `largest` of them; `slope`: log2(e) / temperature. Kept are those above `cut`, and those at it up to
 * token `last`. */
struct row {
    const float *logits;
    int64_t vocab_size;
    float largest, slope, cut;
    int32_t last;
};

static struct row row_of(const float *logits, int64_t vocab_size, float largest, double temperature)
{
    const double least = 1e-30, most = 1e30; /* as on a GPU: beyond them draws are the same */
    temperature = temperature < least ? least : temperature > most ? most : temperature;
    return (struct row){logits, vocab_size, largest, 1.4426950408889634f / (float)temperature, -INFINITY, INT32_MAX};
}

/* Logits from `first` on, minus infinity behind the vocabulary. */
INLINE floats logits_at(const struct row *row, int64_t first)
{
    floats found;
    if (first + LANES <= row->vocab_size) {
        memcpy(&found, row->logits + first, sizeof found);
    } else {
        found = (floats){0} - INFINITY;
        memcpy(&found, row->logits + first, (row->vocab_size - first) * sizeof(float));
    }
    return found;
}

/* a * b, rounded before anything is added. */
INLINE floats product(floats a, floats b)
{
    a *= b;
    __asm__("" : "+v"(a));
    return a;
}

/* Takes a where the mask has ones, else b. */
INLINE floats either(ints mask, floats a, floats b)
{
    return (floats)(((ints)a & mask) | ((ints)b & ~mask));
}

/* Logarithms of weights, from 0 to FAR. */
INLINE floats exponents(const struct row *row, floats logits)
{
    const floats x = product(logits - row->largest, (floats){0} + row->slope);
    return either(x > FAR, x, (floats){0} + FAR);
}

/* 2^(44 + x), whole numbers. See `weights_of` in types.py, which has the same bits. */
INLINE lanes powers(floats x)
{
    const floats shifted = (x - 0.5f) + 12582912.0f, f = x - (shifted - 12582912.0f);
    floats series = product(f, (floats){0} + 0.0018671301659196615f) + 0.009017029777169228f;
    series = product(series, f) + 0.05579991266131401f;
    series = product(series, f) + 0.24016444385051727f;
    series = product(series, f) + 0.6931512951850891f;
    series = product(series, f) + 1.0f;
    const ints mantissa = (ints)series - 0x3F000000, shift = 0x4B400000 - (ints)shifted;
    return (__builtin_convertvector(mantissa, lanes) << 21) >> __builtin_convertvector(shift, lanes);
}

INLINE lanes weights_at(const struct row *row, int64_t first)
{
    return powers(exponents(row, logits_at(row, first)));
}

/* Weights of kept tokens, and 0 for the others. */
INLINE lanes kept_weights(const struct row *row, int64_t first)
{
    ints places;
    for (int lane = 0; lane < LANES; lane++)
        places[lane] = lane;
    const floats logits = logits_at(row, first);
    const ints is_kept = (logits > row->cut) | ((logits == row->cut) & (places + (int32_t)first <= row->last));
    return powers(exponents(row, logits)) & (lanes)__builtin_convertvector(is_kept, lanes);
}

INLINE int64_t sum_of(lanes v)
{
    uint64_t sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += v[lane];
    return (int64_t)sum;
}

/* `share` times the total. */
INLINE int64_t portion(int64_t total, double share)
{
    return smaller((int64_t)((double)total * share), total);
}

/* The number that a running sum must exceed; it does, in the end. */
INLINE int64_t target_of(int64_t total, double u)
{
    return smaller(portion(total, u), total - 1);
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

/* Sums of the weights of each part that are kept; returns the total. */
static int64_t part_sums(const struct row *row, int64_t *sums)
{
    const int64_t size = part_size(row->vocab_size);
    int64_t total = 0;
    for (int64_t first = 0, part = 0; first < row->vocab_size; first += size, part++) {
        const int64_t end = smaller(first + size, row->vocab_size);
        lanes sum = {0};
        for (int64_t i = first; i < end; i += LANES)
            sum += kept_weights(row, i);
        sums[part] = sum_of(sum);
        total += sums[part];
    }
    return total;
}

/* In order of ids, the first kept token whose running sum exceeds `u` times the total. */
static int64_t drawn_by_id(const struct row *row, double u)
{
    int64_t sums[PARTS + 1];
    const int64_t target = target_of(part_sums(row, sums), u), size = part_size(row->vocab_size);
    int64_t reached = 0, first = 0;
    for (int part = 0; reached + sums[part] <= target; part++, first += size)
        reached += sums[part];
    for (;; first += LANES) {
        const lanes weights = kept_weights(row, first);
        for (int lane = 0; lane < LANES; lane++) {
            reached += (int64_t)weights[lane];
            if (reached > target)
                return first + lane;
        }
    }
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

/* The `count` largest logits, in any order; the caller frees them. */
static uint64_t *largest_keys(const struct row *row, int64_t count)
{
    uint64_t *keys = memory_for(row->vocab_size);
    for (float distance = NEAR;; distance *= 2) {
        const float least = distance < NOT_NEAR ? row->largest - distance : -INFINITY;
        int64_t num_keys = 0;
        for (int64_t token = 0; token < row->vocab_size; token++) {
            keys[num_keys] = key_of(row->logits[token], token);
            num_keys += row->logits[token] >= least;
        }
        if (num_keys >= count) {
            select_first(keys, num_keys, count);
            return keys;
        }
    }
}

/* Weights of the tokens at these keys; one spare vector is allotted. The caller frees them. */
static int64_t *weights_of(const struct row *row, const uint64_t *keys, int64_t count)
{
    int64_t *weights = (int64_t *)memory_for(count + LANES);
    for (int64_t i = 0; i < count; i += LANES) {
        floats logits = (floats){0} - INFINITY;
        for (int lane = 0; lane < LANES && i + lane < count; lane++)
            logits[lane] = row->logits[token_of(keys[i + lane])];
        const lanes found = powers(exponents(row, logits));
        memcpy(weights + i, &found, sizeof found);
    }
    return weights;
}

/* How many of the first weights are kept: those before which the sum, from `reached` on, has not come to `goal`, and
 * one at least. */
static int64_t num_kept(const int64_t *weights, int64_t count, int64_t goal, int64_t reached)
{
    int64_t kept = 0;
    while (kept < count && (kept == 0 || reached < goal))
        reached += weights[kept++];
    return kept;
}

/* Put tokens in the place of keys, in order: by a bit for each of the vocabulary. */
static void sort_by_id(uint64_t *keys, int64_t count, int64_t vocab_size)
{
    const int64_t num_words = vocab_size / 64 + 1;
    uint64_t *bits = memory_for(num_words);
    memset(bits, 0, num_words * sizeof *bits);
    for (int64_t i = 0; i < count; i++)
        bits[token_of(keys[i]) / 64] |= (uint64_t)1 << token_of(keys[i]) % 64;
    for (int64_t word = 0; word < num_words; word++)
        for (uint64_t left = bits[word]; left; left &= left - 1)
            *keys++ = (uint64_t)(word * 64 + __builtin_ctzll(left));
    free(bits);
}

/* The first of some tokens, in order of ids, whose running sum exceeds `u` times their total. */
static int64_t drawn_of_keys(const struct row *row, uint64_t *keys, int64_t count, double u)
{
    sort_by_id(keys, count, row->vocab_size);
    int64_t *weights = weights_of(row, keys, count), total = 0, reached = 0, place = 0;
    for (int64_t i = 0; i < count; i++)
        total += weights[i];
    const int64_t target = target_of(total, u);
    while ((reached += weights[place]) <= target)
        place++;
    free(weights);
    return token_of(keys[place]);
}

static int64_t drawn_of_largest(const struct row *row, int64_t top_k, double top_p, double u)
{
    uint64_t *keys = largest_keys(row, top_k);
    if (top_p < 1) {
        qsort(keys, top_k, sizeof *keys, in_order);
        int64_t *weights = weights_of(row, keys, top_k), total = 0;
        for (int64_t i = 0; i < top_k; i++)
            total += weights[i];
        top_k = num_kept(weights, top_k, portion(total, top_p), 0);
        free(weights);
    }
    const int64_t token = drawn_of_keys(row, keys, top_k, u);
    free(keys);
    return token;
}

INLINE ints classes_of(floats exponents)
{
    return __builtin_convertvector(exponents * ((CLASSES - 1) / FAR), ints);
}

/* The tokens of one class, in order; the caller frees them. */
static uint64_t *keys_of_class(const struct row *row, int wanted, int64_t count)
{
    uint64_t *keys = memory_for(count + LANES);
    int64_t found = 0;
    for (int64_t first = 0; first < row->vocab_size; first += LANES) {
        const ints classes = classes_of(exponents(row, logits_at(row, first)));
        const int64_t end = smaller(LANES, row->vocab_size - first);
        for (int lane = 0; lane < end; lane++) {
            keys[found] = key_of(row->logits[first + lane], first + lane);
            found += classes[lane] == wanted;
        }
    }
    qsort(keys, count, sizeof *keys, in_order);
    return keys;
}

/* Classes hold falling weights, so that one need be sorted: where the kept ones end. */
static int64_t drawn_of_top_p(struct row *row, double top_p, double u)
{
    int64_t sums[CLASSES] = {0}, counts[CLASSES] = {0}, total = 0;
    for (int64_t first = 0; first < row->vocab_size; first += LANES) {
        const floats x = exponents(row, logits_at(row, first));
        const lanes weights = powers(x);
        const ints classes = classes_of(x);
        const int64_t end = smaller(LANES, row->vocab_size - first);
        for (int lane = 0; lane < end; lane++) {
            sums[classes[lane]] += (int64_t)weights[lane];
            counts[classes[lane]]++;
        }
    }
    for (int class = 0; class < CLASSES; class++)
        total += sums[class];
    const int64_t goal = larger(portion(total, top_p), 1);
    int64_t before = 0;
    int ending = 0;
    while (before + sums[ending] < goal)
        before += sums[ending++];
    uint64_t *keys = keys_of_class(row, ending, counts[ending]);
    int64_t *weights = weights_of(row, keys, counts[ending]);
    const int64_t last = token_of(keys[num_kept(weights, counts[ending], goal, before) - 1]);
    free(keys);
    free(weights);
    row->cut = row->logits[last];
    row->last = (int32_t)last;
    return drawn_by_id(row, u);
}

/* In order of ids, the first token of those not taken whose running sum, from `reached` on, exceeds the target. */
static int64_t walked_by_id(const struct row *row, int64_t first, int64_t reached, int64_t target, const int64_t *taken,
                            int64_t num_taken)
{
    for (;; first += LANES) {
        const lanes weights = weights_at(row, first);
        for (int lane = 0; lane < LANES; lane++) {
            int is_taken = 0;
            for (int64_t i = 0; i < num_taken; i++)
                is_taken |= taken[i] == first + lane;
            reached += is_taken ? 0 : (int64_t)weights[lane];
            if (reached > target)
                return first + lane;
        }
    }
}

/* Draws without replacement. tokens [1 + count]: the first is given; NO_TOKEN where too little is left. */
static void draw_more(int64_t *tokens, int64_t count, const struct row *row, const double *uniforms)
{
    int64_t sums[PARTS + 1], left = part_sums(row, sums);
    const int64_t least = left >> LEAST_LEFT, size = part_size(row->vocab_size);
    for (int64_t i = 0; i < count; i++) {
        const int64_t weight = (int64_t)weights_at(row, tokens[i])[0];
        sums[tokens[i] / size] -= weight;
        left -= weight;
        if (left <= least) {
            for (int64_t rest = i; rest < count; rest++)
                tokens[rest + 1] = NO_TOKEN;
            return;
        }
        const int64_t target = target_of(left, uniforms[i]);
        int64_t reached = 0, first = 0;
        for (; reached + sums[first / size] <= target; first += size)
            reached += sums[first / size];
        tokens[i + 1] = walked_by_id(row, first, reached, target, tokens, i + 1);
    }
}

/* The largest logits. tokens [1 + count]: the first is given; NO_TOKEN where nothing is left. */
static void list_largest(int64_t *tokens, int64_t count, const struct row *row)
{
    const int64_t found = smaller(count + 1, row->vocab_size);
    uint64_t *keys = largest_keys(row, found);
    qsort(keys, found, sizeof *keys, in_order);
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
    struct row row = row_of(logits, vocab_size, logits[largest], temperature);
    if (top_k > 0 && top_k < vocab_size)
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

/* The allowed token with `place` allowed ones before it. */
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
        const struct row row = row_of(of_row, vocab_size, of_row[largest], temperature);
        if (temperature > 0)
            draw_more(found, count, &row, uniforms + i * count);
        else
            list_largest(found, count, &row);
    }
}
