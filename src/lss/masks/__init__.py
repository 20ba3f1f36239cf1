"""Who sees whom: masks as small objects of global positions, which combine by `&` and `|`.

A mask answers two questions. On the host, for a block of queries and keys: does every query see every key, or none any
(`view`)? So blocks that are empty are never computed, and full ones without a mask. And for the few blocks that are
neither: which pairs exactly (`pairs`)? Positions are indices in the whole sequence, whatever rank holds them.
"""

from lss.masks.band import Causal, Full, Window
from lss.masks.base import Both, Either, Mask, View, require_mask
from lss.masks.pairs import Dense, Function
from lss.masks.spans import Documents, Padding, Prefix

__all__ = [
    "Both",
    "Causal",
    "Dense",
    "Documents",
    "Either",
    "Full",
    "Function",
    "Mask",
    "Padding",
    "Prefix",
    "View",
    "Window",
    "require_mask",
]
