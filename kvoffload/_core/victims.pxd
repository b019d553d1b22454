"""The search for victims: in two steps, so that a failure or a refusal leaves no trace.

Structure
    `victims_next` finds the next block of a ring that may leave and takes it provisionally;
    afterwards either `victims_commit` is followed by the policy letting each go, or
    `victims_cancel` gives all back. A block that is to leave before all others is taken by
    `victims_take`, wherever it stands; the search then passes over it. With a manager (``managed``), blocks that are passed over are
    parked and the provisional ones too; in a policy used alone ``ref_cnt`` may change behind its
    back, so nothing is parked and a cursor walks the list.
Invariants
    Between calls of the policy no search is open: ``size`` is 0.
"""

from libc.stdint cimport uint32_t, uint64_t

from kvoffload._core.ring cimport Ring
from kvoffload._core.table cimport Node, Table

cdef struct Victim:
    uint32_t node_id
    Ring* ring
    uint64_t hashed         # of the victim's key, where the policy has put it

# Where a search stands on one ring, in a policy used alone.
cdef struct Cursor:
    bint started
    uint32_t node_id        # the next node to look at

cdef struct Victims:
    Victim* items           # in eviction order
    uint64_t size
    uint64_t num_taken      # the first victims, which no search has met; they are CHOSEN
    uint64_t room
    Victim* aside           # idle but protected blocks that were parked: listed at the end
    uint64_t num_aside
    uint64_t aside_room
    bint managed            # a manager tells when a block becomes idle
    bint no_memory          # the search ended because an allocation failed

cdef void victims_open(Victims* victims) noexcept
cdef void victims_close(Victims* victims) noexcept
# Make room for `n` victims and for `num_aside` blocks that are passed over as protected; False if
# there is no memory.
cdef bint victims_ensure(Victims* victims, uint64_t n, uint64_t num_aside) noexcept
# Take the next block of the ring that may leave; False if there is none, or no memory.
cdef bint victims_next(Victims* victims, Table* table, Ring* ring, Cursor* cursor) noexcept
# Take a block, before any was found; False if there is no memory.
cdef bint victims_take(Victims* victims, Node* node, uint32_t node_id, Ring* ring) noexcept
# Note a parked block that is to be listed later, when the search ends at the latest; False if
# there is no memory.
cdef bint victims_set_aside(Victims* victims, Ring* ring, uint32_t node_id) noexcept
# List what was noted of a ring.
cdef void victims_list_aside(Victims* victims, Table* table, Ring* ring) noexcept
# End the search; the victims stay in `items`, on their rings (parked, where managed).
cdef void victims_settle(Victims* victims, Table* table) noexcept
# Flag a victim that was taken no more: it leaves or is given back.
cdef void victims_unflag(Victims* victims, Table* table) noexcept
# End the search and give all victims back, where a scan would find them again.
cdef void victims_cancel(Victims* victims, Table* table) noexcept
