/* Threads that move blocks between the caller's region and a store, without the interpreter.
 *
 * The contract, its terms and the reasons are in kvoffload/tiers/engine/contract.py.
 *
 * Structure
 *     One mutex guards the queues, the jobs and the buffers; it is never held during I/O or a copy.
 *     A job is in the queue of its kind while some of its blocks have not been taken; a thread
 *     takes a run from its front. Idle threads sleep on one of two conditions, depending on whether
 *     they write. A thread that takes a run wakes another if a run is left: a small job wakes one
 *     thread.
 *     The threads of files and memory run `kvo_serve`. Those of a store whose calls are made in
 *     Python are Python's own: each asks `kvo_next` for work, and reports it to `kvo_done`.
 * Invariants
 *     A block is taken once, by a thread (`next`) or, in a staged put, first by the keeper
 *     (`copied`). No thread touches the region for a job that has ended: a thread that copies to or
 *     from it is counted in `copying`, and the keeper ends no job that is being copied. A job's
 *     memory is freed when its last entry, which reports that it settled, has been read.
 * Errors
 *     Functions that allocate return -1 or NULL, with nothing changed, if there is no memory.
 */
#ifndef KVOFFLOAD_IO_H
#define KVOFFLOAD_IO_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/eventfd.h>
#include <sys/syscall.h>
#if defined(SYS_openat2) && defined(__has_include)
#if __has_include(<linux/openat2.h>)
#include <linux/openat2.h>
#endif
#endif
#endif

#include "xxh3.h"

/* -- the contract's numbers (kvoffload/tiers/base.py, engine/contract.py) ---------------------- */

enum kvo_status {
    KVO_MOVING = -1,
    KVO_STATUS_OK = 0,
    KVO_STATUS_MISS = 1,
    KVO_STATUS_CORRUPT = 2,
    KVO_STATUS_FULL = 3,
    KVO_STATUS_TIMEOUT = 5,
    KVO_STATUS_UNAVAILABLE = 6,
    KVO_STATUS_FAILED = 7
};
enum kvo_operation { KVO_READ = 0, KVO_WRITE = 1, KVO_QUERY = 2, KVO_OPERATIONS };
enum kvo_flag { KVO_LATE = 1, KVO_ENDED = 2, KVO_SETTLED = 4, KVO_CHORE = 8 };

#define KVO_RUN_BYTES ((int64_t)8 << 20) /* most that one call moves, unless a block is larger */
#define KVO_SHORT_RUN ((int64_t)2 << 20) /* jobs are not cut into smaller runs */
#define KVO_RUN_BLOCKS 1024              /* most that one call moves */
#define KVO_MAX_VIEWS 1024               /* pieces that one system call takes */
#define KVO_READ_ONLY_THREADS 2
#define KVO_SEAL_BYTES 64
#define KVO_KEY_BYTES 40      /* longest key that is stored unchanged */
#define KVO_DIGESTED_BYTES 41 /* length of the stored form of other keys */
#define KVO_ALIGNMENT 4096
#define KVO_FOLDER_BYTES 8                     /* longest name of a folder of blocks, and a zero */
#define KVO_THREAD_STACK ((size_t)512 << 10)   /* bytes */
#define KVO_GRACE_NS ((int64_t)1000000000)     /* for a call under way when the pool closes */
#define KVO_LATE_GRACE_NS ((int64_t)100000000) /* the same past a deadline */
#define KVO_SLICE_BYTES ((int64_t)1 << 20)     /* copied between two checks of the deadlines */
#define KVO_REWRITE_NS 100000 /* until a block that was being written is read again */

/* -- memory, stores ---------------------------------------------------------------------------- */

typedef struct {
    int64_t offset, stride, nbytes;
} kvo_part;

/* Memory of equal blocks; see kvoffload/tiers/region.py. */
typedef struct {
    uint8_t *base;
    kvo_part *parts;
    int64_t num_parts;
    int64_t block_bytes;
} kvo_region;

/* Blocks of a region; the slots of a file and a table of their seals; calls in Python. */
enum kvo_kind { KVO_MEMORY, KVO_FILE, KVO_CALLS };

/* Where blocks are kept. */
typedef struct {
    int kind;
    int direct;            /* whether the kernel gets the region's memory or a copy */
    int data_fd, table_fd; /* of a file */
    int64_t block_bytes;
    int64_t slot_bytes;                      /* from slot to slot; the size of a buffer */
    int64_t blocks_per_call, keys_per_query; /* of calls */
    int64_t records_offset;                  /* of the seal of slot 0 in the table */
    uint8_t *written;  /* (slots,) of a file: whether the table may have a seal of the slot;
                             * of a region: whether the slot is being written */
    uint64_t *sums;    /* (slots,) the sum of the bytes in each slot */
    kvo_region memory; /* the second region */
    uint8_t fingerprint[64];
    size_t fingerprint_bytes;
} kvo_store;

static inline void kvo_region_views(const kvo_region *region, int64_t block, struct iovec *views) {
    int64_t part;
    for (part = 0; part < region->num_parts; part++) {
        views[part].iov_base =
            region->base + region->parts[part].offset + block * region->parts[part].stride;
        views[part].iov_len = (size_t)region->parts[part].nbytes;
    }
}

struct kvo_pool;
struct kvo_job;
static int kvo_must_stop(struct kvo_pool *pool, const struct kvo_job *job);

/* Copy all bytes of the sources to the targets, which are at least as large.
 *
 * For a job, if it is not NULL, the deadlines are checked after every slice; 0 if it is over. */
static inline int kvo_copy(const struct iovec *sources, int64_t num_sources,
                           const struct iovec *targets, struct kvo_pool *pool,
                           const struct kvo_job *job) {
    size_t done = 0, from, count, left = (size_t)KVO_SLICE_BYTES;
    int64_t source;
    for (source = 0; source < num_sources; source++) {
        for (from = 0; from < sources[source].iov_len; from += count) {
            while (done == targets->iov_len) {
                targets++;
                done = 0;
            }
            count = sources[source].iov_len - from;
            count = count < targets->iov_len - done ? count : targets->iov_len - done;
            count = count < left || !job ? count : left;
            memcpy((uint8_t *)targets->iov_base + done,
                   (const uint8_t *)sources[source].iov_base + from, count);
            done += count;
            if (!job)
                continue;
            left -= count;
            if (!left && kvo_must_stop(pool, job))
                return 0;
            left = left ? left : (size_t)KVO_SLICE_BYTES;
        }
    }
    return 1;
}

/* -- seals ------------------------------------------------------------------------------------- */

static inline uint64_t kvo_seed(const kvo_store *store, const uint8_t *key, size_t length) {
    uint8_t joined[sizeof store->fingerprint + KVO_DIGESTED_BYTES];
    memcpy(joined, store->fingerprint, store->fingerprint_bytes);
    memcpy(joined + store->fingerprint_bytes, key, length);
    return kvo_xxh3_64(joined, store->fingerprint_bytes + length, 0);
}

/* Write a seal; its layout is in kvoffload/tiers/seal.py. */
static inline void kvo_seal_pack(uint8_t *seal, const uint8_t *key, size_t length, int64_t nbytes,
                                 uint64_t sum, uint64_t generation) {
    int index;
    memset(seal, 0, KVO_SEAL_BYTES);
    memcpy(seal, "KV\1", 3);
    seal[3] = (uint8_t)length;
    for (index = 0; index < 4; index++)
        seal[4 + index] = (uint8_t)(nbytes >> (8 * index));
    memcpy(seal + 8, key, length < KVO_KEY_BYTES ? length : KVO_KEY_BYTES);
    kvo_put_little64(seal + 48, sum);
    kvo_put_little64(seal + 56, kvo_xxh3_64(seal, 56, generation));
}

