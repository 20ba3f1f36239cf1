"""The errors that a user can cause and mend; each says what was given, what is allowed and what to do."""

from __future__ import annotations


class LssError(Exception):
    """Base of all errors that `lss` raises for bad input or a broken run.

    Args:
        given: What was given or what happened, with the offending value.
        allowed: What would have been right.
        remedy: What the user can do about it.
    """

    exit_code = 2
    on_all_ranks = False  # whether every rank ends with this error, so that one may speak for all

    def __init__(self, given: str, *, allowed: str = "", remedy: str = "") -> None:
        self.given, self.allowed, self.remedy = given, allowed, remedy
        lines = [given, allowed and f"  allowed: {allowed}", remedy and f"  do this: {remedy}"]
        super().__init__("\n".join(line for line in lines if line))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the keyword arguments, so that an error can travel between ranks."""
        return _rebuild, (type(self), self.given, self.allowed, self.remedy)


def _rebuild(kind: type[LssError], given: str, allowed: str, remedy: str) -> LssError:
    return kind(given, allowed=allowed, remedy=remedy)


class ConfigError(LssError):
    """A key, flag or value of the configuration is wrong."""


class MeshError(LssError):
    """The degrees do not fit the world, or the launcher's environment is incomplete."""


class LayoutError(LssError):
    """A tensor does not fit the layout, or the batch was not sharded."""


class MaskError(LssError):
    """A mask or a bias of attention cannot be honoured, or does not fit the batch."""


class KernelError(LssError):
    """A kernel of attention that was asked for by name cannot do what is asked of it."""


class ModelError(LssError):
    """The model holds something that cannot be honoured over segments."""


class DataError(LssError):
    """A data source is missing, empty, too short, or not what it should be."""


class RunError(LssError):
    """A run folder cannot be used as asked."""


class ReplicaError(LssError):
    """Ranks that share a parameter hold different values of it."""

    exit_code = 4


class DifferentError(LssError):
    """A run over ranks differs from the serial one."""

    exit_code = 4


class RankLostError(LssError):
    """A collective failed because another rank ended or cannot be reached."""

    exit_code = 3
