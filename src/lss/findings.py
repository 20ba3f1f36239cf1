"""What is known of a model's code: what trials of it told, and where its calls made positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lss.callers import Caller
from lss.errors import ModelError
from lss.segment import Segment, Whole


@dataclass
class Findings:
    """About one parallelized model.

    Args:
        tried: What came of trying it in each way of calling it, for people.
        numbers_tokens: Whether what a place in code makes is a number for each token, as far as that was tried.
        keeps_positions: Whether a second call with as many tokens took up positions that the first had made.
        positions: Where the model's code made positions, and how they were made global, for people.
        come_by: Places in code that made positions in the present call.
    """

    tried: dict[str, str] = field(default_factory=dict)
    numbers_tokens: dict[Caller, bool] = field(default_factory=dict)
    keeps_positions: bool = False
    positions: dict[str, str] = field(default_factory=dict)
    come_by: set[Caller] = field(default_factory=set)
    _made_for: dict[Caller, Any] = field(default_factory=dict)

    def require_made(self, batch: Segment | Whole | None) -> None:
        """Raise ModelError if a call took up positions that were made for a batch which was cut in another way.

        Args:
            batch: Of the call, which is over.
        """
        if not self.keeps_positions or not isinstance(batch, Segment):
            return
        cut = batch.layout, batch.documents
        if any(other != cut for place, other in self._made_for.items() if place not in self.come_by):
            raise ModelError(
                f"the model keeps positions ({'; '.join(sorted(self.positions))}) and was called with a batch of "
                f"{batch.layout.length} tokens, after one that is cut otherwise: its rows would be those of that one",
                allowed="batches all of one length and with the same documents, where code keeps positions",
                remedy="pad batches to one length, or make positions in every call",
            )
        self._made_for.update(dict.fromkeys(self.come_by, cut))