/* Return whether 64 bytes are a seal of this generation for blocks of `nbytes`. */
static inline int kvo_seal_valid(const uint8_t *seal, int64_t nbytes, uint64_t generation) {
    return memcmp(seal, "KV\1", 3) == 0 && seal[3] >= 1 && seal[3] <= KVO_DIGESTED_BYTES &&
           (int64_t)kvo_little32(seal + 4) == nbytes &&
           kvo_little64(seal + 56) == kvo_xxh3_64(seal, 56, generation);
}

/* -- jobs -------------------------------------------------------------------------------------- */

typedef struct {
    int64_t slot, id; /* where it is in the store and in the region */
    uint64_t seed;    /* of its sum */
    int32_t index;    /* in the job */
    int32_t buffer;   /* the staging buffer, -1 for none */
    int8_t status;
    uint8_t key_length;
    uint8_t key[KVO_DIGESTED_BYTES];
} kvo_block;

/* An event, which `poll` returns. */
typedef struct kvo_entry {
    struct kvo_entry *next;
    struct kvo_job *job; /* NULL for a chore */
    int64_t job_id;
    int64_t count; /* of statuses */
    int8_t *statuses;
    int flags;
} kvo_entry;

typedef struct kvo_job {
    struct kvo_job *previous, *following; /* in the list of jobs that have not settled */
    struct kvo_job *behind[2];            /* in its queue, and in that of jobs to copy */
    int64_t job_id;
    int64_t deadline; /* ns */
    uint64_t generation;
    int64_t size;      /* blocks */
    int64_t next;      /* the first block that no thread has taken */
    int64_t copied;    /* staged puts: the first block that the keeper has not copied */
    int64_t count;     /* blocks that are worked on; fewer after a deadline */
    int64_t in_flight; /* blocks that threads work on */
    int op;
    int copying; /* threads that copy to or from the region now */
    int ended, late, given_up, settled;
    int taken_back; /* the call that submitted it was interrupted */
    kvo_entry is_late, end, settling;
    kvo_block *blocks; /* (size,) by slot */
    int8_t *found;     /* (size,) statuses, in order of submission; another (size,) for `end` */
} kvo_job;

typedef struct kvo_chore {
    struct kvo_chore *next;
    kvo_entry entry; /* freed with the chore: see kvo_entry_free */
    int64_t offset;
    size_t nbytes;
    int8_t status;
    uint8_t data[];
} kvo_chore;

typedef struct {
    kvo_job *first, *last;
    int link; /* which `behind` of its jobs */
} kvo_queue;

/* A thread, its work, and memory for a run. */
typedef struct {
    struct kvo_pool *pool;
    pthread_t thread;
    kvo_job *running; /* the job that it works on */
    kvo_block *run;   /* the blocks of it, adjacent in the job */
    int64_t count;    /* of these blocks */
    kvo_chore *chore; /* instead of a run */
    struct iovec *views;
    uint8_t *seals;
    int writes;
} kvo_worker;

typedef struct kvo_pool {
    kvo_region region;
    kvo_store store;
    pthread_mutex_t lock;
    pthread_cond_t work_read, work_write; /* for threads that only read, and for those that write */
    pthread_cond_t keep, idle;
    int idle_read, idle_write; /* threads that wait for each */
    kvo_queue queues[KVO_OPERATIONS];
    kvo_queue to_copy;
    kvo_chore *first_chore, *last_chore;
    int64_t chores_left;      /* those under way too */
    kvo_job *jobs, *last_job; /* those that have not settled, oldest first */
    kvo_entry *first_entry, *last_entry;
    kvo_worker *workers;
    int num_workers, num_writers;
    pthread_t keeper;
    int threads_left;
    int closing, ack_copied;
    int64_t wake_at; /* when the keeper wakes, ns */
    int signal_fd, signal_write_fd;
    uint8_t *staging; /* buffers of `store.slot_bytes` each, the caller's; NULL: direct */
    int64_t num_buffers, num_free, held_by_puts;
    int32_t *free_buffers;
} kvo_pool;

static inline int64_t kvo_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline void kvo_cond_init(pthread_cond_t *cond) {
#ifdef __APPLE__
    pthread_cond_init(cond, NULL);
#else
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
#endif
}

/* Wait until a time of kvo_now, or INT64_MAX. */
static inline void kvo_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t until) {
    struct timespec time;
    if (until == INT64_MAX) {
        pthread_cond_wait(cond, lock);
        return;
    }
#ifdef __APPLE__
    until -= kvo_now();
    until = until > 0 ? until : 0;
#endif
    time.tv_sec = (time_t)(until / 1000000000);
    time.tv_nsec = (long)(until % 1000000000);
#ifdef __APPLE__
    pthread_cond_timedwait_relative_np(cond, lock, &time);
#else
    pthread_cond_timedwait(cond, lock, &time);
#endif
}

/* -- the signal: a file descriptor that is readable while there are events --------------------- */

static inline int kvo_signal_open(kvo_pool *pool) {
#ifdef __linux__
    pool->signal_fd = pool->signal_write_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return pool->signal_fd < 0 ? -1 : 0;
#else
    int ends[2], end;
    if (pipe(ends) < 0)
        return -1;
    for (end = 0; end < 2; end++) {
        fcntl(ends[end], F_SETFD, FD_CLOEXEC);
        fcntl(ends[end], F_SETFL, O_NONBLOCK);
    }
    pool->signal_fd = ends[0];
    pool->signal_write_fd = ends[1];
    return 0;
#endif
}

static inline void kvo_signal_close(kvo_pool *pool) {
    if (pool->signal_fd < 0)
        return;
    close(pool->signal_fd);
    if (pool->signal_write_fd != pool->signal_fd)
        close(pool->signal_write_fd);
    pool->signal_fd = pool->signal_write_fd = -1;
}

static inline void kvo_signal_set(kvo_pool *pool) {
    uint64_t one = 1;
    ssize_t written;
    if (pool->signal_fd < 0)
        return;
    do
        written = write(pool->signal_write_fd, &one, sizeof one);
    while (written < 0 && errno == EINTR); /* EAGAIN: it is set */
}

static inline void kvo_signal_clear(kvo_pool *pool) {
    uint64_t seen[64];
    ssize_t got;
    if (pool->signal_fd < 0)
        return;
    do
        got = read(pool->signal_fd, seen, sizeof seen);
    while (got == (ssize_t)sizeof seen || (got < 0 && errno == EINTR));
}

/* Wait until it is set; 1 if it is. */
static inline int kvo_signal_wait(kvo_pool *pool, int64_t nanoseconds) {
    struct pollfd watched = {pool->signal_fd, POLLIN, 0};
    int64_t milliseconds = (nanoseconds + 999999) / 1000000;
    if (pool->signal_fd < 0)
        return 0;
    return poll(&watched, 1, milliseconds > INT32_MAX ? INT32_MAX : (int)milliseconds) > 0;
}

/* -- I/O --------------------------------------------------------------------------------------- */

static inline int kvo_status_of(int error) {
    return error == ENOSPC || error == EDQUOT || error == EROFS || error == EFBIG
               ? KVO_STATUS_FULL
               : KVO_STATUS_FAILED;
}

/* Read or write views at an offset, continuing after short calls; `views` is consumed.
 *
 * Returns the bytes moved, fewer than asked for only at the end of a file; -1 for an error, which
 * is in errno. */
static inline int64_t kvo_transfer(int fd, int op, struct iovec *views, int64_t num_views,
                                   int64_t offset) {
    int64_t done = 0;
    while (num_views) {
        int count = num_views < KVO_MAX_VIEWS ? (int)num_views : KVO_MAX_VIEWS;
        ssize_t moved = op == KVO_READ ? preadv(fd, views, count, (off_t)(offset + done))
                                       : pwritev(fd, views, count, (off_t)(offset + done));
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            return -1;
        done += moved;
        if (moved == 0 || (op == KVO_READ && moved % KVO_ALIGNMENT))
            break; /* the file ends here */
        while (num_views && (size_t)moved >= views->iov_len) {
            moved -= (ssize_t)views->iov_len;
            views++;
            num_views--;
        }
        if (moved) {
            views->iov_base = (uint8_t *)views->iov_base + moved;
            views->iov_len -= (size_t)moved;
        }
    }
    return done;
}

