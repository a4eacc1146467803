"""C++'s two Mersenne Twisters, drawn in blocks: the random numbers of Megatron's sentence maps.

``std::mt19937(seed)`` equals numpy's ``RandomState(seed)``; numpy lacks ``std::mt19937_64``, so it
is implemented here. A block of 312 numbers is computed from the previous one in two halves, since
the second half needs the first half's new numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_SIZE = 312
_MIDDLE = 156
_UPPER = np.uint64(0xFFFFFFFF80000000)
_LOWER = np.uint64(0x7FFFFFFF)
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_ONE = np.uint64(1)


def draw_uint32(seed: int, block: int) -> Iterator[np.ndarray]:
    """Blocks of ``std::mt19937(seed)``, endlessly."""
    random = np.random.RandomState(seed % 2**32)
    while True:
        yield random.randint(0, 2**32, size=block, dtype=np.uint32)


def draw_uint64(seed: int, block: int) -> Iterator[np.ndarray]:
    """Blocks of ``std::mt19937_64(seed)``, endlessly."""
    state = _seed_state(seed)
    states_per_block = -(-block // _SIZE)
    while True:
        raw = np.empty((states_per_block, _SIZE), dtype=np.uint64)
        for row in raw:
            _advance(state)
            row[:] = state
        yield _temper(raw.reshape(-1))


def _seed_state(seed: int) -> np.ndarray:
    word = seed % 2**64
    words = [word]
    for i in range(1, _SIZE):
        word = (6364136223846793005 * (word ^ (word >> 62)) + i) % 2**64
        words.append(word)
    return np.array(words, dtype=np.uint64)


def _advance(state: np.ndarray) -> None:
    state[:_MIDDLE] = state[_MIDDLE:] ^ _twist(state[:_MIDDLE], state[1 : _MIDDLE + 1])
    following = np.append(state[_MIDDLE + 1 :], state[0])
    state[_MIDDLE:] = state[:_MIDDLE] ^ _twist(state[_MIDDLE:], following)


def _twist(words: np.ndarray, following: np.ndarray) -> np.ndarray:
    mixed = (words & _UPPER) | (following & _LOWER)
    return (mixed >> _ONE) ^ ((mixed & _ONE) * _MATRIX)


def _temper(words: np.ndarray) -> np.ndarray:
    words ^= (words >> np.uint64(29)) & np.uint64(0x5555555555555555)
    words ^= (words << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    words ^= (words << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    words ^= words >> np.uint64(43)
    return words
