"""Proof that a model over ranks computes what it computes on one device."""

from lss.verify.compare import Check, Report
from lss.verify.run import verify

__all__ = ["Check", "Report", "verify"]