/* Write all of some bytes; 0, or an error number. */
static inline int kvo_write_all(int fd, const uint8_t *data, size_t nbytes, int64_t offset) {
    while (nbytes) {
        ssize_t moved = pwrite(fd, data, nbytes, (off_t)offset);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved <= 0)
            return moved < 0 ? errno : EIO;
        data += moved;
        offset += moved;
        nbytes -= (size_t)moved;
    }
    return 0;
}

/* Whether a directory's entry is a file of that many bytes. */
static inline int kvo_is_file(const struct stat *found, int64_t size) {
    return S_ISREG(found->st_mode) && (int64_t)found->st_size == size;
}

/* Open a file to read it, by its path of a folder and a name, below an open folder; -1, or `errno`.
 *
 * Neither a link nor a pipe is followed or waited for. One call instead of two saves a seventh
 * of a get; not every system has it. `*at` is the inner folder if that was opened, else -1. */
static inline int kvo_open_below(int folder, const char *path, int *at) {
    const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    const char *name = strchr(path, '/');
    char below[KVO_FOLDER_BYTES] = {0};
    *at = -1;
#ifdef RESOLVE_NO_SYMLINKS
    struct open_how how = {0};
    int fd;
    how.flags = (uint64_t)flags;
    how.resolve = RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH;
    fd = (int)syscall(SYS_openat2, folder, path, &how, sizeof how);
    if (fd >= 0)
        return fd;
#endif
    if (name == NULL || name - path >= KVO_FOLDER_BYTES) {
        errno = ENOENT;
        return -1;
    }
    memcpy(below, path, (size_t)(name - path));
    *at = openat(folder, below, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return *at < 0 ? -1 : openat(*at, name + 1, flags);
}

/* Read the beginning of a file of `size` bytes, by its path as in `kvo_open_below`.
 *
 * Returns the status, OK for any bytes, or the negative of an error number; `*changed` is when the
 * file was changed, in seconds. */
static inline int kvo_read_file(int folder, const char *path, uint8_t *buffer, size_t nbytes,
                                int64_t size, int64_t *changed) {
    struct iovec view = {buffer, nbytes};
    struct stat found;
    int at, fd = kvo_open_below(folder, path, &at), status = -errno;
    int64_t got;
    if (fd < 0) {
        if (status == -ENOENT || status == -ESTALE || status == -ENOTDIR ||
            (at < 0 && status == -ELOOP))
            status = KVO_STATUS_MISS;
        else if (at >= 0 && !fstatat(at, strchr(path, '/') + 1, &found, AT_SYMLINK_NOFOLLOW) &&
                 !kvo_is_file(&found, size))
            status = KVO_STATUS_CORRUPT; /* such as a link */
    }
    if (at >= 0)
        close(at);
    if (fd < 0)
        return status;
    if (fstat(fd, &found) < 0) {
        status = -errno;
    } else if (!kvo_is_file(&found, size)) {
        status = KVO_STATUS_CORRUPT;
    } else {
        *changed = (int64_t)found.st_mtime;
        got = kvo_transfer(fd, KVO_READ, &view, 1, 0);
        status = got < 0 ? -errno : got < (int64_t)nbytes ? KVO_STATUS_CORRUPT : KVO_STATUS_OK;
    }
    close(fd);
    return status;
}

static inline uint8_t *kvo_buffer(const kvo_pool *pool, const kvo_block *block) {
    return pool->staging + (int64_t)block->buffer * pool->store.slot_bytes;
}

/* The block's memory: the region's, or a buffer's; with `whole`, including the buffer's padding. */
static inline int64_t kvo_block_views(const kvo_pool *pool, const kvo_block *block, int whole,
                                      struct iovec *views) {
    if (block->buffer >= 0) {
        views->iov_base = kvo_buffer(pool, block);
        views->iov_len = (size_t)(whole ? pool->store.slot_bytes : pool->store.block_bytes);
        return 1;
    }
    kvo_region_views(&pool->region, block->id, views);
    return pool->region.num_parts;
}

static inline uint64_t kvo_block_sum(const kvo_pool *pool, const kvo_block *block,
                                     struct iovec *views) {
    int64_t num_views = kvo_block_views(pool, block, 0, views);
    return kvo_xxh3_pieces(views, (size_t)num_views, block->seed);
}

static inline int64_t kvo_run_views(const kvo_pool *pool, const kvo_block *run, int64_t count,
                                    struct iovec *views) {
    int64_t num_views = 0, index;
    for (index = 0; index < count; index++)
        num_views += kvo_block_views(pool, run + index, 1, views + num_views);
    return num_views;
}

/* Two reads of one damaged block may do this at once, with the same value. */
static inline void kvo_set_written(const kvo_store *store, int64_t first, int64_t count,
                                   uint8_t value) {
    int64_t slot;
    for (slot = first; slot < first + count; slot++)
        __atomic_store_n(store->written + slot, value, __ATOMIC_RELAXED);
}

static inline void kvo_set_sum(const kvo_store *store, int64_t slot, uint64_t sum) {
    __atomic_store_n(store->sums + slot, sum, __ATOMIC_RELAXED);
}

static inline uint64_t kvo_get_sum(const kvo_store *store, int64_t slot) {
    return __atomic_load_n(store->sums + slot, __ATOMIC_RELAXED);
}

/* Clear the seals that a run may have; 0, or an error number. */
static inline int kvo_clear_seals(const kvo_store *store, const kvo_block *run, int64_t count,
                                  uint8_t *seals) {
    int64_t first = run->slot, index;
    int error, any = 0;
    for (index = first; index < first + count; index++)
        any |= __atomic_load_n(store->written + index, __ATOMIC_RELAXED);
    if (!any)
        return 0;
    memset(seals, 0, (size_t)count * KVO_SEAL_BYTES);
    error = kvo_write_all(store->table_fd, seals, (size_t)count * KVO_SEAL_BYTES,
                          store->records_offset + first * KVO_SEAL_BYTES);
    if (!error)
        kvo_set_written(store, first, count, 0);
    return error;
}

/* Read a run in one call; a block that does not match its sum also loses its seal. 0, or an error
 * number. */
static inline int kvo_file_read(kvo_worker *worker, kvo_block *run, int64_t count) {
    const kvo_pool *pool = worker->pool;
    const kvo_store *store = &pool->store;
    int64_t num_views = kvo_run_views(pool, run, count, worker->views), index;
    int64_t got = kvo_transfer(store->data_fd, KVO_READ, worker->views, num_views,
                               run->slot * store->slot_bytes);
    if (got < 0)
        return errno;
    for (index = 0; index < count; index++) {
        kvo_block *block = run + index;
        int whole = got >= (index + 1) * store->slot_bytes;
        if (whole && kvo_block_sum(pool, block, worker->views) == kvo_get_sum(store, block->slot)) {
            block->status = KVO_STATUS_OK;
        } else {
            block->status = KVO_STATUS_CORRUPT;
            (void)kvo_clear_seals(store, block, 1, worker->seals); /* else found again */
        }
    }
    return 0;
}

/* Whether the region's blocks are the caller's again before a job has ended by itself. */
static inline int kvo_is_taken_back(kvo_pool *pool, const kvo_job *job) {
    int taken_back;
    pthread_mutex_lock(&pool->lock);
    taken_back = job->taken_back;
    pthread_mutex_unlock(&pool->lock);
    return taken_back;
}

/* Clear the seals, write the bytes, write the seals, in this order and without a sync. */
static inline int kvo_file_write(kvo_worker *worker, const kvo_job *job, kvo_block *run,
                                 int64_t count) {
    const kvo_pool *pool = worker->pool;
    const kvo_store *store = &pool->store;
    int64_t num_views, index, moved;
    int error = kvo_clear_seals(store, run, count, worker->seals);
    if (error)
        return error;
    for (index = 0; index < count; index++) {
        kvo_block *block = run + index;
        uint64_t sum = kvo_block_sum(pool, block, worker->views);
        kvo_seal_pack(worker->seals + index * KVO_SEAL_BYTES, block->key, block->key_length,
                      store->block_bytes, sum, job->generation);
        kvo_set_sum(store, block->slot, sum);
    }
    num_views = kvo_run_views(pool, run, count, worker->views);
    moved = kvo_transfer(store->data_fd, KVO_WRITE, worker->views, num_views,
                         run->slot * store->slot_bytes);
    if (moved < count * store->slot_bytes)
        return moved < 0 ? errno : EIO;
    if (kvo_is_taken_back(worker->pool, job)) {
        for (index = 0; index < count; index++)
            run[index].status = KVO_STATUS_UNAVAILABLE;
        return 0; /* the bytes may have changed between sum and write */
    }
    kvo_set_written(store, run->slot, count, 1);
    error = kvo_write_all(store->table_fd, worker->seals, (size_t)count * KVO_SEAL_BYTES,
                          store->records_offset + run->slot * KVO_SEAL_BYTES);
    for (index = 0; index < count && !error; index++)
        run[index].status = KVO_STATUS_OK;
    return error;
}

/* Copy the bytes from a second region and check the copy; repeat if the slot was written
 * meanwhile. */
static inline void kvo_memory_read(kvo_worker *worker, kvo_block *run, int64_t count) {
    const kvo_pool *pool = worker->pool;
    const kvo_store *store = &pool->store;
    const kvo_region *memory = &store->memory;
    struct iovec *target = worker->views + memory->num_parts;
    const struct timespec pause = {0, KVO_REWRITE_NS};
    int64_t index;
    for (index = 0; index < count; index++) {
        kvo_block *block = run + index;
        uint8_t *writing = store->written + block->slot;
        block->status = KVO_MOVING;
        while (block->status == KVO_MOVING) {
            int busy = __atomic_load_n(writing, __ATOMIC_ACQUIRE);
            uint64_t expected = __atomic_load_n(store->sums + block->slot, __ATOMIC_ACQUIRE);
            kvo_region_views(memory, block->slot, worker->views);
            kvo_block_views(pool, block, 0, target);
            kvo_copy(worker->views, memory->num_parts, target, NULL, NULL);
            if (kvo_block_sum(pool, block, target) == expected)
                block->status = KVO_STATUS_OK;
            else if (!busy && !__atomic_load_n(writing, __ATOMIC_ACQUIRE) &&
                     kvo_get_sum(store, block->slot) == expected)
                block->status = KVO_STATUS_CORRUPT;
            else
                nanosleep(&pause, NULL);
        }
    }
}

/* Copy the bytes to a second region and keep their sum. */
static inline void kvo_memory_write(kvo_worker *worker, kvo_block *run, int64_t count) {
    const kvo_pool *pool = worker->pool;
    const kvo_store *store = &pool->store;
    const kvo_region *memory = &store->memory;
    struct iovec *source = worker->views + memory->num_parts;
    int64_t index;
    for (index = 0; index < count; index++) {
        kvo_block *block = run + index;
        int64_t num_views = kvo_block_views(pool, block, 0, source);
        uint64_t sum;
        __atomic_store_n(store->written + block->slot, 1, __ATOMIC_SEQ_CST);
        sum = kvo_xxh3_pieces(source, (size_t)num_views, block->seed);
        kvo_region_views(memory, block->slot, worker->views);
        kvo_copy(source, num_views, worker->views, NULL, NULL);
        __atomic_store_n(store->sums + block->slot, sum, __ATOMIC_RELEASE);
        __atomic_store_n(store->written + block->slot, 0, __ATOMIC_RELEASE);
        block->status = KVO_STATUS_OK;
    }
}

/* Write the seals of a run behind the bytes of its blocks, for calls that store both. */
static inline void kvo_seal_run(const kvo_worker *worker) {
    const kvo_pool *pool = worker->pool;
    size_t nbytes = (size_t)pool->store.block_bytes;
    int64_t index;
    for (index = 0; index < worker->count; index++) {
        const kvo_block *block = worker->run + index;
        uint8_t *value = kvo_buffer(pool, block);
        kvo_seal_pack(value + nbytes, block->key, block->key_length, pool->store.block_bytes,
                      kvo_xxh3_64(value, nbytes, block->seed), worker->running->generation);
    }
}

/* Compare what calls have read with the seals behind it. */
static inline void kvo_check_run(const kvo_worker *worker) {
    const kvo_pool *pool = worker->pool;
    size_t nbytes = (size_t)pool->store.block_bytes;
    int64_t index;
    for (index = 0; index < worker->count; index++) {
        kvo_block *block = worker->run + index;
        size_t length = block->key_length < KVO_KEY_BYTES ? block->key_length : KVO_KEY_BYTES;
        const uint8_t *value = kvo_buffer(pool, block), *seal = value + nbytes;
        if (block->status != KVO_STATUS_OK)
            continue;
        if (!kvo_seal_valid(seal, pool->store.block_bytes, worker->running->generation) ||
            seal[3] != block->key_length || memcmp(seal + 8, block->key, length) != 0 ||
            kvo_little64(seal + 48) != kvo_xxh3_64(value, nbytes, block->seed))
            block->status = KVO_STATUS_CORRUPT;
    }
}

/* -- jobs, under the lock ---------------------------------------------------------------------- */

static inline int kvo_is_staged_put(const kvo_pool *pool, const kvo_job *job) {
    return pool->staging != NULL && job->op == KVO_WRITE;
}

static inline void kvo_queue_push(kvo_queue *queue, kvo_job *job) {
    job->behind[queue->link] = NULL;
    if (queue->last)
        queue->last->behind[queue->link] = job;
    else
        queue->first = job;
    queue->last = job;
}

static inline void kvo_queue_remove(kvo_queue *queue, kvo_job *job) {
    kvo_job *before = NULL, *at = queue->first;
    while (at && at != job) {
        before = at;
        at = at->behind[queue->link];
    }
    if (!at)
        return;
    if (before)
        before->behind[queue->link] = job->behind[queue->link];
    else
        queue->first = job->behind[queue->link];
    if (queue->last == job)
        queue->last = before;
}

static inline void kvo_tell(kvo_pool *pool, kvo_entry *entry) {
    entry->next = NULL;
    if (pool->last_entry)
        pool->last_entry->next = entry;
    else
        pool->first_entry = entry;
    pool->last_entry = entry;
    kvo_signal_set(pool);
}

/* Return whether every thread that could serve a job works on a late one. */
static inline int kvo_stuck(const kvo_pool *pool, int op) {
    int index, threads = op == KVO_WRITE ? pool->num_writers : pool->num_workers;
    int64_t now = kvo_now();
    for (index = 0; index < threads; index++) {
        const kvo_job *job = pool->workers[index].running;
        if (!job || job->deadline >= now)
            return 0;
    }
    return 1;
}

static inline void kvo_give_back(kvo_pool *pool, kvo_block *blocks, int64_t count, int put) {
    int64_t index;
    for (index = 0; index < count; index++) {
        pool->free_buffers[pool->num_free++] = blocks[index].buffer;
        blocks[index].buffer = -1;
    }
    if (put)
        pool->held_by_puts -= count;
}

static inline int64_t kvo_buffers_available(const kvo_pool *pool, int put) {
    int64_t left = pool->num_buffers / 2 - pool->held_by_puts;
    return put && left < pool->num_free ? left : pool->num_free;
}

/* Settle a job. */
static inline void kvo_settle(kvo_pool *pool, kvo_job *job) {
    if (job->previous)
        job->previous->following = job->following;
    else
        pool->jobs = job->following;
    if (job->following)
        job->following->previous = job->previous;
    else
        pool->last_job = job->previous;
    job->settled = 1;
    job->settling.flags = job->ended ? KVO_SETTLED : KVO_SETTLED | KVO_ENDED;
    kvo_tell(pool, &job->settling);
    pthread_cond_broadcast(&pool->idle);
}

static inline void kvo_settle_if_idle(kvo_pool *pool, kvo_job *job) {
    if (job->in_flight || job->copying || job->next < job->count)
        return;
    if (kvo_is_staged_put(pool, job) && job->copied < job->count)
        return;
    kvo_settle(pool, job);
}

/* Give the region's blocks back to the caller. */
static inline void kvo_end(kvo_pool *pool, kvo_job *job, int unfinished) {
    int64_t index;
    job->ended = 1;
    for (index = 0; index < job->size; index++)
        job->end.statuses[index] =
            (int8_t)(job->found[index] == KVO_MOVING ? unfinished : job->found[index]);
    kvo_tell(pool, &job->end);
}

/* Work on the first `count` blocks only; returns whether the job has not settled. */
static inline int kvo_drop(kvo_pool *pool, kvo_job *job, int64_t count, int status) {
    int64_t index;
    if (kvo_is_staged_put(pool, job) && job->copied > count) {
        kvo_give_back(pool, job->blocks + count, job->copied - count, 1);
        job->copied = count;
    }
    for (index = count; index < job->count; index++)
        job->found[job->blocks[index].index] = (int8_t)status;
    job->count = count;
    if (pool->staging && job->copied >= job->count)
        kvo_queue_remove(&pool->to_copy, job);
    if (job->next >= job->count)
        kvo_queue_remove(&pool->queues[job->op], job);
    kvo_settle_if_idle(pool, job);
    return !job->settled;
}

/* End a job that no thread copies: a staged one at once, a direct one when its calls return. */
static inline void kvo_give_up(kvo_pool *pool, kvo_job *job) {
    job->given_up = 1;
    if (kvo_drop(pool, job, job->next, KVO_STATUS_UNAVAILABLE) && pool->staging && !job->ended)
        kvo_end(pool, job, KVO_STATUS_UNAVAILABLE);
}

/* Wake a thread for one kind of work; all but writes may also wake a thread that writes. */
static inline void kvo_wake(kvo_pool *pool, int op) {
    if (op != KVO_WRITE && pool->idle_read)
        pthread_cond_signal(&pool->work_read);
    else if (pool->idle_write)
        pthread_cond_signal(&pool->work_write);
}

/* The most blocks of a job that move in one call: each thread gets two runs of a large job, so that
 * the sums of one are computed while the bytes of the other move. */
static inline int64_t kvo_run_blocks(const kvo_pool *pool, const kvo_job *job) {
    const kvo_store *store = &pool->store;
    int64_t each = store->slot_bytes, most = job->size * each / (2 * pool->num_workers);
    if (job->op == KVO_QUERY)
        return store->keys_per_query;
    most = most < KVO_SHORT_RUN ? KVO_SHORT_RUN : most > KVO_RUN_BYTES ? KVO_RUN_BYTES : most;
    most = most / each > KVO_RUN_BLOCKS ? KVO_RUN_BLOCKS : most / each;
    if (store->kind == KVO_CALLS) { /* no thread is idle while another has several blocks */
        int threads = job->op == KVO_WRITE ? pool->num_writers : pool->num_workers;
        int64_t each_thread = (job->size + threads - 1) / threads;
        most = most < store->blocks_per_call ? most : store->blocks_per_call;
        most = most < each_thread ? most : each_thread;
    }
    return most > 1 ? most : 1;
}

/* Whether a block moves in one call with the one before. */
static inline int kvo_is_adjacent(const kvo_pool *pool, const kvo_block *run, int64_t index) {
    return pool->store.kind == KVO_CALLS || (run[index].slot == run[index - 1].slot + 1 &&
                                             (index + 1) * pool->region.num_parts <= KVO_MAX_VIEWS);
}

/* Whether a run could be taken. */
static inline int kvo_has_run(const kvo_pool *pool, int op) {
    const kvo_job *job = pool->queues[op].first;
    if (!job)
        return 0;
    if (op == KVO_WRITE && pool->chores_left)
        return 0;
    if (pool->staging && op == KVO_WRITE)
        return job->next < job->copied;
    return op == KVO_QUERY || !pool->staging || pool->num_free > 0;
}

/* Take a run from the front of a queue; 0 if there is none. */
static inline int kvo_take(kvo_worker *worker, int op) {
    kvo_pool *pool = worker->pool;
    kvo_job *job = pool->queues[op].first;
    kvo_block *run;
    int64_t stop, count = 1, index, most;
    if (!kvo_has_run(pool, op))
        return 0;
    most = kvo_run_blocks(pool, job);
    stop = kvo_is_staged_put(pool, job) ? job->copied : job->count;
    if (pool->staging && op == KVO_READ && stop - job->next > pool->num_free)
        stop = job->next + pool->num_free;
    run = job->blocks + job->next;
    while (job->next + count < stop && count < most && kvo_is_adjacent(pool, run, count))
        count++;
    if (pool->staging && op == KVO_READ)
        for (index = 0; index < count; index++)
            run[index].buffer = pool->free_buffers[--pool->num_free];
    job->next += count;
    job->in_flight += count;
    if (job->next == job->count)
        kvo_queue_remove(&pool->queues[op], job);
    worker->running = job;
    worker->run = run;
    worker->count = count;
    if (kvo_has_run(pool, op))
        kvo_wake(pool, op);
    return 1;
}

static inline int kvo_take_chore(kvo_worker *worker) {
    kvo_pool *pool = worker->pool;
    worker->chore = pool->first_chore;
    if (!worker->chore)
        return 0;
    pool->first_chore = worker->chore->next;
    if (!pool->first_chore)
        pool->last_chore = NULL;
    return 1;
}

/* -- threads ----------------------------------------------------------------------------------- */

/* Move some blocks of a run; 0, or an error number. */
static inline int kvo_move_blocks(kvo_worker *worker, const kvo_job *job, kvo_block *run,
                                  int64_t count) {
    if (worker->pool->store.kind == KVO_FILE)
        return job->op == KVO_READ ? kvo_file_read(worker, run, count)
                                   : kvo_file_write(worker, job, run, count);
    if (job->op == KVO_READ)
        kvo_memory_read(worker, run, count);
    else
        kvo_memory_write(worker, run, count);
    return 0;
}

/* End the jobs whose deadline has passed; report those whose blocks the kernel has as late. */
static inline void kvo_expire(kvo_pool *pool) {
    int64_t now = kvo_now();
    kvo_job *job, *following;
    pool->wake_at = INT64_MAX;
    for (job = pool->jobs; job; job = following) {
        int staged_put = kvo_is_staged_put(pool, job);
        following = job->following;
        if (job->ended || job->late)
            continue;
        if (job->deadline > now) {
            if (job->deadline < pool->wake_at)
                pool->wake_at = job->deadline;
            continue;
        }
        if (job->copying)
            continue; /* the copying thread ends it */
        if (!kvo_drop(pool, job, staged_put ? job->copied : job->next, KVO_STATUS_TIMEOUT))
            continue;
        if (pool->staging) {
            kvo_end(pool, job, staged_put && pool->ack_copied ? KVO_STATUS_OK : KVO_STATUS_TIMEOUT);
        } else {
            job->late = 1;
            kvo_tell(pool, &job->is_late);
        }
    }
}

/* Whether a copy from or to the region must end because its job is over. */
static inline int kvo_is_over(kvo_pool *pool, const kvo_job *job) {
    return job->taken_back || pool->closing || kvo_now() >= job->deadline;
}

/* End overdue jobs while one is copied; return whether its copy must stop. */
static int kvo_must_stop(kvo_pool *pool, const kvo_job *job) {
    int is_over;
    pthread_mutex_lock(&pool->lock);
    if (kvo_now() >= pool->wake_at)
        kvo_expire(pool);
    is_over = kvo_is_over(pool, job);
    pthread_mutex_unlock(&pool->lock);
    return is_over;
}

/* Copy blocks from buffers to the region; 0 if their job has ended. */
static inline int kvo_deliver(kvo_worker *worker, kvo_job *job, kvo_block *run, int64_t count) {
    kvo_pool *pool = worker->pool;
    struct iovec source;
    int64_t index;
    pthread_mutex_lock(&pool->lock);
    if (job->ended || kvo_is_over(pool, job)) {
        pthread_mutex_unlock(&pool->lock);
        return 0;
    }
    job->copying++;
    pthread_mutex_unlock(&pool->lock);
    for (index = 0; index < count; index++) {
        if (run[index].status == KVO_STATUS_OK) {
            if (kvo_now() >= job->deadline) {
                run[index].status = KVO_STATUS_TIMEOUT;
                continue;
            }
            kvo_block_views(pool, run + index, 0, &source);
            kvo_region_views(&pool->region, run[index].id, worker->views);
            if (!kvo_copy(&source, 1, worker->views, pool, job))
                run[index].status = KVO_STATUS_TIMEOUT;
        }
    }
    pthread_mutex_lock(&pool->lock);
    job->copying--;
    pool->wake_at = pool->wake_at < job->deadline ? pool->wake_at : job->deadline;
    pthread_cond_signal(&pool->keep);
    pthread_cond_broadcast(&pool->idle);
    pthread_mutex_unlock(&pool->lock);
    return 1;
}

/* Wait for a run or a chore, reads and queries first; 0 if the pool closes and the thread must end.
 */
static inline int kvo_next(kvo_worker *worker) {
    kvo_pool *pool = worker->pool;
    int found;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        worker->chore = NULL;
        found = kvo_take(worker, KVO_QUERY) || kvo_take(worker, KVO_READ) ||
                (worker->writes && (kvo_take_chore(worker) || kvo_take(worker, KVO_WRITE)));
        if (found || pool->closing)
            break;
        if (worker->writes) {
            pool->idle_write++;
            pthread_cond_wait(&pool->work_write, &pool->lock);
            pool->idle_write--;
        } else {
            pool->idle_read++;
            pthread_cond_wait(&pool->work_read, &pool->lock);
            pool->idle_read--;
        }
    }
    if (!found) {
        pool->threads_left--;
        pthread_cond_broadcast(&pool->idle);
    }
    pthread_mutex_unlock(&pool->lock);
    if (found && !worker->chore && pool->store.kind == KVO_CALLS &&
        worker->running->op == KVO_WRITE)
        kvo_seal_run(worker);
    return found;
}

