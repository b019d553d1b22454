"""Sets of engines by block, as `kvoffload.replay.index` keeps them; see the Python twin.

A separate table holds the last row sent with each block: linear probing, at most half full; entries
after a deleted one move up.
"""

from collections import deque

cimport numpy as cnp
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

cnp.import_array()

cdef enum:
    WORD = 64
    MOST_WORDS = 4  # of 256 engines
    MOST_SETS = 4  # blocks ahead, and three places
    LEAST_BITS = 6  # of a table's entries

cdef uint64_t GOLDEN = 0x9E3779B97F4A7C15  # multiplied with, blocks that follow each other spread


cdef extern from *:
    int lowest_bit "__builtin_ctzll"(uint64_t word) noexcept


cdef uint32_t* numbers_in(object blocks, uint64_t num_blocks) except NULL:
    """Return the items of an array, which must be numbers of blocks."""
    cdef uint32_t* items
    cdef uint32_t most = 0
    cdef Py_ssize_t index
    if not (
        cnp.PyArray_Check(blocks)
        and cnp.PyArray_TYPE(blocks) == cnp.NPY_UINT32
        and cnp.PyArray_IS_C_CONTIGUOUS(blocks)
        and cnp.PyArray_NDIM(blocks) == 1
    ):
        raise TypeError(f"blocks must be an array of uint32, got {type(blocks).__name__}")
    items = <uint32_t*>cnp.PyArray_DATA(blocks)
    for index in range(cnp.PyArray_DIM(blocks, 0)):
        most = max(most, items[index])
    if most >= num_blocks and cnp.PyArray_DIM(blocks, 0):
        raise IndexError(f"blocks must be below {num_blocks}, got {most}")
    return items


cdef cnp.ndarray new_numbers(cnp.npy_intp size):
    return cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT32, 0)


