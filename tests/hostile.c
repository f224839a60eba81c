/* SPDX-License-Identifier: MIT
 *
 * See hostile.h.
 */
#include "hostile.h"

#include <string.h>

static int reversed_for(void *data, size_t n, void (*task)(void *arg, size_t i, size_t thread), void *arg)
{
    (void)data;
    for (size_t i = n; i-- > 0;)
        task(arg, i, i % 3);
    return 0;
}

void contexts_open(msa_context **serial, msa_context **reversed)
{
    msa_context_options options = MSA_CONTEXT_OPTIONS_INIT;

    options.num_threads = 1;
    CHECK(msa_context_create(&options, serial) == MSA_SUCCESS);
    options.num_threads = 3;
    options.parallel_for = reversed_for;
    CHECK(msa_context_create(&options, reversed) == MSA_SUCCESS);
}

/* ------------------------------------------------------------------------------------------------ decisions */

struct input input_open(const uint8_t *bytes, size_t size)
{
    struct input in = {bytes, bytes + size, 1};

    for (size_t i = 0; i < size; i++)
        in.noise = in.noise * 6364136223846793005u + bytes[i] + 1442695040888963407u;
    in.noise |= 1; /* the generator below never leaves 0 */
    return in;
}

int take(struct input *in, int n)
{
    return in->at < in->end ? *in->at++ % n : 0;
}

bool rarely(struct input *in, int n)
{
    return take(in, n) == n - 1;
}

int32_t take_i32(struct input *in)
{
    uint32_t value = 0;

    for (int i = 0; i < 4; i++)
        value = value << 8 | (uint32_t)take(in, 256);
    return (int32_t)value;
}

/* xorshift64 */
static uint64_t noise(struct input *in)
{
    in->noise ^= in->noise << 13;
    in->noise ^= in->noise >> 7;
    in->noise ^= in->noise << 17;
    return in->noise;
}

int pick(struct input *in, int n)
{
    return (int)((noise(in) >> 32) * (uint64_t)n >> 32);
}

/* ------------------------------------------------------------------------------------------------ tensors */

static void *allocate(size_t alignment, size_t bytes)
{
    void *memory = NULL;

    CHECK(posix_memalign(&memory, alignment < sizeof(void *) ? sizeof(void *) : alignment, bytes) == 0);
    return memory;
}

/* Chooses nesting and gaps; returns the bytes from the first row to past the last. */
static size_t choose_strides(struct input *in, struct tensor *t, enum tensor_kind kind, int64_t align)
{
    const bool dense = !rarely(in, 4);
    const int first = dense ? 0 : take(in, t->axes);
    int64_t covered = (int64_t)t->row_bytes;

    for (int i = t->axes; i-- > 0;) {
        const int axis = (first + i) % t->axes;
        int64_t *stride = &t->stride[axis];

        if (t->extent[axis] <= 1) {
            t->given[axis] = -3;
            continue;
        }
        *stride = (covered + align - 1) / align * align;
        if (!dense)
            *stride += align * take(in, 3);
        if (!dense && kind == INPUT && rarely(in, 8))
            *stride = 0;
        t->given[axis] = dense && *stride == covered ? MSA_DENSE : *stride;
        /* A dense outer axis follows the extent of the inner one, whose last row may end early otherwise. */
        covered = dense ? *stride * t->extent[axis] : covered + *stride * (t->extent[axis] - 1);
    }
    return (size_t)covered;
}