/* Move a run. */
static inline void kvo_move(kvo_worker *worker) {
    kvo_job *job = worker->running;
    kvo_block *run = worker->run;
    int64_t count = worker->count, index;
    int error = kvo_move_blocks(worker, job, run, count);
    for (index = 0; error && index < count; index++) { /* a bad block does not affect the others */
        int alone = count == 1 ? error : kvo_move_blocks(worker, job, run + index, 1);
        if (alone)
            run[index].status = (int8_t)kvo_status_of(alone);
    }
}

/* Account for a run whose blocks have their statuses. */
static inline void kvo_run_done(kvo_worker *worker) {
    kvo_pool *pool = worker->pool;
    kvo_job *job = worker->running;
    kvo_block *run = worker->run;
    int64_t count = worker->count, index;
    int delivered = 1;
    if (pool->store.kind == KVO_CALLS && job->op == KVO_READ)
        kvo_check_run(worker);
    if (pool->staging && job->op == KVO_READ)
        delivered = kvo_deliver(worker, job, run, count);
    pthread_mutex_lock(&pool->lock);
    for (index = 0; index < count; index++) {
        int lost = run[index].status == KVO_STATUS_OK && !delivered;
        int void_put = job->taken_back && job->op == KVO_WRITE && pool->store.kind == KVO_MEMORY;
        job->found[run[index].index] = (int8_t)(lost       ? KVO_STATUS_TIMEOUT
                                                : void_put ? KVO_STATUS_UNAVAILABLE
                                                           : run[index].status);
    }
    job->in_flight -= count;
    if (pool->staging && job->op != KVO_QUERY) {
        kvo_give_back(pool, run, count, job->op == KVO_WRITE);
        if (kvo_has_run(pool, KVO_READ))
            kvo_wake(pool, KVO_READ);
        pthread_cond_signal(&pool->keep);
    }
    worker->running = NULL;
    kvo_settle_if_idle(pool, job);
    pthread_mutex_unlock(&pool->lock);
}

