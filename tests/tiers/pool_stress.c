/* The native pool alone, under a sanitizer: random jobs, slow and failing calls, deadlines and
 * closing.
 *
 *     gcc -fsanitize=thread -I kvoffload/_core tests/tiers/pool_stress.c -lpthread -o stress
 *     ./stress MODE SECONDS SEED      MODE: direct, copied, stored, memory, calls
 *
 * The system calls are replaced at compile time by slow ones that fail now and then. Checked: every
 * job ends once, is late once at most and settles once; what is OK has the bytes of its key; a block of the region does
 * not change after its job has ended.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/uio.h>
#include <unistd.h>

static ssize_t slow_preadv(int fd, const struct iovec *views, int count, off_t at);
static ssize_t slow_pwritev(int fd, const struct iovec *views, int count, off_t at);
#define preadv slow_preadv
#define pwritev slow_pwritev
#include "io.h"
#undef preadv
#undef pwritev

enum { SLOTS = 48, BLOCK = 8192, JOBS = 64, LARGEST = 12, THREADS = 6, BUFFERS = 6 };
enum { VALUE = BLOCK + KVO_SEAL_BYTES, BUFFER = BLOCK + 4096 };

static _Thread_local uint64_t chance_state;
static int failing; /* one call in so many */

static uint64_t chance(void) {
    if (!chance_state)
        chance_state = (uint64_t)(uintptr_t)&chance_state ^ (uint64_t)kvo_now();
    chance_state ^= chance_state << 13;
    chance_state ^= chance_state >> 7;
    return chance_state ^= chance_state << 17;
}

static int trouble(void) {
    uint64_t drawn = chance() % 100;
    if (drawn < 20)
        usleep((useconds_t)(chance() % 3000));
    return failing && chance() % (uint64_t)failing == 0;
}

static ssize_t slow_preadv(int fd, const struct iovec *views, int count, off_t at) {
    if (trouble()) {
        errno = EIO;
        return -1;
    }
    return preadv(fd, views, count, at);
}

static ssize_t slow_pwritev(int fd, const struct iovec *views, int count, off_t at) {
    if (trouble()) {
        errno = ENOSPC;
        return -1;
    }
    return pwritev(fd, views, count, at);
}

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

typedef struct {
    int64_t job_id;
    int active, ended, late, op, count;
    int64_t slots[LARGEST], ids[LARGEST];
} job_note;

static job_note notes[JOBS];
static uint8_t *region_memory, *store_memory, *staging;
static int slot_state[SLOTS]; /* 0: nothing; 1: the bytes of its key; 2: a put is under way */
static int slot_users[SLOTS];
static int block_busy[SLOTS];
static uint8_t canary[SLOTS]; /* what a block was filled with when it was given back */
static int64_t ends, settles, oks;
static uint8_t values[SLOTS][VALUE]; /* of calls */

static void fill(int64_t id, int64_t slot) {
    memset(region_memory + id * BLOCK, (int)(slot * 3 + 1), BLOCK);
}

static void is_whole(int64_t id, int64_t slot) {
    int64_t index;
    for (index = 0; index < BLOCK; index++)
        CHECK(region_memory[id * BLOCK + index] == (uint8_t)(slot * 3 + 1));
}

static void give_back(job_note *note) {
    int index;
    for (index = 0; index < note->count; index++) {
        int64_t id = note->ids[index];
        canary[id] = (uint8_t)chance();
        memset(region_memory + id * BLOCK, canary[id], BLOCK);
        block_busy[id] = 0;
    }
}

static void check_canaries(void) {
    int64_t id, index;
    for (id = 0; id < SLOTS; id++)
        for (index = 0; !block_busy[id] && index < BLOCK; index++)
            CHECK(region_memory[id * BLOCK + index] == canary[id]);
}