struct tensor tensor_make(struct input *in, enum tensor_kind kind, size_t align, size_t row_bytes, int axes,
                          const int64_t *extents)
{
    struct tensor t = {.row_bytes = row_bytes, .axes = axes};
    bool empty = row_bytes == 0;

    for (int i = 0; i < axes; i++) {
        t.extent[i] = extents[i];
        empty = empty || extents[i] == 0;
    }
    t.bytes = choose_strides(in, &t, kind, (int64_t)align);
    if (empty) {
        t.bytes = 0;
        return t;
    }
    t.data = allocate(align, t.bytes);
    t.used = allocate(align, t.bytes);
    memset(t.used, 0, t.bytes);
    memset(t.data, PATTERN, t.bytes);
    t.tame = kind == INPUT && !rarely(in, 16);
    for (size_t i = 0; kind == INPUT && i < t.bytes; i += 8) {
        const uint64_t random = noise(in) & (t.tame ? 0xBFBFBFBFBFBFBFBF : UINT64_MAX); /* smaller exponents */

        memcpy(t.data + i, &random, t.bytes - i < 8 ? t.bytes - i : 8);
    }
    return t;
}

void tensor_free(struct tensor *t)
{
    free(t->data);
    free(t->used);
}

uint8_t *tensor_row(const struct tensor *t, int64_t i, int64_t j, int64_t k)
{
    const int64_t index[MAX_AXES] = {i, j, k};
    int64_t offset = 0;

    for (int axis = 0; axis < t->axes; axis++)
        offset += index[axis] * t->stride[axis];
    return t->data ? t->data + offset : NULL;
}

void tensor_use(struct tensor *t, int64_t i, int64_t j, int64_t k, size_t first, size_t bytes)
{
    memset(t->used + (tensor_row(t, i, j, k) - t->data) + first, 1, bytes);
}

void tensor_use_row(struct tensor *t, int64_t i, int64_t j, int64_t k)
{
    tensor_use(t, i, j, k, 0, t->row_bytes);
}

void tensor_use_all(struct tensor *t)
{
    if (t->bytes)
        memset(t->used, 1, t->bytes);
}

void tensor_poison(struct tensor *t, uint8_t byte)
{
    for (size_t i = 0; i < t->bytes; i++) {
        if (!t->used[i])
            t->data[i] = byte;
    }
}

void tensor_check_gaps(const struct tensor *t)
{
    for (size_t i = 0; i < t->bytes; i++)
        CHECK(t->used[i] || t->data[i] == PATTERN);
}

uint8_t *tensor_take(struct tensor *t)
{
    uint8_t *contents = allocate(1, t->bytes + 1);

    if (t->bytes) {
        memcpy(contents, t->data, t->bytes);
        memset(t->data, PATTERN, t->bytes);
    }
    return contents;
}

/* ------------------------------------------------------------------------------------------------ requests */

static struct tensor make_i32(struct input *in, const int32_t *values, int64_t count)
{
    struct tensor t = tensor_make(in, INPUT, 4, (size_t)count * 4, 1, &(int64_t){1});

    if (count)
        memcpy(t.data, values, (size_t)count * 4);
    return t;
}

/* Half of them beside a page's end. */
static int32_t take_kv_len(struct input *in, const struct requests *r)
{
    if (rarely(in, 32))
        return take(in, 2) ? take_i32(in) : (int32_t)r->max_kv_len + 1 + take(in, 200);

    const int64_t length = 128 * take(in, 3) + (take(in, 2) ? take(in, 128) : take(in, 5) - 2);

    return (int32_t)(length < 0 ? 0 : length < r->max_kv_len ? length : r->max_kv_len);
}

static void make_lengths(struct input *in, struct requests *r)
{
    r->batch = take(in, MAX_BATCH + 1);
    r->max_kv_len = 1 + take(in, 256) + 128 * take(in, MAX_PAGES - 1);
    r->max_pages = (int)((r->max_kv_len + MSA_PAGE_SIZE - 1) / MSA_PAGE_SIZE);
    for (int b = 0; b < r->batch; b++) {
        r->cu[b + 1] = r->cu[b] + take(in, MAX_ROWS - r->cu[b] + 1);
        r->kv[b] = take_kv_len(in, r);
    }
    r->rows = r->cu[r->batch] + (rarely(in, 4) ? take(in, 3) : 0);
    if (rarely(in, 16))
        r->cu[take(in, r->batch + 1)] = take_i32(in);
}