/* Account for a chore that has its status. */
static inline void kvo_chore_done(kvo_worker *worker) {
    kvo_pool *pool = worker->pool;
    pthread_mutex_lock(&pool->lock);
    pool->chores_left--;
    kvo_tell(pool, &worker->chore->entry);
    pthread_cond_broadcast(&pool->idle);
    if (kvo_has_run(pool, KVO_WRITE))
        kvo_wake(pool, KVO_WRITE);
    pthread_mutex_unlock(&pool->lock);
}

static inline void kvo_done(kvo_worker *worker) {
    if (worker->chore)
        kvo_chore_done(worker);
    else
        kvo_run_done(worker);
}

/* Serve runs and chores of files and memory until the pool closes. */
static void *kvo_serve(void *argument) {
    kvo_worker *worker = argument;
    while (kvo_next(worker)) {
        kvo_chore *chore = worker->chore;
        if (chore) {
            int table_fd = worker->pool->store.table_fd;
            int error = kvo_write_all(table_fd, chore->data, chore->nbytes, chore->offset);
            chore->status = (int8_t)(error ? kvo_status_of(error) : KVO_STATUS_OK);
        } else {
            kvo_move(worker);
        }
        kvo_done(worker);
    }
    return NULL;
}

/* -- the keeper -------------------------------------------------------------------------------- */

