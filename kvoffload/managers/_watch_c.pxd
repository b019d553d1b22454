"""Observation of a compiled manager; see ``_watch_py`` for the Python twin."""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.shadow cimport Entry, Shadow
from kvoffload._core.table cimport Node, Storage, Table
from kvoffload.policies._twin_c cimport MOST_SOURCES, CompiledPolicy

cdef enum:
    BINS = 256
    MOST_CAUSES = 8

cdef enum:
    LOAD = 0
    STORE = 1

# The last fate of a block, and causes that are not fates; as in ``_watching``.
cdef enum:
    FATE_UNKNOWN = 0
    FATE_STORED = 1
    FATE_EVICTED = 2
    FATE_DECLINED = 3
    FATE_REFUSED = 4
    FATE_FAILED = 5
    FATE_RESET = 6

cdef enum:
    BROKEN_PREFIX = 0
    PENDING = 1
    NEVER_OR_LONG_AGO = 7

cdef enum:
    DRAIN_KEYS = 256        # sampled keys, and requests, after which a watch takes them
    MOST_KEYS = 1 << 14     # most that are collected if no lookup lets it take them

# The position of a request's key relative to those that it asked for.
cdef enum:
    BEFORE = 0              # the device had it
    ASKED = 1
    BEHIND = 2              # generated, or of a group that is not judged

cdef enum:
    # In place of a request's first key, as in ``_watching``.
    FINISHED = -1
    RELEASED = -2

# The sampled keys of a request that belong to one quarter.
cdef struct CollectedRequest:
    uint32_t quarter
    int32_t event           # 0, FINISHED or RELEASED
    uint32_t told           # place of what its client said, from 1 on; 0: nothing
    uint32_t stretch        # resets before it since the last take; consecutive ones count as one
    uint32_t num_keys
    uint32_t first          # of the keys that it asked for
    uint32_t end            # and behind the last of them

cdef struct WatchCounts:
    uint64_t requests
    uint64_t asked
    uint64_t missed
    uint64_t met_pending                    # requests whose first miss was a block being stored
    uint64_t stored
    uint64_t evicted
    uint64_t declined
    uint64_t refused
    uint64_t failed
    uint64_t resets
    uint64_t untracked                      # transfers that found no room in the ledger
    uint64_t tail_missed_tokens             # of an integration whose engine has several KV groups
    uint64_t causes[MOST_CAUSES]
    uint64_t evicted_used[2]
    uint64_t long_requests[13]              # by size: requests longer than it
    uint64_t fullest[13]                    # by size: most sampled blocks that it held at a reset
    uint64_t hints[MOST_SOURCES + 1][2]     # by source: ends, expectations; others last
    uint64_t judged[4][14]                  # by quarter: sampled blocks by segment; not listed last
    uint64_t policy_judged[4][14]           # those of the policies' part of the sample
    uint64_t unused_ages[BINS]
    uint64_t stored_ages[BINS]

# An open transfer. Those with the same `first` form a chain; all are in the order of opening.
cdef struct Transfer:
    uint64_t serial
    uint64_t time           # ms
    uint32_t kind           # LOAD, STORE
    uint32_t size           # blocks
    uint64_t request        # number of requests at the time
    int32_t first           # ids, or a sum of them, by which it is found again
    int32_t last
    uint32_t older          # transfer opened before this one
    uint32_t newer          # and after; free: the next free one
    uint32_t chain          # next of the same chain, older
    int32_t* block_ids


