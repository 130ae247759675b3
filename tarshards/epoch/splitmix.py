"""The hash behind every shuffle, for one Python integer; ``permutations`` has it for arrays, and needs numpy."""

from __future__ import annotations


def splitmix64(number: int) -> int:
    """Hash an integer to 64 bits, one to one (Steele, Lea and Flood 2014).

    >>> hex(splitmix64(0))
    '0xe220a8397b1dcdaf'
    """
    z = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)
