"""The built-in hooks, one module per family; all of them are exported by `monsess` too."""

from __future__ import annotations

from monsess.hooks.broadcast import BroadcastGlobalVariablesHook
from monsess.hooks.early_stopping import (
    EarlyStoppingHook,
    make_early_stopping_hook,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from monsess.hooks.evaluation import EvaluationHook
from monsess.hooks.feed import FeedFnHook
from monsess.hooks.final_ops import FinalOpsHook
from monsess.hooks.goodput import GoodputHook
from monsess.hooks.log_values import LoggingTensorHook
from monsess.hooks.nan import NanTensorHook
from monsess.hooks.profiler import ProfilerHook
from monsess.hooks.progress_bar import ProgressBarHook
from monsess.hooks.replica_check import ReplicaCheckHook
from monsess.hooks.saver import CheckpointSaverHook, CheckpointSaverListener
from monsess.hooks.step_counter import StepCounterHook
from monsess.hooks.stop_after_n_evals import StopAfterNEvalsHook
from monsess.hooks.stop_at_step import StopAtStepHook
from monsess.hooks.stop_at_time import StopAtTimeHook
from monsess.hooks.summary_saver import SummarySaverHook
from monsess.hooks.trackers import MLflowHook, WandbHook
from monsess.hooks.waiter import GlobalStepWaiterHook
from monsess.hooks.watchdog import WatchdogHook

__all__ = [
    "BroadcastGlobalVariablesHook",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "EarlyStoppingHook",
    "EvaluationHook",
    "FeedFnHook",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "GoodputHook",
    "LoggingTensorHook",
    "MLflowHook",
    "NanTensorHook",
    "ProfilerHook",
    "ProgressBarHook",
    "ReplicaCheckHook",
    "StepCounterHook",
    "StopAfterNEvalsHook",
    "StopAtStepHook",
    "StopAtTimeHook",
    "SummarySaverHook",
    "WandbHook",
    "WatchdogHook",
    "make_early_stopping_hook",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
]
