/* Decoder layers of the Llama families in one call: norm, attention, residual sum, norm, gated MLP, residual sum. These are the
 * kernels that the engine otherwise calls one by one, in the same order: results have the same bits. */

/* Written by LayerRecord in types.py, as all structures here. */
typedef struct {
    Linear qkv, o, gate_up, down;
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm; /* the last two: NULL for none */
    int64_t number, rotary, window;                                 /* rotary: -1 for none; window: 0 for none */
} Layer;

typedef struct {
    int64_t hidden, num_heads, num_kv_heads, head_dim, inner;
    float norm_eps, attention_scale, attention_softcap; /* softcap: 0 for none */
} LayerShape;

typedef struct {
    const float *cosine, *sine; /* [num_tokens, half] */
    int64_t half;
} Rotary;

/* Of all packed layers: `num_segments` each, and their largest ranks. */
typedef struct {
    const Segment *segments;
    const int64_t *ranks;
    int64_t num_segments;
} Table;

typedef struct {
    float *x; /* [num_tokens, hidden], the residual stream: changed in place */
    int64_t num_tokens;
    const Rotary *rotaries;
    void *pool;
    int64_t pool_type;
    const int64_t *kv_rows, *kv_strides; /* see rotate_and_store */
    const Span *spans;                   /* and what follows: see attend_spans */
    const int64_t *block_starts;
    int64_t num_spans, block_tokens, num_threads;
    const Table *tables;
    int64_t num_tables;
    float *activations; /* [num_tokens, hidden + the larger of queries, keys, values and queries, and 3 inner] */
    float *scratch;     /* of products */
} LayerStep;

/* x += y; then, where there is a weight, out = norm(x). */
static void team_add_and_norm(float *x, const float *y, float *out, const float *weight, const LayerStep *s,
                              const LayerShape *shape)
{
    const int64_t size = shape->hidden;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < s->num_tokens; row++) {
        float *to = x + row * size;
        for (int64_t i = 0; i < size; i++)
            to[i] += y[row * size + i]; /* `out` may be `y`: it is written afterwards */
        if (weight)
            normalize(out + row * size, to, weight, size, shape->norm_eps);
    }
}

static Segments segments_at(const Table *t, int64_t site)
{
    const int64_t rank = t->ranks[site];
    return (Segments){t->segments + site * t->num_segments, rank ? t->num_segments : 0, rank};
}

/* y = x W^T + bias, and what all tables add. Threads meet at the end. */
static void team_linear_of_step(float *y, const float *x, const Linear *l, int64_t site, const LayerStep *s)
{
    const Segments first = s->num_tables ? segments_at(s->tables, site) : (Segments){0};
    team_linear(y, x, s->num_tokens, l, first, s->scratch);
    for (int64_t t = 1; t < s->num_tables; t++) {
        const Segments more = segments_at(s->tables + t, site);
        if (!more.count)
            continue;
        const Lora lora = lora_of(y, l->num_columns, x, l->depth, more, s->scratch);
#pragma omp barrier
        add_all(&lora);
    }
#pragma omp barrier
}

static void team_norm_heads(float *heads, int64_t stride, int64_t num_heads, const float *weight, const LayerStep *s,
                       const LayerShape *shape)
{
#pragma omp for schedule(static)
    for (int64_t row = 0; row < s->num_tokens; row++)
        for (int64_t h = 0; h < num_heads; h++) {
            float *head = heads + row * stride + h * shape->head_dim;
            normalize(head, head, weight, shape->head_dim, shape->norm_eps);
        }
}

/* One layer, by a team. `h`: the norm of x before it; afterwards before the next, where there is one. */
static void team_layer(const Layer *l, const Layer *next, float *h, const LayerShape *shape, const LayerStep *s)
{
    const int64_t queries = shape->num_heads * shape->head_dim, keys = shape->num_kv_heads * shape->head_dim;
    const int64_t stride = queries + 2 * keys, site = 4 * l->number;
    float *wide = h + s->num_tokens * shape->hidden;
    float *attended = wide + s->num_tokens * stride, *active = wide + s->num_tokens * 2 * shape->inner;
    const Rotary rotary = l->rotary < 0 ? (Rotary){0} : s->rotaries[l->rotary];
    const Attention attention = {
        .out = attended, .q = wide, .q_stride = stride, .pool = s->pool, .type = s->pool_type, .layer = l->number,
        .num_kv_heads = shape->num_kv_heads, .per_kv = shape->num_heads / shape->num_kv_heads,
        .head_dim = shape->head_dim, .window = l->window, .scale = shape->attention_scale,
        .softcap = shape->attention_softcap};
    team_linear_of_step(wide, h, &l->qkv, site, s);
    if (l->query_norm) {
        team_norm_heads(wide, stride, shape->num_heads, l->query_norm, s, shape);
        team_norm_heads(wide + queries, stride, shape->num_kv_heads, l->key_norm, s, shape);
    }
    team_rotate_and_store(wide, rotary.cosine, rotary.sine, rotary.half, s->pool, s->pool_type, s->kv_rows,
                          s->kv_strides, l->number, s->num_tokens, shape->num_heads, shape->num_kv_heads,
                          shape->head_dim);
    team_attend(&attention, s->spans, s->block_starts, s->num_spans, s->block_tokens);
    team_linear_of_step(h, attended, &l->o, site + 1, s);
    team_add_and_norm(s->x, h, h, l->mlp_norm, s, shape);
    team_linear_of_step(wide, h, &l->gate_up, site + 2, s);
    team_silu_gate(active, wide, s->num_tokens, shape->inner);
    team_linear_of_step(h, active, &l->down, site + 3, s);
    team_add_and_norm(s->x, h, h, next ? next->attention_norm : 0, s, shape);
}

/* The step after `num_layers` layers. One team for all: to meet takes it less time than to form. */
void decoder_layers(const Layer *layers, int64_t num_layers, const LayerShape *shape, const LayerStep *s)
{
    float *h = s->activations;
#pragma omp parallel num_threads(s->num_threads)
    for (int64_t i = 0; i < num_layers; i++) {
        if (i == 0)
            team_rms_norm(h, s->x, shape->hidden, layers->attention_norm, s->num_tokens, shape->hidden,
                          shape->norm_eps);
        team_layer(layers + i, i + 1 < num_layers ? layers + i + 1 : 0, h, shape, s);
    }
}
