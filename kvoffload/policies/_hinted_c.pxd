"""The state of hit density from the first hint of a return on, compiled.

Without hints this state does not exist; a *record* holds the facts on a block, resident or ghost.
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload.policies._densities_c cimport Densities, age_bin, end_age, start_age
from kvoffload.policies._returns_c cimport (
    Returns,
    count_part_drop,
    count_part_reuse,
)
from kvoffload.policies._trials_c cimport Trials
from kvoffload.policies._turn_tails_c cimport Tails
from kvoffload.policies._turns_c cimport Turns

cdef struct Hinted:
    Turns turns                 # blocks are nodes
    uint32_t* ghost_parts       # by position: of the ghosts that are OF_TURN
    uint64_t num_positions
    Returns returns
    Densities plain             # by class and last use only, of all blocks
    Turns trial_turns           # of the guard's trial; blocks are entries
    Trials plain_trial          # the guard's fourth trial, only of hit density
    Tails tails                 # the search for victims at work

# Create an empty state; NULL, with nothing reserved, if there is no memory. `sample` are the trials
# of the guard, NULL without a guard.
cdef Hinted* hinted_open(
    uint64_t num_nodes, uint64_t num_positions, const Trials* sample
) noexcept
cdef void hinted_close(Hinted* hinted) noexcept
# Make room for `num_nodes` nodes; False if there is no memory.
cdef bint hinted_ensure(Hinted* hinted, uint64_t num_nodes) noexcept


cdef inline void start_record(
    Densities* learned, Hinted* hinted, int reuse_class, uint32_t last, uint32_t now, uint32_t part
) noexcept:
    """Count the age of a record of `part`, 0 for none, that started at request `last`."""
    if hinted == NULL:
        start_age(learned, reuse_class, last, now)
        return
    if part:
        hinted.turns.parts[part].living += 1
    else:
        start_age(learned, reuse_class, last, now)
    start_age(&hinted.plain, reuse_class, last, now)


cdef inline void end_record(
    Densities* learned, Hinted* hinted, int reuse_class, uint32_t last, uint32_t now, uint32_t part
) noexcept:
    """Count that such an age has ended."""
    if hinted == NULL:
        end_age(learned, reuse_class, last, now)
        return
    if part:
        hinted.turns.parts[part].living -= 1
    else:
        end_age(learned, reuse_class, last, now)
    end_age(&hinted.plain, reuse_class, last, now)


cdef inline void count_reuse(
    Densities* learned, Hinted* hinted, int reuse_class, uint32_t age, uint32_t part
) noexcept:
    """Count an age that ended in a use."""
    cdef int bin_index = age_bin(age)
    if hinted != NULL:
        hinted.plain.reused[reuse_class][bin_index] += 1.0
        if part:
            count_part_reuse(&hinted.returns, &hinted.turns, part)
            return
    learned.reused[reuse_class][bin_index] += 1.0


cdef inline void count_drop(
    Densities* learned, Hinted* hinted, int reuse_class, uint32_t age, uint32_t part
) noexcept:
    """Count an age with an unknown end: the block was forgotten."""
    cdef int bin_index = age_bin(age)
    if hinted != NULL:
        hinted.plain.dropped[reuse_class][bin_index] += 1.0
        if part:
            count_part_drop(&hinted.returns, &hinted.turns, part)
            return
    learned.dropped[reuse_class][bin_index] += 1.0