/* Copy blocks of the first staged put; 0 if there is none, or no buffer. */
static inline int kvo_copy_some(kvo_pool *pool, struct iovec *views) {
    kvo_job *job = pool->to_copy.first;
    int64_t most = KVO_SLICE_BYTES / pool->store.slot_bytes, available, index, copied = 0;
    struct iovec target;
    kvo_block *blocks;
    if (!job)
        return 0;
    most = most > 1 ? most : 1;
    most = most < job->count - job->copied ? most : job->count - job->copied;
    available = kvo_buffers_available(pool, 1);
    most = most < available ? most : available;
    if (most <= 0)
        return 0;
    blocks = job->blocks + job->copied;
    for (index = 0; index < most; index++)
        blocks[index].buffer = pool->free_buffers[--pool->num_free];
    pool->held_by_puts += most;
    job->copying++;
    pthread_mutex_unlock(&pool->lock);
    for (copied = 0; copied < most; copied++) {
        kvo_block_views(pool, blocks + copied, 0, &target);
        kvo_region_views(&pool->region, blocks[copied].id, views);
        if (!kvo_copy(views, pool->region.num_parts, &target, pool, job))
            break;
    }
    pthread_mutex_lock(&pool->lock);
    job->copying--;
    if (pool->closing || job->taken_back)
        copied = 0;
    kvo_give_back(pool, blocks + copied, most - copied, 1);
    if (copied) {
        if (job->copied == 0)
            kvo_queue_push(&pool->queues[KVO_WRITE], job);
        job->copied += copied;
        kvo_wake(pool, KVO_WRITE);
    }
    if (job->copied == job->count) {
        kvo_queue_remove(&pool->to_copy, job);
        if (pool->ack_copied)
            kvo_end(pool, job, KVO_STATUS_OK);
    }
    pool->wake_at = pool->wake_at < job->deadline ? pool->wake_at : job->deadline;
    kvo_settle_if_idle(pool, job);
    pthread_cond_broadcast(&pool->idle);
    return 1;
}