cdef class WatchCore:
    cdef readonly object watch
    cdef public bint due
    cdef public uint64_t next_due           # ms
    cdef CompiledPolicy policy
    cdef Storage storage                    # of the table; the policy may be initialised again
    cdef Table* table
    cdef Shadow shadow
    cdef WatchCounts tally
    cdef uint32_t sample_below
    cdef uint32_t policy_below
    cdef uint32_t keeps_below               # policy_below, 0 if no keys are kept
    cdef readonly bint hears_releases       # since the first
    cdef bint hears_returns                 # since the first hint of one: times are kept
    cdef object hints                       # of the request at work, None for none
    cdef double moment                      # its time in seconds, NaN if it gave none
    cdef double latest                      # that of the last collected request
    cdef list told                          # (hints, seconds) of the collected requests
    cdef int num_quarters
    cdef int num_sizes
    cdef uint64_t lengths[13]
    cdef object clock
    cdef bytes secret
    cdef int64_t start                      # ms
    cdef int64_t present                    # ms: when the clock was last read
    cdef dict source_numbers                # of distinct sources of hints
    cdef list keys                          # by quarter, those of its collected requests
    cdef CollectedRequest* requests         # (num_requests,)
    cdef uint64_t num_requests
    cdef uint64_t request_room
    cdef CollectedRequest at_work[4]        # by quarter, the request whose keys are collected
    cdef uint32_t stretch
    cdef uint64_t num_collected             # keys and requests
    cdef uint64_t* uses                     # scratch: fingerprints of the call at work
    cdef uint32_t* use_scratch              # beside them: their nodes, NIL for none
    cdef Py_ssize_t use_room
    cdef Transfer* transfers                # (transfer_room,)
    cdef uint64_t transfer_room
    cdef int32_t* spare_ids                 # (spare_room,), of the transfer that ended last
    cdef uint32_t spare_room
    cdef uint32_t num_transfers             # handed out at least once
    cdef uint32_t free_transfer
    cdef uint32_t oldest
    cdef uint32_t newest
    cdef uint32_t chains[256]
    cdef uint32_t num_open
    cdef uint64_t open_blocks
    cdef uint64_t serial
    cdef double lag                         # requests during a store; < 0: not known

    # Begin to observe the blocks of a policy, before the first is stored.
    cdef int attach(self, CompiledPolicy policy) except -1
    # Before a call reads the state: these run a user's code.
    cdef int tick(self) except -1
    cdef int begin_lookup(self) except -1
    cdef uint64_t c_now(self) noexcept
    # The time that the call at work has read.
    cdef inline uint64_t last_now(self) noexcept:
        return <uint64_t>max(self.present - self.start, <int64_t>0)
    # After a lookup: `items` are those of the whole request, and the nodes of the hits are found.
    cdef void c_looked_up(self, Batch* batch, Py_ssize_t num_hits) noexcept
    # Before the victims leave and the admitted keys become blocks.
    cdef void c_stored(self, Batch* batch, Py_ssize_t admitted, Py_ssize_t missing) noexcept
    cdef void c_refused(self, Batch* batch, Py_ssize_t missing) noexcept
    # Before the blocks of a failed store are dropped; whatever the outcome, close the transfer.
    cdef void c_ended(self, Batch* batch, bint succeeded) noexcept
    # Its part for a failed store, where the caller closes the transfer.
    cdef void c_failed(self, Batch* batch) noexcept
    cdef void c_loaded(self, Batch* batch) noexcept
    cdef void c_dropped(self) noexcept
    # Before `c_looked_up` of a request: what its client said when it began.
    cdef int tell(self, object hints, object now) except -1
    # After a request has finished with a hint of its return, `now` in seconds or NaN, and after
    # the blocks of a batch that are not shared were released; nodes are found.
    cdef void c_finished_told(self, Batch* batch, object hints, double now) noexcept
    cdef void c_released(self, Batch* batch) noexcept
    # Count a client's hints on its session, before the call changes anything.
    cdef int note_hints(self, str source, bint ends, bint expects) except -1
    cdef uint64_t held(self, int size) noexcept
    cdef void c_opened(self, uint32_t kind, const int64_t* block_ids, Py_ssize_t size) noexcept
    cdef int32_t* take_ids(self, Py_ssize_t size) noexcept
    cdef int32_t* open_transfer(
        self, uint32_t kind, Py_ssize_t size, int64_t first, int64_t last, uint64_t now
    ) noexcept
    cdef void c_closed(
        self, uint32_t kind, Py_ssize_t size, int64_t first, int64_t last, int64_t one
    ) noexcept
    cdef void note_lag(self, double requests) noexcept
    cdef void close_at(self, uint32_t index) noexcept
    cdef void set_fate(self, Node* node, uint8_t fate) noexcept
    cdef void note_fate(self, uint64_t hashed, uint8_t fate, uint32_t now) noexcept
    cdef void use_unseen(self, Batch* batch, Py_ssize_t missing, uint32_t now) noexcept
    # While the victims of a call that has read the clock leave, for each sampled one; then for all.
    cdef void meet_victim(self, Node* node, Py_ssize_t index) noexcept
    cdef void note_victims(self, uint64_t size, Py_ssize_t num_sampled) noexcept
    cdef bint ensure_uses(self, Py_ssize_t size) noexcept
    cdef int quarter_of(self, uint64_t hashed) noexcept
    cdef Entry* count_segment(self, uint64_t hashed) noexcept
    cdef void judge(self, uint64_t hashed, Node* node, bint hit) noexcept
    cdef void note_evicted(self, Entry* entry, uint32_t now) noexcept
    # Collect the keys of a request for the policies, head to tail, then the request.
    cdef void collect_key(self, uint32_t sample, PyObject* key, int part) noexcept
    cdef void forget_told(self) noexcept
    cdef uint32_t keep_told(self) noexcept
    cdef void collect_batch(self, Batch* batch, uint8_t but) noexcept
    cdef void collect_request(self, int event) noexcept
