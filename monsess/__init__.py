"""monsess: the monitored training session for JAX."""

from importlib.metadata import version

from monsess import summary as summary
from monsess import testing as testing
from monsess.agreement import StopReason as StopReason
from monsess.checkpoint import CheckpointOptions as CheckpointOptions
from monsess.checkpoint import CheckpointStore as CheckpointStore
from monsess.checkpoint import KeepBest as KeepBest
from monsess.checkpoint import KeepEvery as KeepEvery
from monsess.checkpoint import KeepLast as KeepLast
from monsess.checkpoint import Retention as Retention
from monsess.checkpoint import StepRecord as StepRecord
from monsess.checkpoint import latest_checkpoint as latest_checkpoint
from monsess.checkpoint import load_checkpoint as load_checkpoint
from monsess.cluster_spec import ClusterSpec as ClusterSpec
from monsess.collectives import allgather as allgather
from monsess.collectives import allreduce as allreduce
from monsess.collectives import broadcast as broadcast
from monsess.coordinator import Coordinator as Coordinator
from monsess.coordinator import LooperThread as LooperThread
from monsess.data import repeat as repeat
from monsess.errors import BatchError as BatchError
from monsess.errors import ClusterError as ClusterError
from monsess.errors import DamagedCheckpointError as DamagedCheckpointError
from monsess.errors import DirectoryInUseError as DirectoryInUseError
from monsess.errors import EndOfData as EndOfData
from monsess.errors import FeedConflictError as FeedConflictError
from monsess.errors import FetchError as FetchError
from monsess.errors import HookError as HookError
from monsess.errors import InputPositionError as InputPositionError
from monsess.errors import LeftAloneError as LeftAloneError
from monsess.errors import MonsessError as MonsessError
from monsess.errors import NanLossDuringTrainingError as NanLossDuringTrainingError
from monsess.errors import NonFiniteStateError as NonFiniteStateError
from monsess.errors import PeerFailedError as PeerFailedError
from monsess.errors import ProcessesDivergedError as ProcessesDivergedError
from monsess.errors import ReplicasDifferError as ReplicasDifferError
from monsess.errors import RunAfterStopError as RunAfterStopError
from monsess.errors import SaveError as SaveError
from monsess.errors import SessionClosedError as SessionClosedError
from monsess.errors import StateMismatchError as StateMismatchError
from monsess.errors import StateNotReadyError as StateNotReadyError
from monsess.errors import StepDefinitionError as StepDefinitionError
from monsess.errors import StorageError as StorageError
from monsess.errors import UnstorableLeafError as UnstorableLeafError
from monsess.evaluation import EvaluationResult as EvaluationResult
from monsess.evaluation import Evaluator as Evaluator
from monsess.hook import SessionRunArgs as SessionRunArgs
from monsess.hook import SessionRunContext as SessionRunContext
from monsess.hook import SessionRunHook as SessionRunHook
from monsess.hook import SessionRunValues as SessionRunValues
from monsess.hooks import BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook
from monsess.hooks import CheckpointSaverHook as CheckpointSaverHook
from monsess.hooks import CheckpointSaverListener as CheckpointSaverListener
from monsess.hooks import EarlyStoppingHook as EarlyStoppingHook
from monsess.hooks import EvaluationHook as EvaluationHook
from monsess.hooks import FeedFnHook as FeedFnHook
from monsess.hooks import FinalOpsHook as FinalOpsHook
from monsess.hooks import GlobalStepWaiterHook as GlobalStepWaiterHook
from monsess.hooks import GoodputHook as GoodputHook
from monsess.hooks import LoggingTensorHook as LoggingTensorHook
from monsess.hooks import MLflowHook as MLflowHook
from monsess.hooks import NanTensorHook as NanTensorHook
from monsess.hooks import ProfilerHook as ProfilerHook
from monsess.hooks import ProgressBarHook as ProgressBarHook
from monsess.hooks import ReplicaCheckHook as ReplicaCheckHook
from monsess.hooks import StepCounterHook as StepCounterHook
from monsess.hooks import StopAfterNEvalsHook as StopAfterNEvalsHook
from monsess.hooks import StopAtStepHook as StopAtStepHook
from monsess.hooks import StopAtTimeHook as StopAtTimeHook
from monsess.hooks import SummarySaverHook as SummarySaverHook
from monsess.hooks import WandbHook as WandbHook
from monsess.hooks import WatchdogHook as WatchdogHook
from monsess.hooks import make_early_stopping_hook as make_early_stopping_hook
from monsess.hooks import stop_if_higher_hook as stop_if_higher_hook
from monsess.hooks import stop_if_lower_hook as stop_if_lower_hook
from monsess.hooks import stop_if_no_decrease_hook as stop_if_no_decrease_hook
from monsess.hooks import stop_if_no_increase_hook as stop_if_no_increase_hook
from monsess.new_checkpoints import checkpoints_iterator as checkpoints_iterator
from monsess.new_checkpoints import wait_for_new_checkpoint as wait_for_new_checkpoint
from monsess.optim import DistributedOptimizer as DistributedOptimizer
from monsess.optim import linear_scaled_lr as linear_scaled_lr
from monsess.records import Attempt as Attempt
from monsess.records import Metrics as Metrics
from monsess.records import Point as Point
from monsess.records import read_metrics as read_metrics
from monsess.recovery import Recovery as Recovery
from monsess.scaffold import Scaffold as Scaffold
from monsess.server import Server as Server
from monsess.session import MonitoredSession as MonitoredSession
from monsess.session import StepContext as StepContext
from monsess.signals import request_preemption as request_preemption
from monsess.spmd import masked_mean as masked_mean
from monsess.spmd import per_device_key as per_device_key
from monsess.step import eval_step as eval_step
from monsess.step import train_step as train_step
from monsess.timer import SecondOrStepTimer as SecondOrStepTimer
from monsess.training_session import MonitoredTrainingSession as MonitoredTrainingSession