static void take_news(kvo_pool *pool) {
    kvo_entry *entry = kvo_poll(pool), *next;
    for (; entry; entry = next) {
        job_note *note = &notes[entry->job_id % JOBS];
        int index;
        next = entry->next;
        if (entry->flags & KVO_CHORE) {
            kvo_entry_free(entry);
            continue;
        }
        CHECK(note->active && note->job_id == entry->job_id);
        if (entry->flags & KVO_LATE)
            CHECK(!note->ended && !note->late++);
        if (entry->flags & KVO_ENDED) {
            CHECK(!note->ended && entry->count == note->count);
            for (index = 0; index < note->count; index++) {
                CHECK(entry->statuses[index] != KVO_MOVING);
                if (note->op == KVO_READ && entry->statuses[index] == KVO_STATUS_OK) {
                    is_whole(note->ids[index], note->slots[index]);
                    oks++;
                }
            }
            note->ended = 1;
            ends++;
            give_back(note);
        }
        if (entry->flags & KVO_SETTLED) {
            CHECK(note->ended);
            for (index = 0; index < note->count; index++) {
                int64_t slot = note->slots[index];
                slot_users[slot]--;
                if (note->op == KVO_WRITE)
                    slot_state[slot] = entry->statuses[index] == KVO_STATUS_OK;
                else if (note->op == KVO_READ)
                    CHECK(entry->statuses[index] != KVO_STATUS_CORRUPT);
            }
            note->active = 0;
            settles++;
        }
        kvo_entry_free(entry);
    }
}

static void submit(kvo_pool *pool, int64_t job_id, int op, int64_t timeout_ns) {
    job_note *note = &notes[job_id % JOBS];
    kvo_job *job;
    int64_t wanted = 1 + (int64_t)(chance() % LARGEST), slot, id = 0;
    int64_t start = (int64_t)(chance() % SLOTS);
    if (note->active)
        return;
    note->count = 0;
    for (slot = start; slot < start + SLOTS && note->count < wanted; slot++) {
        int64_t at = slot % SLOTS;
        if (op == KVO_WRITE ? slot_users[at] || slot_state[at] == 2 : slot_state[at] != 1)
            continue;
        while (id < SLOTS && block_busy[id])
            id++;
        if (id == SLOTS)
            break;
        block_busy[id] = 1;
        slot_users[at]++;
        note->slots[note->count] = at;
        note->ids[note->count++] = id;
        if (op == KVO_WRITE) {
            slot_state[at] = 2;
            fill(id, at);
        }
    }
    if (!note->count)
        return;
    job = kvo_job_new(job_id, op, note->count, timeout_ns, 7);
    CHECK(job);
    for (slot = 0; slot < note->count; slot++) {
        kvo_block *block = job->blocks + slot;
        memset(block, 0, sizeof *block);
        block->slot = note->slots[slot];
        block->id = note->ids[slot];
        block->index = (int32_t)slot;
        block->buffer = -1;
        block->status = KVO_MOVING;
        block->key_length = 8;
        memcpy(block->key, &block->slot, 8);
        block->seed = kvo_seed(&pool->store, block->key, 8);
    }
    note->job_id = job_id;
    note->active = 1;
    note->ended = note->late = 0;
    note->op = op;
    kvo_submit(pool, job);
}

/* What threads of Python do. */
static void *call(void *argument) {
    kvo_worker *worker = argument;
    const kvo_pool *pool = worker->pool;
    int64_t index;
    while (kvo_next(worker)) {
        if (worker->chore)
            worker->chore->status = KVO_STATUS_OK;
        for (index = 0; !worker->chore && index < worker->count; index++) {
            kvo_block *block = worker->run + index;
            CHECK(worker->count <= (worker->running->op == KVO_QUERY ? 5 : 3));
            block->status = trouble() ? KVO_STATUS_FAILED : KVO_STATUS_OK;
            if (worker->running->op == KVO_QUERY || block->status != KVO_STATUS_OK)
                continue;
            if (worker->running->op == KVO_READ)
                memcpy(kvo_buffer(pool, block), values[block->slot], VALUE);
            else
                memcpy(values[block->slot], kvo_buffer(pool, block), VALUE);
        }
        kvo_done(worker);
    }
    return NULL;
}

