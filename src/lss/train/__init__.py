"""Training a model on bytes, evaluating it, and the files of a run."""

from lss.train.evaluate import evaluate_run
from lss.train.loop import train

__all__ = ["evaluate_run", "train"]
