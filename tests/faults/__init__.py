"""Faults that other systems had, or might have, put into this one, one at a time. Each is a context manager."""

from tests.faults import attention, averaging, collectives, dropout, loss, positions, use
from tests.faults.registry import FAULTS, nothing

__all__ = ["FAULTS", "attention", "averaging", "collectives", "dropout", "loss", "nothing", "positions", "use"]
