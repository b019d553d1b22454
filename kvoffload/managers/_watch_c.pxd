"""The core of a watch: events of sampled keys in, counts and collected requests out.

A manager names the sampled keys of a call with `begin` and `meet`, then says what happened to them:
`on_request`, `on_offer` and so on. Batches of a compiled manager and lists of a Python one are read
here; vLLM's manager names its keys itself.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvoffload._core.batch cimport Batch
from kvoffload._core.shadow cimport Entry, Shadow, shadow_approach
from kvoffload._core.table cimport Table, sample_of
from kvoffload.policies._twin_c cimport MOST_SOURCES, Hint

cdef enum:
    BINS = 256
    MOST_CAUSES = 8

cdef enum:
    LOAD = 0
    STORE = 1

# The last fate of a block; from FATE_EVICTED on the cause of its miss. As in ``_watching``.
cdef enum:
    FATE_UNKNOWN = 0
    FATE_STORED = 1
    FATE_EVICTED = 2
    FATE_DECLINED = 3
    FATE_REFUSED = 4
    FATE_FAILED = 5
    FATE_RESET = 6

# How a request met a key: other causes of its miss, or a hit.
cdef enum:
    BROKEN_PREFIX = 0
    PENDING = 1
    NEVER_OR_LONG_AGO = 7
    ABSENT = 253            # its last fate is the cause
    KNOWN_HIT = 254         # a hit whose use was told before
    HIT = 255

# The position of a request's key relative to those that it asked for.
cdef enum:
    BEFORE = 0              # the device had it
    ASKED = 1
    BEHIND = 2              # generated
    ASIDE = 3               # of a group that is not judged

# In place of a request's first key, as in ``_watching``.
cdef enum:
    EXTENDED = 0            # like a request that asks for nothing
    FINISHED = -1
    RELEASED = -2

# Counters; the names are `COUNTERS` in ``_watching``.
cdef enum:
    REQUESTS
    ASKED_BLOCKS
    MISSED_BLOCKS
    MET_PENDING             # requests whose first miss was a block being stored
    STORED_BLOCKS
    EVICTED_BLOCKS
    DECLINED_BLOCKS
    REFUSED_STORES
    FAILED_BLOCKS
    RESETS
    UNTRACKED               # transfers that found no room in the ledger
    TAIL_MISSED_TOKENS      # of an integration whose engine has several KV groups
    NUM_COUNTERS

# A sampled key of the call at work.
cdef struct SampledKey:
    uint64_t hashed
    PyObject* key           # borrowed; NULL where nothing collects it
    uint8_t part            # BEFORE, ASKED, BEHIND, ASIDE
    uint8_t met             # HIT, KNOWN_HIT, ABSENT, or the cause of its miss
    uint8_t fate            # its fate by the call; FATE_UNKNOWN: as before
    bint seen               # an offer need not use it: a request has

# The sampled keys of a request that belong to one quarter.
cdef struct CollectedRequest:
    uint32_t quarter
    uint32_t told           # place of what its client said; 0: nothing
    uint32_t stretch        # resets before it since the last take; consecutive ones count as one
    uint32_t num_keys
    int32_t first           # of the keys that it asked for; FINISHED, RELEASED: of an event
    uint32_t end            # and behind the last of them

cdef struct WatchCounts:
    uint64_t causes[MOST_CAUSES]
    uint64_t evicted_used[2]
    uint64_t long_requests[13]              # by size: requests longer than it
    uint64_t fullest[13]                    # by size: most sampled blocks that it held at a reset
    uint64_t hints[MOST_SOURCES + 1][2]     # by source: ends, expectations; others last
    uint64_t judged[4][14]                  # by quarter: sampled blocks by segment; not listed last
    uint64_t policy_judged[4][14]           # those of the policies' part of the sample
    uint64_t unused_ages[BINS]
    uint64_t stored_ages[BINS]

# An open transfer.
cdef struct Transfer:
    uint64_t serial
    uint64_t time           # ms
    uint64_t request        # number of requests at the time
    int32_t* block_ids
    uint32_t kind           # LOAD, STORE
    uint32_t size           # blocks
    int32_t first           # ids, or a sum of them, by which it is found again
    int32_t last


cdef class WatchCore:
    cdef readonly object watch
    cdef public bint due
    cdef public uint64_t next_due           # ms
    cdef public bint waits_for_stores
    cdef public object block_tokens
    cdef readonly bint hears_releases       # since the first
    cdef readonly uint32_t sample_below
    cdef public object get                  # of the policy: the status of a resident block
    cdef uint64_t secret[8]                 # that of the manager's table
    cdef bint has_secret                    # the plan gave it
    cdef uint32_t policy_below
    cdef uint32_t keeps_below               # policy_below, 0 if no keys are kept
    cdef int num_quarters
    cdef int num_sizes
    cdef uint64_t lengths[13]
    cdef Shadow shadow
    cdef uint64_t counters[NUM_COUNTERS]
    cdef WatchCounts tally
    cdef object clock
    cdef int64_t start                      # ms
    cdef int64_t present                    # ms: when the clock was last read
    cdef SampledKey* sampled                # (num_sampled,), of the call at work
    cdef Py_ssize_t num_sampled
    cdef uint64_t sampled_room
    # Requests for the policies
    cdef object hints                       # of the request at work, None for none
    cdef list before                        # its keys before those that it asks for, None for none
    cdef list told                          # None; the hints of the collected requests
    cdef readonly dict sources              # of hints: their numbers, in the order of their counts
    cdef list keys                          # by quarter, those of its collected requests
    cdef CollectedRequest* requests         # (num_requests,)
    cdef uint64_t num_requests
    cdef uint64_t request_room
    cdef CollectedRequest at_work[4]        # by quarter, the request whose keys are collected
    cdef uint32_t stretch
    cdef uint64_t num_collected             # keys and requests
    # The ledger
    cdef Transfer* transfers                # (num_open,), oldest first
    cdef uint64_t num_open
    cdef uint64_t transfer_room
    cdef uint64_t open_blocks
    cdef uint64_t serial
    cdef readonly double lag                # mean requests during a store; < 0: not known
    # Share of the requests whose stores, of prompts and of answers, end before they finish.
    cdef readonly double early
    cdef readonly double early_answers

    # Draw the sample of a table's keys, before the first is stored; `get` returns a block's status.
    cdef int look_at(self, Table* table, object get) except -1
    # Before a call reads the state, since these run a user's code: read its clock; before a lookup,
    # hand over the collected requests if there are enough, and read the clock.
    cdef int tick(self) except -1
    cdef int begin_lookup(self) except -1
    # Read the clock, and return the time that the call at work has read; ms since the start.
    cdef uint64_t read_clock(self) noexcept
    cdef inline uint64_t last_now(self) noexcept:
        return <uint64_t>max(self.present - self.start, <int64_t>0)

    # -- events: `begin`, `meet` each sampled key, first key first, then what happened -------------
    # Make room for the sampled ones of so many keys; without memory the call is not observed.
    cdef bint begin(self, Py_ssize_t size) noexcept
    cdef inline void meet(
        self, uint64_t hashed, PyObject* key, uint8_t part, uint8_t met, uint8_t fate
    ) noexcept:
        """Add a sampled key to the call at work."""
        self.sampled[self.num_sampled] = SampledKey(hashed, key, part, met, fate, False)
        self.num_sampled += 1
        shadow_approach(&self.shadow, hashed)

    cdef inline void meet_leaving(self, uint64_t hashed) noexcept:
        self.meet(hashed, NULL, BEHIND, ABSENT, FATE_UNKNOWN)

    cdef inline bint samples(self, uint64_t hashed) noexcept:
        return sample_of(hashed) < self.sample_below

    cdef inline void count(self, int counter, uint64_t more) noexcept:
        self.counters[counter] += more

    # Count a request of `length` blocks; then judge the keys that it asked for, collect all, and
    # use them, last first.
    cdef void count_request(
        self, uint64_t asked, uint64_t missed, bint met_pending, uint64_t length
    ) noexcept
    cdef void on_request(self) noexcept
    # Count a store that gave slots to `admitted` of `missing` blocks; -1: it was refused. Then use
    # the keys that no request has shown since they were stored or reset, last first, and note all
    # fates.
    cdef void count_offer(self, Py_ssize_t admitted, Py_ssize_t missing) noexcept
    cdef void on_offer(self) noexcept
    # `size` blocks are leaving, in a call that has read the clock: count them, the sampled ones by
    # their records, and note their fates.
    cdef void on_eviction(self, uint64_t size) noexcept
    # The keys were released; or their request has finished with a hint of its return; or they extend
    # it, and are used. Generated tokens are not asked for, but take room like others.
    cdef void on_event(self, int event) noexcept
    cpdef void on_reset(self) noexcept
    # What the client of the next request said, and the keys before those that it asks for, which
    # the device has.
    cpdef void hear(self, object hints, list before=*) noexcept
    # Count a client's hints on its session, before the call changes anything.
    cpdef int note_hints(self, str source, bint ends, bint expects) except -1
    # One sampled key: it was hit; its fate changes, by a store at `now`; the cause of its miss, if
    # it is absent, by its last fate.
    cdef void note_used(self, uint64_t hashed) noexcept
    cdef void note_fate(self, uint64_t hashed, uint8_t fate, uint32_t now) noexcept
    cdef uint8_t cause_of(self, uint64_t hashed) noexcept
    # A transfer begins: return where its ids go, NULL if there is no room. `first` and `last`, ids
    # or a sum of them, find it again, with `one` of its ids unless that is -1: the newest that fits
    # ends; a leaked one of the same blocks stays and ages. Return whether one fits.
    cdef int32_t* open_transfer(
        self, uint32_t kind, Py_ssize_t size, int64_t first, int64_t last, uint64_t now
    ) noexcept
    cpdef bint end_transfer(
        self, uint32_t kind, Py_ssize_t size, int64_t first, int64_t last, int64_t one
    ) noexcept

    # -- events of batches whose nodes are found ---------------------------------------------------
    cdef void c_looked_up(self, Table* table, Batch* batch, Py_ssize_t num_hits) noexcept
    # Before the victims leave and the admitted keys become blocks.
    cdef void c_offered(
        self, Table* table, Batch* batch, Py_ssize_t admitted, Py_ssize_t missing
    ) noexcept
    cdef void c_extended(self, Table* table, Batch* batch) noexcept
    # End a load or store, or the stores whose pending blocks follow each other.
    cdef void c_closed(self, uint32_t kind, Table* table, Batch* batch) noexcept
    # Before the blocks of a failed store are dropped: note the fates of pending ones, once each.
    cdef void c_failed(self, Table* table, Batch* batch) noexcept
    cdef void c_opened(self, uint32_t kind, const int64_t* block_ids, Py_ssize_t size) noexcept
    # After a request has finished, which has stored from `first` to `last`, -1 for none, and
    # whose `hint`, NULL for none, says what `hints` say; its answer is from `prompt` on. And after
    # the blocks of a batch that are not shared were released.
    cdef void c_finished(
        self, Table* table, Batch* batch, Py_ssize_t first, Py_ssize_t last, Py_ssize_t prompt,
        object hints, const Hint* hint,
    ) noexcept
    cdef void c_released(self, Table* table, Batch* batch) noexcept