__version__ = version("monsess")

__all__ = [
    "Attempt",
    "BatchError",
    "BroadcastGlobalVariablesHook",
    "CheckpointOptions",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "CheckpointStore",
    "ClusterError",
    "ClusterSpec",
    "Coordinator",
    "DamagedCheckpointError",
    "DirectoryInUseError",
    "DistributedOptimizer",
    "EarlyStoppingHook",
    "EndOfData",
    "EvaluationHook",
    "EvaluationResult",
    "Evaluator",
    "FeedConflictError",
    "FeedFnHook",
    "FetchError",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "GoodputHook",
    "HookError",
    "InputPositionError",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "LeftAloneError",
    "LoggingTensorHook",
    "LooperThread",
    "MLflowHook",
    "Metrics",
    "MonitoredSession",
    "MonitoredTrainingSession",
    "MonsessError",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "NonFiniteStateError",
    "PeerFailedError",
    "Point",
    "ProcessesDivergedError",
    "ProfilerHook",
    "ProgressBarHook",
    "Recovery",
    "ReplicaCheckHook",
    "ReplicasDifferError",
    "Retention",
    "RunAfterStopError",
    "SaveError",
    "Scaffold",
    "SecondOrStepTimer",
    "Server",
    "SessionClosedError",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StateMismatchError",
    "StateNotReadyError",
    "StepContext",
    "StepCounterHook",
    "StepDefinitionError",
    "StepRecord",
    "StopAfterNEvalsHook",
    "StopAtStepHook",
    "StopAtTimeHook",
    "StopReason",
    "StorageError",
    "SummarySaverHook",
    "UnstorableLeafError",
    "WandbHook",
    "WatchdogHook",
    "__version__",
    "allgather",
    "allreduce",
    "broadcast",
    "checkpoints_iterator",
    "eval_step",
    "latest_checkpoint",
    "linear_scaled_lr",
    "load_checkpoint",
    "make_early_stopping_hook",
    "masked_mean",
    "per_device_key",
    "read_metrics",
    "repeat",
    "request_preemption",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
    "summary",
    "testing",
    "train_step",
    "wait_for_new_checkpoint",
]
