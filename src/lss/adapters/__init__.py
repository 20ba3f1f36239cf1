"""Models that were written without a thought of this library: what their attention, positions and losses are told."""
