"""Kubernetes' notations: quantities and the forms of names."""

from __future__ import annotations

import re

SUFFIXES = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15} | {
    f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("KMGTP", 1)
}
QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-zA-Z]*)")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
DNS_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
VARIABLE = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")


def parse_quantity(text: str) -> float:
    """Return the number that a quantity stands for; raise ValueError for what is none.

    >>> parse_quantity("500m"), parse_quantity("4Gi"), parse_quantity("1.5")
    (0.5, 4294967296.0, 1.5)
    """
    match = QUANTITY.fullmatch(str(text))
    if match is None or match[2] not in SUFFIXES:
        raise ValueError(f"{text!r} is no quantity; write it like 2, 500m, 4Gi or 10G")
    return float(match[1]) * SUFFIXES[match[2]]


def is_label_key(text: str) -> bool:
    """Say whether *text* is the key of a label: a name of at most 63 characters, perhaps after a domain and a slash.

    >>> is_label_key("team"), is_label_key("example.com/team"), is_label_key("a b")
    (True, True, False)
    """
    domain, slash, name = text.rpartition("/")
    return bool(name and LABEL_VALUE.fullmatch(name) and (not slash or DNS_SUBDOMAIN.fullmatch(domain)))
