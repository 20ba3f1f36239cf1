"""Measured side by side: one attention call or one training step, serially and over ranks."""

from lss.bench.command import BenchConfig, bench

__all__ = ["BenchConfig", "bench"]
