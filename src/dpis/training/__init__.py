"""The training loop: records, checkpoints, evaluation, and what is released at the end."""

from dpis.training.api import train
from dpis.training.averaging import WeightAverage
from dpis.training.evaluation import HeldOut
from dpis.training.interrupt import InterruptedRunError
from dpis.training.records import Records
from dpis.training.result import Result
from dpis.training.run import Run, RunOptions
from dpis.training.task import EarlyStop, Task
from dpis.training.trainer import Trainer

__all__ = [
    "EarlyStop",
    "HeldOut",
    "InterruptedRunError",
    "Records",
    "Result",
    "Run",
    "RunOptions",
    "Task",
    "Trainer",
    "WeightAverage",
    "train",
]