/* The error bits of the lengths, and whether they own rows. */
static void judge_lengths(struct requests *r)
{
    r->good = r->cu[0] == 0 && r->cu[r->batch] <= r->rows;
    for (int b = 0; b < r->batch; b++) {
        r->good = r->good && r->cu[b] <= r->cu[b + 1] && r->kv[b] >= 0;
        if (r->kv[b] > r->max_kv_len)
            r->bits |= MSA_ERROR_BIT_CAPACITY;
    }
    if (!r->batch || !r->rows) { /* nothing to do: no value is looked at */
        r->good = true;
        r->bits = 0;
    } else if (r->good) {
        r->owners = r->batch;
    } else {
        r->bits |= MSA_ERROR_BIT_LENGTHS;
    }
}

void requests_make(struct input *in, struct requests *r)
{
    memset(r, 0, sizeof(*r));
    make_lengths(in, r);
    judge_lengths(r);
    r->pool = take(in, 4);
    r->cu_q = make_i32(in, r->cu, r->batch + 1);
    r->kv_lens = make_i32(in, r->kv, r->batch);
    r->table = tensor_make(in, INPUT, 4, (size_t)r->max_pages * 4, 1, &(int64_t){r->batch});
    for (int i = 0; i < r->batch * r->max_pages; i++) {
        const int32_t page = rarely(in, 32) ? take_i32(in) : r->pool ? take(in, r->pool) : -1;

        memcpy(tensor_row(&r->table, i / r->max_pages, 0, 0) + i % r->max_pages * 4, &page, 4);
    }
}

void requests_free(struct requests *r)
{
    tensor_free(&r->cu_q);
    tensor_free(&r->kv_lens);
    tensor_free(&r->table);
}

int64_t requests_position(const struct requests *r, int b, int64_t row)
{
    return (int64_t)r->kv[b] - (r->cu[b + 1] - row);
}

int64_t requests_look_up(struct requests *r, int b, int page)
{
    int32_t physical;

    tensor_use(&r->table, b, 0, 0, 4 * (size_t)page, 4);
    memcpy(&physical, tensor_row(&r->table, b, 0, 0) + 4 * page, 4);
    if (physical >= 0 && physical < r->pool)
        return physical;
    r->bits |= MSA_ERROR_BIT_PAGE_ID;
    return -1;
}

msa_step requests_step(const struct requests *r, int b, int32_t alone[2])
{
    msa_step step = MSA_STEP_INIT;

    step.batch = r->batch;
    step.total_q = r->rows;
    step.cu_seqlens_q = (const int32_t *)r->cu_q.data;
    step.kv_lens = (const int32_t *)r->kv_lens.data;
    step.page_table = (const int32_t *)r->table.data;
    step.page_table_stride = r->table.given[0];
    if (b >= 0) {
        alone[0] = 0;
        alone[1] = r->cu[b + 1] - r->cu[b];
        step.batch = 1;
        step.total_q = alone[1];
        step.cu_seqlens_q = alone;
        step.kv_lens += b;
        step.page_table = (const int32_t *)tensor_row(&r->table, b, 0, 0);
    }
    return step;
}

void step_workspace(msa_step *step, const msa_plan *plan, int fill)
{
    step->workspace_bytes = msa_plan_workspace(plan);
    step->workspace = allocate(256, step->workspace_bytes + 1);
    /* Filling all of it would take most of the time: a byte in 64 stands for the rest. */
    for (size_t i = 0; i < step->workspace_bytes; i += 64)
        ((uint8_t *)step->workspace)[i] = (uint8_t)fill;
}

void requests_check_bits(const struct requests *r, msa_plan *plan)
{
    uint32_t bits;

    CHECK(msa_plan_error(plan, &bits, NULL) == MSA_SUCCESS);
    CHECK(r->good ? bits == r->bits : (bits & MSA_ERROR_BIT_LENGTHS) != 0);
}
