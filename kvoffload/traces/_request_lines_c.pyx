"""Lines of a recording, compiled; see ``_request_lines_py`` for the Python twin, and for why."""

from time import monotonic_ns

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.object cimport PyObject_Hash
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy, strlen

cdef enum:
    GROUP_BITS = 13
    GROUPS = 1 << 13
    WORD_BYTES = 8
    C_ID_BYTES = 17  # sixteen digits and a comma
    C_LINE_BYTES = 145  # at most, of a line without its ids: 85 and three numbers of 20 digits
    MORE_TOKENS = 1  # bits of the first word
    HINTED = 2
    # More ids than this, some 0.02 ms, are written while other threads may run.
    MANY_BLOCKS = 2048

ID_BYTES = C_ID_BYTES
LINE_BYTES = C_LINE_BYTES

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


def packed(list hashes not None, int64_t more_tokens=0, int64_t said=0):
    """Return the time of a request and ``hash()`` of each block hash, 8 bytes each.

    In the machine's byte order: the monotonic clock, ns; `said`, unless it is 0; the hashes. The
    clock's last bit is `more_tokens`, the tokens of the request beyond those of its blocks, 0 or 1.
    The bit before it is set if `said` follows, the client's hints on its session: milliseconds
    until the next request, at most 2**53, 0 if unknown, times 2, plus 1 if the session ends.
    """
    cdef Py_ssize_t size = len(hashes)
    cdef bytes words = PyBytes_FromStringAndSize(NULL, (1 + (said != 0) + size) * WORD_BYTES)
    cdef char* end = PyBytes_AS_STRING(words)
    # Never before the recording began.
    cdef int64_t word = <int64_t>monotonic_ns() + 3 & -4 | more_tokens
    cdef Py_ssize_t i
    if said:
        word |= HINTED
    memcpy(end, &word, WORD_BYTES)
    if said:
        end += WORD_BYTES
        memcpy(end, &said, WORD_BYTES)
    for i in range(size):
        if i >= len(hashes):
            raise RuntimeError("hashes changed while they were read")
        word = PyObject_Hash(hashes[i])
        end += WORD_BYTES
        memcpy(end, &word, WORD_BYTES)
    return words


cdef inline char* put_text(char* end, const char* text) noexcept nogil:
    cdef size_t size = strlen(text)
    memcpy(end, text, size)
    return end + size


cdef char* put_digits(char* end, uint64_t value) noexcept nogil:
    cdef char[20] text
    cdef int first = 20
    while True:
        first -= 1
        text[first] = <char>(48 + value % 10)
        value //= 10
        if not value:
            break
    memcpy(end, &text[first], 20 - first)
    return end + 20 - first


cdef char* put_ids(
    char* end, const char* words, Py_ssize_t size, uint64_t low, uint64_t high
) noexcept nogil:
    """Write the ids of `size` hashed block hashes, a comma after each."""
    cdef uint64_t word, digest
    cdef Py_ssize_t i
    for i in range(size):
        memcpy(&word, words + i * WORD_BYTES, WORD_BYTES)
        digest = siphash(word, low, high)
        memcpy(end, digits[(digest & (GROUPS - 1)) + 1000], 4)
        memcpy(end + 4, digits[(digest >> GROUP_BITS) & (GROUPS - 1)], 4)
        memcpy(end + 8, digits[(digest >> 2 * GROUP_BITS) & (GROUPS - 1)], 4)
        memcpy(end + 12, digits[(digest >> 3 * GROUP_BITS) & (GROUPS - 1)], 4)
        end[16] = 44  # a comma
        end += C_ID_BYTES
    return end


cdef char* put_said(char* end, int64_t said) noexcept nogil:
    """Write the fields of a row for the client's hints on its session."""
    if said >> 1:
        end = put_text(end, b',"expect":')
        end = put_digits(end, said >> 1)
    if said & 1:
        end = put_text(end, b',"ends":true')
    return end


def request_lines(
    list requests not None, uint64_t low, uint64_t high, int64_t start, int64_t block_tokens
):
    """Return requests from `packed` as lines in the Mooncake format.

    The salt is two words of 64 bits; `start` is the start of the recording by the monotonic clock,
    ns; a block has at most 2**31 - 1 tokens. A line has at most `LINE_BYTES`, plus `ID_BYTES` per
    block.
    """
    cdef Py_ssize_t most = 0
    cdef Py_ssize_t blocks
    cdef bytes request
    for request in requests:
        blocks = len(request) // WORD_BYTES - 1
        most += C_LINE_BYTES + blocks * C_ID_BYTES
    cdef bytes text = PyBytes_FromStringAndSize(NULL, most)
    cdef char* begin = PyBytes_AS_STRING(text)
    cdef char* end = begin
    cdef const char* words
    cdef int64_t moment, said
    for request in requests:
        words = PyBytes_AS_STRING(request)
        blocks = len(request) // WORD_BYTES - 1
        memcpy(&moment, words, WORD_BYTES)
        words += WORD_BYTES
        said = 0
        if moment & HINTED:
            memcpy(&said, words, WORD_BYTES)
            words += WORD_BYTES
            blocks -= 1
        end = put_text(end, b'{"timestamp":')
        end = put_digits(end, (moment - start) // 1_000_000)
        end = put_text(end, b',"input_length":')
        end = put_digits(end, blocks * block_tokens + (moment & MORE_TOKENS))
        end = put_text(end, b',"output_length":0,"hash_ids":[')
        if blocks > MANY_BLOCKS:
            with nogil:
                end = put_ids(end, words, blocks, low, high)
        else:
            end = put_ids(end, words, blocks, low, high)
        if blocks:
            end -= 1  # without the last comma
        end = put_text(end, b"]")
        if said:
            end = put_said(end, said)
        end = put_text(end, b"}\n")
    return PyBytes_FromStringAndSize(begin, end - begin)