/* Close as `Pool.close` does; 1 if all threads have ended. */
static int close_pool(kvo_pool *pool, int64_t timeout_ns) {
    int64_t until = kvo_now() + timeout_ns;
    (void)kvo_pool_rest(pool, until);
    if (!kvo_pool_ended(pool, kvo_pool_stop(pool, until)))
        return 0;
    kvo_pool_join(pool);
    return 1;
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "direct";
    double seconds = argc > 2 ? atof(argv[2]) : 1;
    int64_t job_id = 0, until, round = 0;
    kvo_part part = {0, BLOCK, BLOCK};
    kvo_region region;
    kvo_store store;
    static uint64_t sums[SLOTS];
    static uint8_t written[SLOTS];
    char data_name[] = "/tmp/kvo-stress-data-XXXXXX", table_name[] = "/tmp/kvo-stress-table-XXXXXX";
    void *memory = NULL;
    chance_state = argc > 3 ? strtoull(argv[3], NULL, 10) * 2 + 1 : 1;
    CHECK(posix_memalign(&memory, 4096, SLOTS * BLOCK) == 0);
    region_memory = memory;
    CHECK(posix_memalign(&memory, 4096, SLOTS * BLOCK) == 0);
    store_memory = memory;
    CHECK(posix_memalign(&memory, 4096, BUFFERS * BUFFER) == 0);
    staging = memory;
    memset(region_memory, 0, SLOTS * BLOCK);
    memset(&store, 0, sizeof store);
    region.base = region_memory;
    region.parts = &part;
    region.num_parts = 1;
    region.block_bytes = BLOCK;
    store.kind = strcmp(mode, "memory") == 0  ? KVO_MEMORY
                 : strcmp(mode, "calls") == 0 ? KVO_CALLS
                                              : KVO_FILE;
    store.direct = strcmp(mode, "direct") == 0 || store.kind == KVO_MEMORY;
    store.block_bytes = BLOCK;
    store.slot_bytes = store.kind == KVO_CALLS ? BUFFER : BLOCK;
    store.blocks_per_call = 3;
    store.keys_per_query = 5;
    store.records_offset = 4096;
    store.sums = sums;
    store.written = written;
    store.memory = region;
    store.memory.base = store_memory;
    store.fingerprint_bytes = 16;
    if (store.kind == KVO_FILE) {
        store.data_fd = mkstemp(data_name);
        store.table_fd = mkstemp(table_name);
        CHECK(store.data_fd >= 0 && store.table_fd >= 0);
        CHECK(ftruncate(store.data_fd, SLOTS * BLOCK) == 0);
        unlink(data_name);
        unlink(table_name);
    }
    until = kvo_now() + (int64_t)(seconds * 1e9);
    while (kvo_now() < until) {
        int threads = 1 + (int)(round % THREADS);
        kvo_pool *pool = kvo_pool_new(&region, &store, threads, staging, BUFFERS,
                                      strcmp(mode, "copied") == 0 || round % 2);
        pthread_t callers[THREADS];
        int64_t steps = 50 + (int64_t)(chance() % 400), step;
        int clean, index;
        CHECK(pool);
        for (index = 0; store.kind == KVO_CALLS && index < threads; index++)
            CHECK(!pthread_create(&callers[index], NULL, call, pool->workers + index));
        failing = round % 3 == 2 && store.kind != KVO_MEMORY ? 20 : 0;
        for (step = 0; step < steps; step++) {
            uint64_t drawn = chance() % 100;
            int64_t timeout_ns = drawn < 30 ? (int64_t)(chance() % 2000000) : 60000000000;
            if (drawn % 3)
                submit(pool, job_id++,
                       store.kind == KVO_CALLS && drawn < 40 ? KVO_QUERY
                       : chance() % 2                        ? KVO_READ
                                                             : KVO_WRITE,
                       timeout_ns);
            else if (store.kind != KVO_MEMORY && drawn < 10)
                CHECK(!kvo_submit_chore(pool, 0, 4096 * (int64_t)(chance() % 4 + 2), (uint8_t *)"x",
                                        1));
            else
                kvo_signal_wait(pool, (int64_t)(chance() % 1000000));
            if (chance() % 16 == 0) {
                const job_note *note = &notes[chance() % JOBS];
                if (note->active)
                    (void)kvo_cancel(pool, note->job_id, kvo_now() + 1000000);
            }
            if (chance() % 4 == 0) {
                int64_t late, held;
                take_news(pool);
                check_canaries();
                kvo_pool_stats(pool, &late, &held);
            }
        }
        clean = close_pool(pool, chance() % 2 ? 60000000000 : (int64_t)(chance() % 1000000));
        while (!clean) /* a slow call: it returns in time */
            clean = close_pool(pool, 1000000000);
        for (index = 0; store.kind == KVO_CALLS && index < threads; index++)
            pthread_join(callers[index], NULL);
        take_news(pool);
        check_canaries();
        for (step = 0; step < JOBS; step++)
            CHECK(!notes[step].active);
        kvo_pool_free(pool);
        round++;
    }
    printf("%s: %ld rounds, %ld jobs ended, %ld settled, %ld blocks compared\n", mode, (long)round,
           (long)ends, (long)settles, (long)oks);
    CHECK(ends == settles && (ends > 0));
    free(region_memory);
    free(store_memory);
    free(staging);
    return 0;
}
