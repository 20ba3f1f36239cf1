"""Strategies side by side: the same model, batch and step, in turn, on the same ranks."""
