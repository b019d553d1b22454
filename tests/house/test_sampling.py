"""Who is sampled is decided by a keyed hash alone, so that chosen keys do not steer a sample.

``kvoffload/_sampling.py`` and ``_core/hash.h`` define that hash. Anything else that could choose a
sample is looked for in every source of the package, in two ways:

* a *mixing constant*, a whole number above 2**32 that is neither a mask nor a power of two, or one
  that hash functions are known by, in any file that is not listed with what it is for;
* in a file that speaks of a sample outside of a listed sense, a call that hashes without a key:
  ``hash(``, a digest or checksum from a library, or a whole number read from bytes.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvoffload"

if not PACKAGE.is_dir():
    pytest.skip("the source tree is not beside the tests", allow_module_level=True)

DEFINITIONS = {"_sampling.py", "_core/hash.h"}

SCATTERS = {
    "_core/xxh3.h": "checksums of stored bytes",
    "traces/_request_lines_c.pyx": "SipHash of recorded ids, with a random key",
    "traces/_request_lines_py.py": "SipHash of recorded ids, with a random key",
    "traces/merged.py": "ids of several files, kept apart",
}
"""Files with mixing constants that choose no sample, and their purpose."""

NUMBERED = {
    "cli/_sources.py": "prompts that are looked at for what breaks prefixes",
    "integrations/lmcache/adapter.py": "values of metrics",
    "testing/tiers.py": "draws of tests",
    "tiers/namespace.py": "pieces of a model's files, by their place",
}
"""Files that speak of samples in another sense, and that sense."""

SMALL_PRIMES = {0x01000193, 0x811C9DC5, 0x85EBCA6B, 0xC2B2AE35, 0x9E3779B1, 0x85EBCA77}
"""Constants of FNV, MurmurHash, xxHash and Knuth that have 32 bits or fewer."""
NUMBER = re.compile(r"(?<![\w.])(0x[0-9A-Fa-f_]+|\d[\d_]*)[uUlL]*\b")
UNKEYED = re.compile(
    r"(?<![\w.])hash\(|\b(?:crc32|adler32|md5|sha\d+|sha3_\d+|xxh\w*|murmur\w*|fnv\w*)\("
    r"|\bblake2[bs]\((?![^)]*\bkey=)|\bfrom_bytes\("
)
SAMPLE = re.compile(r"sampl", re.IGNORECASE)


def sources() -> dict[str, str]:
    """Return the text of each source, without what Cython generates, by its path."""
    found = {}
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in {".py", ".pyx", ".pxd", ".pyi", ".h"}:
            found[path.relative_to(PACKAGE).as_posix()] = path.read_text(encoding="utf-8")
    return found


def is_mixing(value: int) -> bool:
    """Return whether a number is of the kind that hashes multiply or add."""
    is_mask = value & value + 1 == 0 or value & value - 1 == 0
    is_decimal = not value % 10**6
    return value in SMALL_PRIMES or (value > 2**32 and not is_mask and not is_decimal)


def number_of(literal: str) -> int:
    """Return the value of a literal, or of digits in a text."""
    digits = literal.replace("_", "")
    return int(digits, 16 if digits[:2] in {"0x", "0X"} else 10)


def test_no_other_file_has_a_constant_of_a_hash() -> None:
    numbers = {path: map(number_of, NUMBER.findall(text)) for path, text in sources().items()}
    found = {path for path, values in numbers.items() if any(map(is_mixing, values))}
    assert found - DEFINITIONS == SCATTERS.keys()


def test_where_there_is_a_sample_nothing_is_hashed_without_a_key() -> None:
    sampling = {path: text for path, text in sources().items() if SAMPLE.search(text)}
    found = {path for path, text in sampling.items() if UNKEYED.search(text)}
    assert found - DEFINITIONS == NUMBERED.keys()
