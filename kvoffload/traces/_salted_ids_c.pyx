"""Salted block ids as text: SipHash-2-4 of the block hash's Python hash, keyed with the salt.

SipHash is a pseudo-random function (Aumasson & Bernstein, INDOCRYPT 2012): without the salt an id
tells nothing of the hash, not even to someone who can guess it. The 8-byte message is ``hash()`` of
the block hash, so a hash of any length takes the same path. Of the 64 bits 52 are kept, 13 for each
of four groups of four digits, the first of them never below 1000: every id has 16 digits and needs
no division to write. Among n blocks two share an id with a chance of about n² / 2⁵³.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.object cimport PyObject_Hash
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    GROUP_BITS = 13
    GROUPS = 1 << 13
    C_TEXT_BYTES = 17  # sixteen digits and a comma

TEXT_BYTES = C_TEXT_BYTES

# The four digits of every value of a group; the first group counts from 1000.
cdef char[9192][4] digits  # GROUPS + 1000


cdef void fill_digits() noexcept:
    cdef int value
    for value in range(GROUPS + 1000):
        digits[value][0] = <char>(48 + value // 1000)
        digits[value][1] = <char>(48 + value // 100 % 10)
        digits[value][2] = <char>(48 + value // 10 % 10)
        digits[value][3] = <char>(48 + value % 10)


fill_digits()


cdef inline uint64_t rotated(uint64_t word, int bits) noexcept nogil:
    return (word << bits) | (word >> (64 - bits))


cdef inline void sip_rounds(int count, uint64_t* v) noexcept nogil:
    """Apply SipRound `count` times to the four words of state."""
    cdef int i
    for i in range(count):
        v[0] += v[1]
        v[2] += v[3]
        v[1] = rotated(v[1], 13) ^ v[0]
        v[3] = rotated(v[3], 16) ^ v[2]
        v[0] = rotated(v[0], 32)
        v[2] += v[1]
        v[0] += v[3]
        v[1] = rotated(v[1], 17) ^ v[2]
        v[3] = rotated(v[3], 21) ^ v[0]
        v[2] = rotated(v[2], 32)


cdef inline uint64_t siphash(uint64_t message, uint64_t low, uint64_t high) noexcept nogil:
    """Return SipHash-2-4 of one word."""
    cdef uint64_t[4] v
    cdef uint64_t end = <uint64_t>8 << 56  # the length of the message, as SipHash ends it
    v[0] = low ^ 0x736F6D6570736575ULL
    v[1] = high ^ 0x646F72616E646F6DULL
    v[2] = low ^ 0x6C7967656E657261ULL
    v[3] = high ^ 0x7465646279746573ULL ^ message
    sip_rounds(2, v)
    v[0] ^= message
    v[3] ^= end
    sip_rounds(2, v)
    v[0] ^= end
    v[2] ^= 0xFF
    sip_rounds(4, v)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def fingerprints(list hashes not None):
    """Return ``hash()`` of each block hash, as 8 bytes each in the machine's order.

    Parameters
    ----------
    hashes : list of bytes
        Block hashes.
    """
    cdef Py_ssize_t size = len(hashes)
    cdef bytes words = PyBytes_FromStringAndSize(NULL, size * 8)
    cdef char* end = PyBytes_AS_STRING(words)
    cdef int64_t word
    cdef Py_ssize_t i
    for i in range(size):
        if i >= len(hashes):
            raise RuntimeError("hashes changed while they were read")
        word = PyObject_Hash(hashes[i])
        memcpy(end + 8 * i, &word, 8)
    return words


def salted_texts(bytes words not None, uint64_t low, uint64_t high):
    """Return the ids of block hashes as decimal text.

    Parameters
    ----------
    words : bytes
        What `fingerprints` gave, of one or more lists.
    low, high : int
        The salt: two words of 64 bits.

    Returns
    -------
    bytes
        17 bytes a hash: sixteen digits and a comma.
    """
    cdef Py_ssize_t size = len(words) // 8
    cdef const char* start = PyBytes_AS_STRING(words)
    cdef bytes text = PyBytes_FromStringAndSize(NULL, size * C_TEXT_BYTES)
    cdef char* end = PyBytes_AS_STRING(text)
    cdef uint64_t word, digest
    cdef Py_ssize_t i
    for i in range(size):
        memcpy(&word, start + 8 * i, 8)
        digest = siphash(word, low, high)
        memcpy(end, digits[(digest & (GROUPS - 1)) + 1000], 4)
        memcpy(end + 4, digits[(digest >> GROUP_BITS) & (GROUPS - 1)], 4)
        memcpy(end + 8, digits[(digest >> 2 * GROUP_BITS) & (GROUPS - 1)], 4)
        memcpy(end + 12, digits[(digest >> 3 * GROUP_BITS) & (GROUPS - 1)], 4)
        end[16] = 44  # a comma
        end += C_TEXT_BYTES
    return text
