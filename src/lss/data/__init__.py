"""Bytes as tokens: sources, splits and a sampler whose whole state is the step."""

from lss.data.sampler import Sampler, Window, windows
from lss.data.sources import Bytes, default_cache_folder, fingerprint, open_source, split

__all__ = ["Bytes", "Sampler", "Window", "default_cache_folder", "fingerprint", "open_source", "split", "windows"]