/* End jobs at their deadlines, and copy staged puts, until the pool closes. */
static void *kvo_keep_watch(void *argument) {
    kvo_pool *pool = argument;
    /* One worker more than there are threads: the keeper's own views. */
    struct iovec *views = pool->workers[pool->num_workers].views;
    pthread_mutex_lock(&pool->lock);
    while (!pool->closing) {
        if (kvo_now() >= pool->wake_at)
            kvo_expire(pool);
        else if (!kvo_copy_some(pool, views))
            kvo_cond_wait(&pool->keep, &pool->lock, pool->wake_at);
    }
    pool->threads_left--;
    pthread_cond_broadcast(&pool->idle);
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* -- the caller's side ------------------------------------------------------------------------- */

static inline void kvo_job_free(kvo_job *job) {
    free(job->blocks);
    free(job->found);
    free(job);
}

/* Free an entry that was read. */
static inline void kvo_entry_free(kvo_entry *entry) {
    if (entry->job == NULL)
        free((uint8_t *)entry - offsetof(kvo_chore, entry));
    else if (entry->flags & KVO_SETTLED)
        kvo_job_free(entry->job); /* this was its last entry */
}

/* Make a job of `size` >= 1 blocks; the caller fills them in. NULL if there is no memory. */
static inline kvo_job *kvo_job_new(int64_t job_id, int op, int64_t size, int64_t timeout_ns,
                                   uint64_t generation) {
    kvo_job *job = calloc(1, sizeof(kvo_job));
    kvo_entry *entries[3];
    int entry;
    if (!job)
        return NULL;
    job->blocks = malloc((size_t)size * sizeof(kvo_block));
    job->found = malloc((size_t)size * 2);
    if (!job->blocks || !job->found) {
        kvo_job_free(job);
        return NULL;
    }
    memset(job->found, KVO_MOVING, (size_t)size);
    job->job_id = job_id;
    job->op = op;
    job->size = job->count = size;
    job->deadline = kvo_now() + timeout_ns;
    job->generation = generation;
    entries[0] = &job->is_late;
    entries[1] = &job->end;
    entries[2] = &job->settling;
    for (entry = 0; entry < 3; entry++) {
        entries[entry]->job = job;
        entries[entry]->job_id = job_id;
        entries[entry]->count = entry ? size : 0;
    }
    job->is_late.flags = KVO_LATE;
    job->end.flags = KVO_ENDED;
    job->end.statuses = job->found + size;
    job->settling.statuses = job->found;
    return job;
}

static inline int kvo_by_slot(const void *left, const void *right) {
    int64_t a = ((const kvo_block *)left)->slot, b = ((const kvo_block *)right)->slot;
    return (a > b) - (a < b);
}

/* Take a job whose blocks are filled in. */
static inline void kvo_submit(kvo_pool *pool, kvo_job *job) {
    int64_t index;
    for (index = 1; index < job->size; index++) {
        if (job->blocks[index - 1].slot > job->blocks[index].slot) {
            qsort(job->blocks, (size_t)job->size, sizeof(kvo_block), kvo_by_slot);
            break;
        }
    }
    pthread_mutex_lock(&pool->lock);
    job->previous = pool->last_job;
    if (pool->last_job)
        pool->last_job->following = job;
    else
        pool->jobs = job;
    pool->last_job = job;
    if (pool->closing || kvo_stuck(pool, job->op)) {
        (void)kvo_drop(pool, job, 0, KVO_STATUS_UNAVAILABLE);
    } else {
        if (kvo_is_staged_put(pool, job)) {
            kvo_queue_push(&pool->to_copy, job);
            pthread_cond_signal(&pool->keep);
        } else {
            kvo_queue_push(&pool->queues[job->op], job);
            kvo_wake(pool, job->op);
        }
        if (job->deadline < pool->wake_at) {
            pool->wake_at = job->deadline;
            pthread_cond_signal(&pool->keep);
        }
    }
    pthread_mutex_unlock(&pool->lock);
}

/* Take a job back; unfinished blocks are UNAVAILABLE.
 *
 * 0 if the pool does not have it; 2 if a direct read goes on at `until`, before its deadline. */
static inline int kvo_cancel(kvo_pool *pool, int64_t job_id, int64_t until) {
    kvo_job *job;
    int found = 0;
    pthread_mutex_lock(&pool->lock);
    job = pool->jobs;
    while (job && job->job_id != job_id)
        job = job->following;
    if (job) {
        found = 1;
        job->taken_back = 1;
        if (pool->staging)
            kvo_queue_remove(&pool->to_copy, job);
        while (job->copying)
            kvo_cond_wait(&pool->idle, &pool->lock, INT64_MAX);
        if (!job->settled && !job->ended)
            kvo_give_up(pool, job);
        while (!job->settled && !pool->staging && job->op == KVO_READ &&
               kvo_now() < job->deadline) {
            if (kvo_now() >= until) {
                found = 2;
                break;
            }
            kvo_cond_wait(&pool->idle, &pool->lock, until < job->deadline ? until : job->deadline);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return found;
}

/* Write bytes to the table, in a thread; -1 if there is no memory. */
static inline int kvo_submit_chore(kvo_pool *pool, int64_t job_id, int64_t offset,
                                   const uint8_t *data, size_t nbytes) {
    kvo_chore *chore = calloc(1, sizeof(kvo_chore) + nbytes);
    if (!chore)
        return -1;
    chore->entry.job_id = job_id;
    chore->entry.flags = KVO_CHORE;
    chore->entry.count = 1;
    chore->entry.statuses = &chore->status;
    chore->offset = offset;
    chore->nbytes = nbytes;
    memcpy(chore->data, data, nbytes);
    pthread_mutex_lock(&pool->lock);
    if (pool->closing) {
        chore->status = KVO_STATUS_UNAVAILABLE;
        kvo_tell(pool, &chore->entry);
    } else {
        if (pool->last_chore)
            pool->last_chore->next = chore;
        else
            pool->first_chore = chore;
        pool->last_chore = chore;
        pool->chores_left++;
        kvo_wake(pool, KVO_WRITE);
    }
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

/* Take all events, oldest first; the caller frees each with kvo_entry_free. */
static inline kvo_entry *kvo_poll(kvo_pool *pool) {
    kvo_entry *entries;
    pthread_mutex_lock(&pool->lock);
    kvo_signal_clear(pool);
    entries = pool->first_entry;
    pool->first_entry = pool->last_entry = NULL;
    pthread_mutex_unlock(&pool->lock);
    return entries;
}

/* Count the jobs past their deadline that threads work on, and the buffers in use. */
static inline void kvo_pool_stats(kvo_pool *pool, int64_t *late_jobs, int64_t *staging_bytes) {
    int64_t now = kvo_now();
    kvo_job *job;
    *late_jobs = 0;
    pthread_mutex_lock(&pool->lock);
    for (job = pool->jobs; job; job = job->following)
        *late_jobs += job->in_flight > 0 && job->deadline < now;
    *staging_bytes = (pool->num_buffers - pool->num_free) * pool->store.slot_bytes;
    pthread_mutex_unlock(&pool->lock);
}

/* -- a pool's life ----------------------------------------------------------------------------- */

/* Free the memory of a pool without threads. */
static inline void kvo_pool_free(kvo_pool *pool) {
    int index;
    kvo_entry *entry, *next;
    for (entry = pool->first_entry; entry; entry = next) {
        next = entry->next;
        kvo_entry_free(entry);
    }
    for (index = 0; pool->workers && index <= pool->num_workers; index++) {
        free(pool->workers[index].views);
        free(pool->workers[index].seals);
    }
    free(pool->workers);
    free(pool->free_buffers);
    free(pool->region.parts);
    free(pool->store.memory.parts);
    kvo_signal_close(pool);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->work_read);
    pthread_cond_destroy(&pool->work_write);
    pthread_cond_destroy(&pool->keep);
    pthread_cond_destroy(&pool->idle);
    free(pool);
}

/* Wait until nothing is under way, or a time; 1 if nothing is. */
static inline int kvo_pool_rest(kvo_pool *pool, int64_t until) {
    int rests;
    pthread_mutex_lock(&pool->lock);
    while ((pool->jobs || pool->chores_left) && !pool->closing && kvo_now() < until)
        kvo_cond_wait(&pool->idle, &pool->lock, until);
    rests = pool->closing || (!pool->jobs && !pool->chores_left);
    pthread_mutex_unlock(&pool->lock);
    return rests;
}

/* Tell the threads to end; what has not started is UNAVAILABLE. Returns the time that they have. */
static inline int64_t kvo_pool_stop(kvo_pool *pool, int64_t until) {
    int64_t now = kvo_now(), grace = now + KVO_GRACE_NS;
    kvo_job *job, *following;
    kvo_chore *chore;
    int index;
    pthread_mutex_lock(&pool->lock);
    pool->closing = 1;
    while ((chore = pool->first_chore) != NULL) {
        pool->first_chore = chore->next;
        chore->status = KVO_STATUS_UNAVAILABLE;
        kvo_tell(pool, &chore->entry);
    }
    pool->last_chore = NULL;
    for (job = pool->jobs; job; job = following) {
        following = job->following;
        if (job->copying) { /* the list may change meanwhile: begin again */
            kvo_cond_wait(&pool->idle, &pool->lock, INT64_MAX);
            following = pool->jobs;
        } else if (!job->given_up) {
            kvo_give_up(pool, job);
        }
    }
    pthread_cond_broadcast(&pool->work_read);
    pthread_cond_broadcast(&pool->work_write);
    pthread_cond_broadcast(&pool->keep);
    for (index = 0; index < pool->num_workers; index++)
        if (pool->workers[index].running && pool->workers[index].running->deadline <= now)
            grace = now + KVO_LATE_GRACE_NS;
    pthread_mutex_unlock(&pool->lock);
    return until > grace ? until : grace;
}

/* Wait until the threads have ended, or a time; 1 if they have. */
static inline int kvo_pool_ended(kvo_pool *pool, int64_t until) {
    int ended;
    pthread_mutex_lock(&pool->lock);
    while (pool->threads_left && kvo_now() < until)
        kvo_cond_wait(&pool->idle, &pool->lock, until);
    ended = pool->threads_left == 0;
    pthread_mutex_unlock(&pool->lock);
    return ended;
}

/* Join the threads that the pool has started, which have ended. */
static inline void kvo_pool_join(kvo_pool *pool) {
    int index, count = pool->store.kind == KVO_CALLS ? 0 : pool->num_workers;
    for (index = 0; index < count; index++)
        pthread_join(pool->workers[index].thread, NULL);
    pthread_join(pool->keeper, NULL);
}

/* Count threads that could not be started. */
static inline void kvo_pool_lacks(kvo_pool *pool, int count) {
    pthread_mutex_lock(&pool->lock);
    pool->threads_left -= count;
    pthread_mutex_unlock(&pool->lock);
}

/* Make a pool and start its keeper and, unless calls are made in Python, its threads. `region` and
 * `store` are copied; the memory, the `num_buffers` buffers at `staging`, the files, `sums` and
 * `written` that they name stay the caller's. NULL if there is no memory or no thread. */
static inline kvo_pool *kvo_pool_new(const kvo_region *region, const kvo_store *store, int threads,
                                     uint8_t *staging, int64_t num_buffers, int ack_copied) {
    kvo_pool *pool = calloc(1, sizeof(kvo_pool));
    int64_t parts = region->num_parts + (store->kind == KVO_MEMORY ? store->memory.num_parts : 0);
    int64_t run_blocks = KVO_RUN_BYTES / store->slot_bytes, views, buffer;
    int index, started = 0, all, own = store->kind == KVO_CALLS ? 0 : threads;
    pthread_attr_t attributes;
    sigset_t every, before;
    if (!pool)
        return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    kvo_cond_init(&pool->work_read);
    kvo_cond_init(&pool->work_write);
    kvo_cond_init(&pool->keep);
    kvo_cond_init(&pool->idle);
    pool->store = *store;
    pool->store.memory.parts = NULL;
    pool->region = *region;
    pool->region.parts = malloc((size_t)region->num_parts * sizeof(kvo_part));
    pool->to_copy.link = 1; /* a staged put is in both queues while it is copied */
    pool->ack_copied = ack_copied;
    pool->wake_at = INT64_MAX;
    pool->num_writers = threads > KVO_READ_ONLY_THREADS + 1 ? threads - KVO_READ_ONLY_THREADS : 1;
    pool->signal_fd = -1;
    pool->workers = calloc((size_t)threads + 1, sizeof(kvo_worker));
    if (!pool->region.parts || !pool->workers || kvo_signal_open(pool) < 0)
        goto failed;
    memcpy(pool->region.parts, region->parts, (size_t)region->num_parts * sizeof(kvo_part));
    if (store->kind == KVO_MEMORY) {
        size_t nbytes = (size_t)store->memory.num_parts * sizeof(kvo_part);
        pool->store.memory.parts = malloc(nbytes);
        if (!pool->store.memory.parts)
            goto failed;
        memcpy(pool->store.memory.parts, store->memory.parts, nbytes);
    }
    if (!store->direct) {
        pool->staging = staging;
        pool->num_buffers = num_buffers;
        pool->free_buffers = malloc((size_t)num_buffers * sizeof(int32_t));
        if (!pool->free_buffers)
            goto failed;
        for (buffer = 0; buffer < pool->num_buffers; buffer++)
            pool->free_buffers[pool->num_free++] = (int32_t)(pool->num_buffers - 1 - buffer);
    }
    run_blocks = run_blocks < 1 ? 1 : run_blocks > KVO_RUN_BLOCKS ? KVO_RUN_BLOCKS : run_blocks;
    views = store->direct ? parts : 1; /* of a block */
    views = run_blocks * views < KVO_MAX_VIEWS ? run_blocks * views : KVO_MAX_VIEWS;
    views = views > parts + 1 ? views : parts + 1; /* one block's, and a copy's other side */
    pool->num_workers = threads;
    for (index = 0; index <= threads; index++) {
        kvo_worker *worker = pool->workers + index;
        worker->pool = pool;
        worker->writes = index < pool->num_writers;
        worker->views = malloc((size_t)views * sizeof(struct iovec));
        if (store->kind == KVO_FILE)
            worker->seals = malloc((size_t)run_blocks * KVO_SEAL_BYTES);
        if (!worker->views || (store->kind == KVO_FILE && !worker->seals))
            goto failed;
    }
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, KVO_THREAD_STACK);
    sigfillset(&every); /* signals are for the interpreter's threads */
    pthread_sigmask(SIG_SETMASK, &every, &before);
    pthread_mutex_lock(&pool->lock);
    for (; started < own; started++)
        if (pthread_create(&pool->workers[started].thread, &attributes, kvo_serve,
                           pool->workers + started))
            break;
    all = started == own && pthread_create(&pool->keeper, &attributes, kvo_keep_watch, pool) == 0;
    pool->threads_left = all ? threads + 1 : started;
    pool->closing = !all;
    pthread_mutex_unlock(&pool->lock);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (all)
        return pool;
    for (index = 0; index < started; index++)
        pthread_join(pool->workers[index].thread, NULL);
failed:
    kvo_pool_free(pool);
    return NULL;
}

#endif
