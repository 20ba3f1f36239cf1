"""What is compared: a strategy, and how it is set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast, get_args, get_type_hints

from lss.config import AttentionConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from lss.errors import ConfigError
from lss.strategies import STRATEGY_NAMES, StrategyName

_HINTS = get_type_hints(AttentionConfig)
# What may stand behind a strategy, and what it sets.
_SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"kernel": name} for name in get_args(_HINTS["kernel"])},
    **{name: {"gather": name} for name in get_args(_HINTS["gather"]) if name != "auto"},
    **{name: {"layout": name} for name in get_args(_HINTS["layout"])},
    "regather": {"keep": False},
    **{f"chunks={number}": {"chunks": number} for number in (2, 4, 8)},
}


@dataclass(frozen=True)
class Way:
    """A strategy, as it is run.

    Args:
        name: As it was asked for.
        strategy: As `parallel.strategy`.
        attention: How it is set.
    """

    name: str
    strategy: StrategyName
    attention: AttentionConfig

    @classmethod
    def of(cls, name: str) -> Way:
        """Such as `lss`, `lss/x`, `lss/kv/regather`, `ring/contiguous`.

        Raises:
            ConfigError: There is no such strategy or setting.
        """
        strategy, *settings = name.split("/")
        if strategy not in STRATEGY_NAMES:
            raise ConfigError(f"strategy {strategy!r}", allowed=", ".join(STRATEGY_NAMES))
        attention = AttentionConfig(layout="contiguous" if strategy == "lightseq" else "zigzag")
        for setting in settings:
            if setting not in _SETTINGS:
                raise ConfigError(f"{name}: setting {setting!r}", allowed=", ".join(_SETTINGS))
            attention = replace(attention, **_SETTINGS[setting])
        return cls(name, cast(StrategyName, strategy), attention)

    def num_ranks(self, num_ranks: int) -> int:
        """Of these, that take part."""
        return 1 if self.strategy == "serial" else num_ranks

    def config(self, preset: str, length: int, batch: int, num_ranks: int, device: str) -> Config:
        """Of a run of `lss train`."""
        parallel = ParallelConfig(self.num_ranks(num_ranks), 1, cast(Any, device), strategy=self.strategy)
        return Config(
            model=ModelConfig(cast(Any, preset)),
            data=DataConfig(length=length),
            parallel=parallel,
            attention=self.attention,
            train=TrainConfig(batch=batch),
        )
