"""What is known of a model's code: what trials of it told, and where its calls made positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lss.callers import Caller
from lss.errors import ModelError
from lss.segment import Segment


@dataclass
class Findings:
    """About one parallelized model.

    Args:
        tried: What came of trying it in each way of calling it, for people.
        numbers_tokens: Whether what a place in code makes is a number for each token, as far as that was tried.
        keeps_positions: Whether a second call with as many tokens took up positions that the first had made.
        positions: Where the model's code made positions, and how they were made global, for people.
        come_by: Places in code that made positions in the present call.
        segment: That of the tokens which were cut last.
    """

    tried: dict[str, str] = field(default_factory=dict)
    numbers_tokens: dict[Caller, bool] = field(default_factory=dict)
    keeps_positions: bool = False
    positions: dict[str, str] = field(default_factory=dict)
    come_by: set[Caller] = field(default_factory=set)
    segment: Segment | None = None
    _made_for: dict[Caller, Any] = field(default_factory=dict)

    def require_made(self) -> None:
        """Raise ModelError if a call, now over, took up positions that were made for a batch cut in another way."""
        if not self.keeps_positions or self.segment is None:
            return
        cut = self.segment.layout, self.segment.documents
        if any(other != cut for place, other in self._made_for.items() if place not in self.come_by):
            raise ModelError(
                f"the model keeps positions ({'; '.join(sorted(self.positions))}) and was called with a batch of "
                f"{self.segment.layout.length} tokens, after one cut otherwise: they would be those of that one",
                allowed="batches all of one length and with the same documents, where code keeps positions",
                remedy="pad batches to one length, in evaluation too, or make positions in every call",
            )
        self._made_for.update(dict.fromkeys(self.come_by, cut))
