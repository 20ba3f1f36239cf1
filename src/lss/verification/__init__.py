"""Proof that a model over ranks computes what it computes on one device."""

from lss.verification.compare import Check, Report
from lss.verification.verify import verify

__all__ = ["Check", "Report", "verify"]