cdef class Holders:
    """Sets of the engines that have each block."""

    cdef uint64_t* words  # by block, those of each together
    cdef uint64_t[MOST_WORDS] everyone
    cdef uint64_t num_blocks
    cdef Py_ssize_t num_words, num_engines

    def __cinit__(self, num_blocks, num_engines):
        cdef Py_ssize_t word
        if not 1 <= num_engines <= WORD * MOST_WORDS:
            raise ValueError(f"num_engines must be 1 ... {WORD * MOST_WORDS}, got {num_engines}")
        self.num_blocks, self.num_engines = num_blocks, num_engines
        self.num_words = (self.num_engines + WORD - 1) // WORD
        for word in range(self.num_words):
            self.everyone[word] = ~<uint64_t>0
        if self.num_engines % WORD:
            self.everyone[self.num_words - 1] >>= WORD - self.num_engines % WORD
        self.words = <uint64_t*>calloc(self.num_blocks * self.num_words + 1, sizeof(uint64_t))
        if self.words == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.words)

    cdef int check(self, Py_ssize_t engine) except -1:
        if not 0 <= engine < self.num_engines:
            raise IndexError(f"engine must be below {self.num_engines}, got {engine}")
        return 0

    def add(self, blocks, Py_ssize_t engine):
        """Note that an engine has blocks; return the number that are new to it."""
        cdef uint32_t* block = numbers_in(blocks, self.num_blocks)
        cdef uint64_t* word
        cdef uint64_t bit = <uint64_t>1 << engine % WORD
        cdef Py_ssize_t index, num_new = 0
        self.check(engine)
        for index in range(len(blocks)):
            word = self.words + block[index] * self.num_words + engine // WORD
            num_new += not word[0] & bit
            word[0] |= bit
        return num_new

    def remove(self, blocks, Py_ssize_t engine):
        """Note that an engine no longer has blocks."""
        cdef uint32_t* block = numbers_in(blocks, self.num_blocks)
        cdef Py_ssize_t index
        self.check(engine)
        for index in range(len(blocks)):
            self.words[block[index] * self.num_words + engine // WORD] &= ~(
                <uint64_t>1 << engine % WORD
            )

    def fill(self, blocks, bint is_held):
        """Note that all engines have blocks, or none."""
        cdef uint32_t* block = numbers_in(blocks, self.num_blocks)
        cdef Py_ssize_t index, word
        for index in range(len(blocks)):
            for word in range(self.num_words):
                self.words[block[index] * self.num_words + word] = (
                    self.everyone[word] if is_held else 0
                )

    def has(self, Py_ssize_t block, Py_ssize_t engine):
        """Return whether an engine has a block."""
        self.check(engine)
        return bool(self.of(block)[engine // WORD] >> engine % WORD & 1)

    def first(self, Py_ssize_t block):
        """Return the lowest engine that has a block, -1 if none has it."""
        cdef uint64_t* words = self.of(block)
        cdef Py_ssize_t word
        for word in range(self.num_words):
            if words[word]:
                return word * WORD + lowest_bit(words[word])
        return -1

    def lead(self, blocks):
        """Return the number of leading blocks that any engine has."""
        cdef uint32_t* block = numbers_in(blocks, self.num_blocks)
        cdef Py_ssize_t index, word
        cdef uint64_t held
        for index in range(len(blocks)):
            held = 0
            for word in range(self.num_words):
                held |= self.words[block[index] * self.num_words + word]
            if not held:
                return index
        return len(blocks)

    cdef uint64_t* of(self, Py_ssize_t block) except NULL:
        if not 0 <= block < <Py_ssize_t>self.num_blocks:
            raise IndexError(f"block must be below {self.num_blocks}, got {block}")
        return self.words + block * self.num_words


def leads(list sets, blocks, Py_ssize_t num_engines):
    """Return the number of leading blocks for which each engine is in at least one of the sets.

    Complexity: O(blocks up to the first at which no engine has the whole prefix).
    """
    cdef Holders holders = sets[0]
    cdef uint32_t* block = numbers_in(blocks, holders.num_blocks)
    cdef uint64_t* words[MOST_SETS]
    cdef Py_ssize_t index, word, one, size = len(blocks), num_sets = len(sets)
    cdef Py_ssize_t num_words = holders.num_words
    cdef uint64_t alive, held, gone, num_blocks = holders.num_blocks
    cdef list found = [size] * num_engines
    if num_sets > MOST_SETS:
        raise ValueError(f"sets must be at most {MOST_SETS}, got {num_sets}")
    for one in range(num_sets):
        holders = sets[one]
        if holders.num_engines != num_engines or holders.num_blocks != num_blocks:
            raise ValueError(f"sets must be of {num_engines} engines and {num_blocks} blocks")
        words[one] = holders.words
    for word in range(num_words):
        alive = holders.everyone[word]
        for index in range(size):
            held = 0
            for one in range(num_sets):
                held |= words[one][block[index] * num_words + word]
            gone = alive & ~held
            while gone:
                found[word * WORD + lowest_bit(gone)] = index
                gone &= gone - 1
            alive &= held
            if not alive:
                break
    return found


cdef struct Entry:
    uint64_t stamp  # 0: no block
    uint64_t block


cdef class Stamps:
    """A map from blocks to numbers from 1 on."""

    cdef Entry* entries
    cdef uint64_t size
    cdef int bits  # the table has 2 ** bits entries

    def __cinit__(self):
        self.bits = LEAST_BITS
        self.entries = <Entry*>calloc(1 << self.bits, sizeof(Entry))
        if self.entries == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.entries)

    cdef uint64_t home(self, uint64_t block) noexcept:
        """Return the home slot of a block."""
        return block * GOLDEN >> (WORD - self.bits)

    cdef Entry* find(self, uint64_t block) noexcept:
        """Return the entry of a block, or the empty one that would hold it."""
        cdef uint64_t mask = (<uint64_t>1 << self.bits) - 1, place = self.home(block)
        while self.entries[place].stamp and self.entries[place].block != block:
            place = place + 1 & mask
        return self.entries + place

    cdef int64_t put(self, uint64_t block, uint64_t stamp) except -1:
        """Give a block a number; return its former one, 0 for none."""
        cdef Entry* entry = self.find(block)
        cdef uint64_t former = entry.stamp
        if not entry.stamp:
            if self.size >> (self.bits - 1):
                self.grow()
                entry = self.find(block)
            self.size += 1
            entry.block = block
        entry.stamp = stamp
        return <int64_t>former

    cdef int grow(self) except -1:
        cdef Entry* former = self.entries
        cdef uint64_t place, num_former = <uint64_t>1 << self.bits
        cdef Entry* entries = <Entry*>calloc(2 * num_former, sizeof(Entry))
        if entries == NULL:
            raise MemoryError()
        self.entries = entries
        self.bits += 1
        for place in range(num_former):
            if former[place].stamp:
                self.find(former[place].block)[0] = former[place]
        free(former)
        return 0

    cdef void drop(self, Entry* entry) noexcept:
        """Delete an entry."""
        cdef uint64_t mask = (<uint64_t>1 << self.bits) - 1
        cdef uint64_t hole = entry - self.entries, place = hole
        self.size -= 1
        while True:
            place = place + 1 & mask
            if not self.entries[place].stamp:
                break
            # It may move up unless its home is behind the hole.
            if (place - self.home(self.entries[place].block) & mask) >= (place - hole & mask):
                self.entries[hole] = self.entries[place]
                hole = place
        self.entries[hole].stamp = 0


cdef class Recent:
    """The most recently used blocks, up to a limit; the first of a row is the most recent.

    A block repeated within a row counts at its first place.
    """

    cdef Stamps last  # when each was used last
    cdef Py_ssize_t most
    cdef uint64_t used  # uses so far
    cdef uint64_t passed  # those at the begin of the log that were looked at
    cdef object rows  # the log
    cdef Py_ssize_t ahead  # blocks of the first row of the log that were not looked at

    def __init__(self, most):
        self.last = Stamps()
        self.most = most
        self.rows = deque()

    def __len__(self):
        """Return the number of remembered blocks."""
        return self.last.size

    def use(self, blocks):
        """Make a row's blocks the most recent; return the three of the Python twin."""
        cdef uint32_t* block = numbers_in(blocks, <uint64_t>1 << 32)
        cdef Py_ssize_t index, size = len(blocks), lead = size, first_missing = size
        cdef cnp.ndarray missing = new_numbers(size), forgotten
        cdef uint32_t* entering = <uint32_t*>cnp.PyArray_DATA(missing)
        cdef uint32_t* leaving
        cdef uint64_t before = self.used, former
        cdef bytearray is_absent = bytearray(size)
        cdef char* absent = is_absent
        cdef Entry* entry
        for index in range(size - 1, -1, -1):
            self.used += 1
            former = <uint64_t>self.last.put(block[index], self.used)
            # A block that was met behind in this row is missing if it was missing there.
            if absent[size - <Py_ssize_t>(former - before)] if former > before else not former:
                absent[index] = 1
                lead = index
                first_missing -= 1
                entering[first_missing] = block[index]
        if not self.rows:
            self.ahead = size
        self.rows.append(blocks)
        size = max(0, <Py_ssize_t>self.last.size - self.most)
        forgotten = new_numbers(size)
        leaving = <uint32_t*>cnp.PyArray_DATA(forgotten)
        block = <uint32_t*>cnp.PyArray_DATA(self.rows[0])
        index = 0
        while index < size:
            if not self.ahead:
                self.rows.popleft()
                block = <uint32_t*>cnp.PyArray_DATA(self.rows[0])
                self.ahead = len(self.rows[0])
                continue
            self.ahead -= 1
            self.passed += 1
            entry = self.last.find(block[self.ahead])
            if entry.stamp == self.passed:
                leaving[index] = block[self.ahead]
                self.last.drop(entry)
                index += 1
        return lead, missing[first_missing:], forgotten


cdef class Ahead(Holders):
    """Sets of engines by block for rows on their way, which arrive in order."""

    cdef uint64_t sent
    cdef list last  # by engine, the row with a block
    cdef list rows

    def __init__(self, num_blocks, num_engines):
        self.last = [Stamps() for _ in range(num_engines)]
        self.rows = [deque() for _ in range(num_engines)]

    def send(self, Py_ssize_t engine, blocks):
        """Note that a row is on its way to an engine."""
        cdef uint32_t* block = numbers_in(blocks, self.num_blocks)
        cdef Stamps last = self.last[engine]
        cdef Py_ssize_t index
        self.sent += 1
        for index in range(len(blocks)):
            last.put(block[index], self.sent)
        self.rows[engine].append((self.sent, blocks))
        self.add(blocks, engine)

    def arrive(self, Py_ssize_t engine):
        """Note that the events of the first row on its way to an engine have arrived."""
        cdef uint64_t row
        cdef Stamps last = self.last[engine]
        cdef Entry* entry
        cdef uint32_t* block
        cdef Py_ssize_t index
        row, blocks = self.rows[engine].popleft()
        block = numbers_in(blocks, self.num_blocks)
        for index in range(len(blocks)):
            entry = last.find(block[index])
            if entry.stamp == row:
                last.drop(entry)
                self.words[block[index] * self.num_words + engine // WORD] &= ~(
                    <uint64_t>1 << engine % WORD
                )
