"""Which modules of a model are running, and which use of a place this is, in a recomputation too."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from lss.errors import ModelError


@dataclass
class Frame:
    """A module that is running.

    Args:
        name: Of the module.
        user: Of the module that holds it.
        entry: How many times it was entered before, in the present call of the model.
        uses: How often each place in it was used since.
    """

    name: str
    user: str
    entry: int
    uses: Counter[str] = field(default_factory=Counter)


class Frames:
    """The running modules of a model, outermost first, told by hooks."""

    def __init__(self) -> None:
        self.running: list[Frame] = []
        self._entries: Counter[str] = Counter()
        self._most: Counter[str] = Counter()  # entries of one call, over all calls
        self._known: dict[str, set[int]] = {}  # uses of each place

    def begin(self) -> None:
        """A call of the model begins."""
        self._entries.clear()

    def enter(self, name: str, user: str) -> None:
        """A module is entered.

        Args:
            name: Of the module.
            user: Of the module that holds it. A recomputation may be of a forward alone: then it is that one's.
        """
        if in_backward():
            if not self.running:
                self.running.append(Frame(user, "", 0))
            self.running.append(Frame(name, user, 0))
            return
        self.running.append(Frame(name, user, self._entries[name]))
        self._entries[name] += 1
        self._most[name] = max(self._most[name], self._entries[name])

    def resume(self) -> None:
        """A backward goes on, perhaps with a recomputation of something else."""
        self.running.clear()

    def leave(self, name: str) -> None:
        """It is left, by return or by an error."""
        if self.running and self.running[-1].name == name:
            self.running.pop()

    @property
    def innermost(self) -> str:
        """Name of the module whose own code is running; empty for the model itself, and where none is known."""
        return self.running[-1].name if self.running else ""

    def use(self, place: str, *, depth: int = 1) -> int:
        """A number of this use of a place, the same in a recomputation: 0 for the first one in a call of the model.

        Args:
            place: Name of a module, or of a function in it.
            depth: 1 if it belongs to the code of the innermost module, 2 if it is that module.

        Raises:
            ModelError: The use cannot be told from others in a recomputation.
        """
        if len(self.running) < depth:
            return self._only(place)
        user = self.running[-depth]
        number = user.uses[place]
        user.uses[place] += 1
        if in_backward() and self._most[user.name] > 1:
            raise ModelError(
                f"{user.name} is called {self._most[user.name]} times in a call of the model, and {place} in it draws "
                "masks in a recomputation, where they cannot be told apart",
                allowed="recomputation of modules that are called once, or dropout 0",
            )
        is_canonical = depth == 1 or self.running[-1].user == user.name
        is_first = is_canonical and not number and not user.entry
        found = 0 if is_first else 1 + number_of(f"{user.name} {user.entry} {place} {number}")
        self._known.setdefault(place, set()).add(found)
        return found

    def _only(self, place: str) -> int:
        """The only use of a place that is known, where its user is not: code recomputed apart from its module."""
        known = self._known.get(place, {0})
        if in_backward() and len(known) > 1:
            raise ModelError(
                f"{place} is used {len(known)} times, and recomputed apart from the module that uses it",
                allowed="recomputation of modules: checkpoint(block, x), not checkpoint(block.forward, x)",
            )
        return next(iter(known))


def user_of(model: nn.Module, name: str) -> str:
    """The module that calls another: the nearest one that holds it and is no list."""
    parent = name.rpartition(".")[0]
    while parent and isinstance(model.get_submodule(parent), nn.ModuleList | nn.ModuleDict):
        parent = parent.rpartition(".")[0]
    return parent


def is_within(name: str, modules: Iterable[str]) -> bool:
    """Whether a module is one of these, or in one of them."""
    return any(name == other or name.startswith(f"{other}.") for other in modules)


def number_of(said: str) -> int:
    """A number of 56 bits for a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=7).digest(), "little")


def in_backward() -> bool:
    """Whether a backward is running, as it is around the recomputation of activations."""
    return torch._C._current_graph_task_id() != -1
