"""Seconds of a collective on the links of a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lss.plan.hardware import DIRECT, Algorithm, Hardware


@dataclass(frozen=True)
class Group:
    """The ranks of a collective, as they lie on nodes.

    Args:
        size: N, ranks of the group.
        per_node: Of these, on one node.
        rivals: Groups whose messages share a node's link to the others.
    """

    size: int
    per_node: int
    rivals: int

    @classmethod
    def of(cls, size: int, stride: int, num_ranks: int, ranks_per_node: int) -> Group:
        """Ranks as 0, stride, 2 * stride, ... of a world: of such groups the one that lies on most nodes.

        Args:
            size: N.
            stride: From one rank of the group to the next: 1 for sequence groups, N for data groups.
            num_ranks: Of the world.
            ranks_per_node: Of a node.
        """
        on_node = min(num_ranks, ranks_per_node)
        if stride > 1:
            per_node = max(1, min(size, ranks_per_node // stride))
            return cls(size, per_node, max(1, on_node // per_node))
        firsts = {start % ranks_per_node for start in range(0, min(num_ranks, size * ranks_per_node), size)}
        nodes = max(math.ceil((first + size) / ranks_per_node) for first in firsts)
        return cls(size, math.ceil(size / nodes), 1 if firsts == {0} else 2)  # two groups at the edge of a node

    @property
    def num_nodes(self) -> int:
        """Nodes that the group lies on."""
        return math.ceil(self.size / self.per_node)


def seconds(hardware: Hardware, operation: str, num_bytes: float, group: Group) -> float:
    """Of one collective.

    Args:
        hardware: The machine.
        operation: As of the ledger.
        num_bytes: V, that one rank sends in the ring form: (N - 1) / N of the whole, twice that for an all-reduce.
        group: Who takes part.
    """
    if group.size == 1:
        return 0.0
    factor = hardware.factors.get(operation, 1.0)
    if operation in DIRECT:
        return factor * _direct(hardware, operation, num_bytes, group)
    rounds = 2 if operation == "all_reduce" else 1
    algorithm = hardware.collectives.get(operation, "ring")
    return factor * rounds * _one_way(hardware, algorithm, num_bytes / rounds, group)


def _direct(hardware: Hardware, operation: str, num_bytes: float, group: Group) -> float:
    """Seconds in which every rank sends as many bytes to others: to its neighbour, to one far away, or to all.

    Of neighbours one a node sends to another node, for every group; of ranks that are far from each other all do.
    """
    node, between, others = hardware.node, hardware.between, group.size - 1
    steps = others if operation == "all_to_all" else 1
    if group.num_nodes == 1:
        return steps * node.latency + num_bytes / node.bandwidth
    leaving = group.rivals * (1 if operation == "send" else group.per_node)
    share = (group.size - group.per_node) / others if operation == "all_to_all" else 1.0
    seconds_out = num_bytes * share * leaving / between.bandwidth
    return steps * max(node.latency, between.latency) + max(num_bytes / node.bandwidth, seconds_out)


def _one_way(hardware: Hardware, algorithm: Algorithm, num_bytes: float, group: Group) -> float:
    """Seconds in which every rank receives `num_bytes`.

    Ring: N - 1 steps of the slowest link, and each link carries everything once, those between nodes for every group
    on a node. Tree: log2 N steps, and as many bytes. Hierarchical: rings between nodes, one for each rank of a node
    and its share, and rings inside in which it goes on as it arrives.
    """
    node, between = hardware.node, hardware.between
    if group.num_nodes == 1:
        steps = math.log2(group.size) if algorithm == "tree" else group.size - 1
        return steps * node.latency + num_bytes / node.bandwidth
    inside, outside = num_bytes / node.bandwidth, num_bytes * group.rivals / between.bandwidth
    if algorithm == "hierarchical":
        steps_out, steps_in = group.num_nodes - 1, group.per_node - 1
        share = steps_in / group.per_node
        return steps_out * between.latency + steps_in * node.latency + max(outside, inside * share)
    steps = math.log2(group.size) if algorithm == "tree" else group.size - 1
    return steps * max(node.latency, between.latency) + max(inside, outside)
