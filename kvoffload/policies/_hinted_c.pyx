"""The state of hit density from the first hint on; see ``_hinted_c.pxd``."""

from libc.string cimport memset

from kvoffload._core.memory cimport discard, release, reserve, resize
from kvoffload.policies._returns_c cimport returns_close, returns_open
from kvoffload.policies._trials_c cimport trials_close, trials_ensure_release, trials_open
from kvoffload.policies._turn_tails_c cimport tails_close, tails_open
from kvoffload.policies._turns_c cimport turns_close, turns_ensure


cdef Hinted* hinted_open(
    uint64_t num_nodes, uint64_t num_positions, const Trials* sample
) noexcept:
    cdef Hinted* hinted = <Hinted*>resize(NULL, sizeof(Hinted))
    if hinted == NULL:
        return NULL
    memset(hinted, 0, sizeof(Hinted))
    returns_open(&hinted.returns)
    hinted.num_positions = num_positions
    hinted.ghost_parts = <uint32_t*>reserve(num_positions * sizeof(uint32_t))
    if (
        hinted.ghost_parts == NULL
        or not tails_open(&hinted.tails)
        or not hinted_ensure(hinted, num_nodes)
        or sample != NULL and not open_trial(hinted, sample)
    ):
        hinted_close(hinted)
        return NULL
    return hinted


cdef bint open_trial(Hinted* hinted, const Trials* sample) noexcept:
    cdef Trials* plain = &hinted.plain_trial
    cdef uint64_t num_entries = sample.num_reserved
    return (
        turns_ensure(&hinted.trial_turns, num_entries, num_entries)
        and trials_open(plain, sample.capacity, sample.clocks[0].size, sample.clocks[1].size)
        and trials_ensure_release(plain)
    )


cdef void hinted_close(Hinted* hinted) noexcept:
    if hinted == NULL:
        return
    turns_close(&hinted.turns)
    turns_close(&hinted.trial_turns)
    release(hinted.ghost_parts, hinted.num_positions * sizeof(uint32_t))
    returns_close(&hinted.returns)
    tails_close(&hinted.tails)
    trials_close(&hinted.plain_trial)
    discard(hinted)


cdef bint hinted_ensure(Hinted* hinted, uint64_t num_nodes) noexcept:
    return turns_ensure(&hinted.turns, num_nodes, num_nodes + hinted.num_positions)
