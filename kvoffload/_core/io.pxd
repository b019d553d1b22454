"""Declarations of ``io.h`` for ``io.pyx``: the sum, the seals and the pool of threads."""

from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint64_t

cdef extern from "io.h" nogil:
    enum:
        KVO_SEAL_BYTES
        KVO_KEY_BYTES
        KVO_DIGESTED_BYTES
        KVO_STATUS_OK
        KVO_STATUS_FAILED
        KVO_QUERY
        KVO_MEMORY
        KVO_FILE
        KVO_CALLS

    ctypedef struct kvo_part:
        int64_t offset, stride, nbytes

    ctypedef struct kvo_region:
        uint8_t* base
        kvo_part* parts
        int64_t num_parts
        int64_t block_bytes

    ctypedef struct kvo_store:
        int kind
        int direct
        int data_fd, table_fd
        int64_t block_bytes
        int64_t slot_bytes
        int64_t blocks_per_call, keys_per_query
        int64_t records_offset
        uint8_t* written
        uint64_t* sums
        kvo_region memory
        uint8_t fingerprint[64]
        size_t fingerprint_bytes

    ctypedef struct kvo_block:
        int64_t slot, id
        uint64_t seed
        int32_t index
        int32_t buffer
        int8_t status
        uint8_t key_length
        uint8_t key[41]

    ctypedef struct kvo_job:
        kvo_block* blocks
        int64_t deadline
        uint64_t generation
        int op

    ctypedef struct kvo_chore:
        int64_t offset
        size_t nbytes
        int8_t status
        uint8_t* data

    ctypedef struct kvo_worker:
        kvo_job* running
        kvo_block* run
        int64_t count
        kvo_chore* chore

    ctypedef struct kvo_entry:
        kvo_entry* next
        int64_t job_id
        int64_t count
        int8_t* statuses
        int flags

    ctypedef struct kvo_pool:
        int signal_fd
        kvo_worker* workers

    uint64_t kvo_xxh3_64(const uint8_t* data, size_t length, uint64_t seed)
    uint64_t kvo_little64(const uint8_t* data)
    uint64_t kvo_seed(const kvo_store* store, const uint8_t* key, size_t length)
    bint kvo_seal_valid(const uint8_t* seal, int64_t nbytes, uint64_t generation)
    int kvo_read_file(
        int folder, const char* path, uint8_t* buffer, size_t nbytes, int64_t size,
        int64_t* changed
    )
    kvo_pool* kvo_pool_new(
        const kvo_region* region, const kvo_store* store, int threads, uint8_t* staging,
        int64_t num_buffers, int ack_copied
    )
    bint kvo_next(kvo_worker* worker)
    void kvo_done(kvo_worker* worker)
    void kvo_pool_lacks(kvo_pool* pool, int count)
    int64_t kvo_now()
    bint kvo_pool_rest(kvo_pool* pool, int64_t until)
    int64_t kvo_pool_stop(kvo_pool* pool, int64_t until)
    bint kvo_pool_ended(kvo_pool* pool, int64_t until)
    void kvo_pool_join(kvo_pool* pool)
    void kvo_pool_free(kvo_pool* pool)
    void kvo_pool_stats(kvo_pool* pool, int64_t* late_jobs, int64_t* staging_bytes)
    kvo_job* kvo_job_new(int64_t job_id, int op, int64_t size, int64_t timeout_ns, uint64_t generation)
    void kvo_submit(kvo_pool* pool, kvo_job* job)
    int kvo_cancel(kvo_pool* pool, int64_t job_id, int64_t until)
    int kvo_submit_chore(
        kvo_pool* pool, int64_t job_id, int64_t offset, const uint8_t* data, size_t nbytes
    )
    kvo_entry* kvo_poll(kvo_pool* pool)
    void kvo_entry_free(kvo_entry* entry)
    void kvo_signal_set(kvo_pool* pool)
    void kvo_signal_close(kvo_pool* pool)
    bint kvo_signal_wait(kvo_pool* pool, int64_t nanoseconds)
