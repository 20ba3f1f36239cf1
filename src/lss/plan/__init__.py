"""What a run would take, from one rank's real step on tensors without values: bytes, operations, messages, seconds."""

from lss.plan.hardware import Hardware
from lss.plan.plan import make_plan
from lss.plan.result import Plan, WhatIf
from lss.plan.setup import Setup

__all__ = ["Hardware", "Plan", "Setup", "WhatIf", "make_plan"]
