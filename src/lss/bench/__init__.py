"""Measured side by side: one attention call or one training step, serially and over ranks."""
