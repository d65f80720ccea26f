/* Decoder layers of the Llama families in one call: norm, attention, residual sum, norm, gated MLP, residual sum. These are the
 * kernels that the engine otherwise calls one by one, in the same order: results have the same bits.
 *
 * Half 2 i is the attention of layer i, half 2 i + 1 its MLP. A half begins with the residual sum of the one before it: members of a
 * group add up what their halves give before that. */

/* Written by LayerRecord in types.py, as LayerShape and LayerStep are there; Rotary and Table are written by __init__.py. */
typedef struct {
    Linear qkv, o, gate_up, down;
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm; /* the last two: NULL for none */
    const float *sinks;                                             /* [num_heads]; NULL for none */
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

/* Segments of all packed layers, `num_segments` each, and their largest ranks. */
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
    float *y;           /* [num_tokens, hidden]: what a half gives */
    float *activations; /* [num_tokens, the larger of queries, keys, values and queries, and of 3 inner] */
    float *scratch;     /* of products */
} LayerStep;

/* x += y, then y = norm(x). */
static void team_add_and_norm(const float *weight, const LayerStep *s, const LayerShape *shape)
{
    const int64_t size = shape->hidden;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < s->num_tokens; row++) {
        float *x = s->x + row * size, *y = s->y + row * size;
        for (int64_t i = 0; i < size; i++)
            x[i] += y[i];
        normalize(y, x, weight, size, shape->norm_eps);
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

/* y = attention(y) */
static void team_attention(const Layer *l, const LayerShape *shape, const LayerStep *s)
{
    const int64_t queries = shape->num_heads * shape->head_dim, keys = shape->num_kv_heads * shape->head_dim;
    const int64_t stride = queries + 2 * keys;
    float *heads = s->activations, *attended = heads + s->num_tokens * stride;
    const Rotary rotary = l->rotary < 0 ? (Rotary){0} : s->rotaries[l->rotary];
    const Attention attention = {
        .out = attended, .q = heads, .q_stride = stride, .pool = s->pool, .type = s->pool_type, .layer = l->number,
        .num_kv_heads = shape->num_kv_heads, .per_kv = shape->num_heads / shape->num_kv_heads,
        .head_dim = shape->head_dim, .window = l->window, .scale = shape->attention_scale,
        .softcap = shape->attention_softcap, .sinks = l->sinks};
    team_linear_of_step(heads, s->y, &l->qkv, 4 * l->number, s);
    if (l->query_norm) {
        team_norm_heads(heads, stride, shape->num_heads, l->query_norm, s, shape);
        team_norm_heads(heads + queries, stride, shape->num_kv_heads, l->key_norm, s, shape);
    }
    team_rotate_and_store(heads, rotary.cosine, rotary.sine, rotary.half, s->pool, s->pool_type, s->kv_rows,
                          s->kv_strides, l->number, s->num_tokens, shape->num_heads, shape->num_kv_heads,
                          shape->head_dim);
    team_attend(&attention, s->spans, s->block_starts, s->num_spans, s->block_tokens);
    team_linear_of_step(s->y, attended, &l->o, 4 * l->number + 1, s);
}

/* y = mlp(y) */
static void team_mlp(const Layer *l, const LayerShape *shape, const LayerStep *s)
{
    float *gate_up = s->activations, *active = gate_up + s->num_tokens * 2 * shape->inner;
    team_linear_of_step(gate_up, s->y, &l->gate_up, 4 * l->number + 2, s);
    team_silu_gate(active, gate_up, s->num_tokens, shape->inner);
    team_linear_of_step(s->y, active, &l->down, 4 * l->number + 3, s);
}

/* Halves first .. end of the layers, of which the last leaves y. One team for all: to meet takes it less time than to form. */
void decoder_layers(const Layer *layers, int64_t first, int64_t end, const LayerShape *shape, const LayerStep *s)
{
#pragma omp parallel num_threads(s->num_threads)
    for (int64_t half = first; half < end; half++) {
        const Layer *l = layers + half / 2;
        const float *norm = half % 2 ? l->mlp_norm : l->attention_norm;
        if (half == 0)
            team_rms_norm(s->y, s->x, shape->hidden, norm, s->num_tokens, shape->hidden, shape->norm_eps);
        else
            team_add_and_norm(norm, s, shape);
        if (half % 2)
            team_mlp(l, shape, s);
        else
            team_attention(l, shape, s);
    }
}
