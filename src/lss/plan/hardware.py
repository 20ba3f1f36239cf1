"""What a machine can do: rates, memory and links, from a TOML file."""

from __future__ import annotations

import math
from argparse import ArgumentError
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Literal

import torch
from jsonargparse import ArgumentParser

from lss.errors import ConfigError
from lss.plan.trace import Operator

Algorithm = Literal["ring", "tree", "hierarchical"]
_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}
# Messages that need no algorithm: each goes straight to its rank.
DIRECT = ("send", "fetch", "all_to_all")
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


@dataclass(frozen=True)
class Link:
    """What connects ranks.

    Args:
        latency: Seconds of a message without content.
        bandwidth: Bytes a second, each way: of a rank inside of a node, of a whole node between nodes.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Rates:
    """What one rank computes.

    Args:
        product: Operations a second of large matrix products, by dtype (`fp32`, `bf16`, `fp64`).
        batched: The same of batched products of small ones; those of large ones where a dtype is not named.
        attention: The same of attention kernels.
        backward: Rate of an attention kernel's backward, as a share of its forward's.
        memory: Bytes a second of passes over memory.
        passes: The same of single operators, by name.
        operator: Seconds of the host for each operator, whatever its size.
        kernel: Seconds of the device for each operator, whatever its size.
    """

    product: dict[str, float]
    memory: float
    operator: float
    kernel: float = 0.0
    batched: dict[str, float] = field(default_factory=dict)
    attention: dict[str, float] = field(default_factory=dict)
    backward: float = 1.0
    passes: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Hardware:
    """A machine.

    Args:
        name: Of the machine.
        source: Where the figures are from.
        device: `cuda` or `cpu`: which kernels run, and how collectives are done.
        memory: Bytes of a rank that tensors may take.
        ranks_per_node: Ranks of a node.
        rates: Of a rank.
        node: The link between ranks of a node.
        between: The link of a node to the others.
        collectives: Algorithm of each collective: `ring`, `tree` or `hierarchical`.
        factors: How many times longer a collective takes than links and algorithm say; 1 where it is not named.
        overlap: Share of a collective's time that a rank can compute in.
        jitter: Standard deviation of the time that ranks take for the same work, as a share of it.
    """

    name: str
    source: str
    device: Literal["cuda", "cpu"]
    memory: float
    ranks_per_node: int
    rates: Rates
    node: Link
    between: Link
    collectives: dict[str, Algorithm] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    overlap: float = 1.0
    jitter: float = 0.0

    @classmethod
    def named(cls, given: str) -> Hardware:
        """One that is shipped, by name, or a file.

        Raises:
            ConfigError: There is none, or it cannot be understood.
        """
        path = shipped().get(given, Path(given))
        if given not in shipped() and not path.is_file():
            raise ConfigError(
                f"hardware {given!r}",
                allowed=f"{', '.join(sorted(shipped()))}, or a TOML file",
                remedy="lss calibrate writes one for this machine",
            )
        made = ArgumentParser(parser_mode="toml", exit_on_error=False)
        made.add_class_arguments(cls, as_group=False)
        try:
            read: Hardware = cls(**vars(made.instantiate(made.parse_path(str(path)))))
        except (OSError, ValueError, TypeError, ArgumentError) as error:
            told = " ".join(str(error).split())  # in one line
            raise ConfigError(
                f"hardware {given!r} cannot be read: {told}", allowed="the keys of a shipped file"
            ) from error
        read.check()
        return read

    def check(self) -> None:
        """Raise ConfigError unless all figures can be those of a machine."""
        self._check_names()
        speeds, times = self._figures()
        for name, value in (speeds | times).items():
            if not 0 <= value < math.inf or (name in speeds and value == 0):
                allowed = "a finite number above 0" if name in speeds else "0 or a finite number above it"
                raise ConfigError(f"{self.name}: {name} = {value}", allowed=allowed)
        if self.ranks_per_node < 1:
            raise ConfigError(f"{self.name}: ranks_per_node = {self.ranks_per_node}", allowed="at least 1")
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"{self.name}: overlap = {self.overlap}", allowed="from 0 to 1")

    def _check_names(self) -> None:
        """Of dtypes and collectives: a figure under another name would be read by nobody."""
        kinds, rates = set(_DTYPES.values()), self.rates
        if "fp32" not in rates.product:
            raise ConfigError(f"{self.name}: rates.product without fp32", allowed="fp32, and perhaps bf16 and fp64")
        tables = {f"rates.{name}": (getattr(rates, name), kinds) for name in ("product", "batched", "attention")}
        tables["collectives"] = (self.collectives, set(_OPERATIONS))
        tables["factors"] = (self.factors, {*_OPERATIONS, *DIRECT})
        for name, (given, known) in tables.items():
            if unknown := sorted(set(given) - known):
                raise ConfigError(f"{self.name}: {name}.{unknown[0]}", allowed=", ".join(sorted(known)))

    def _figures(self) -> tuple[dict[str, float], dict[str, float]]:
        """By key: those that have to be above 0, and those that may be 0."""
        rates = self.rates
        speeds = {"memory": self.memory, "rates.memory": rates.memory, "rates.backward": rates.backward}
        speeds |= {f"factors.{name}": factor for name, factor in self.factors.items()}
        for name in ("product", "batched", "attention", "passes"):
            speeds |= {f"rates.{name}.{key}": rate for key, rate in getattr(rates, name).items()}
        times = {"rates.operator": rates.operator, "rates.kernel": rates.kernel, "jitter": self.jitter}
        for name, link in (("node", self.node), ("between", self.between)):
            speeds[f"{name}.bandwidth"], times[f"{name}.latency"] = link.bandwidth, link.latency
        return speeds, times

    def seconds(self, operator: Operator) -> float:
        """Of the device, for one operator."""
        rates = self.rates
        passing = operator.moved / rates.passes.get(operator.name, rates.memory)
        if operator.work == "pass":
            return rates.kernel + passing
        kind = _DTYPES.get(operator.dtype, "fp32")
        rate = rates.product.get(kind, rates.product["fp32"])
        if operator.work == "batched":
            rate = rates.batched.get(kind, rate)
        if operator.work == "attention":
            rate = rates.attention.get(kind, rate) * (rates.backward if "backward" in operator.name else 1.0)
        return rates.kernel + max(operator.flops / rate, operator.moved / rates.memory)

    def peak_rate(self, dtype: str) -> float:
        """Operations a second of a rank's large matrix products."""
        return self.rates.product.get(dtype, self.rates.product["fp32"])


def shipped() -> dict[str, Path]:
    """Files of the machines that come with the package, by name."""
    folder = Path(str(resources.files("lss.plan"))) / "machines"
    return {path.stem: path for path in folder.glob("*.toml")}
