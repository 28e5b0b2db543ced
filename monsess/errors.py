"""The errors of monsess, in one tree.

::

    MonsessError (RuntimeError)
    ├── StepDefinitionError (TypeError)       a step function that cannot be compiled as one
    ├── BatchError (ValueError)               a batch that does not fit the devices or the step
    ├── FetchError (KeyError)                 a hook asked for an output that the step does not have
    ├── FeedConflictError                     two sources feed the same argument of the step
    ├── HookError (TypeError)                 an object that is not a usable hook
    ├── UnstorableLeafError (TypeError)       a state leaf that no checkpoint can hold
    ├── StateMismatchError (ValueError)       a stored state and the live one differ in structure
    ├── StateNotReadyError                    the state is not what ``Scaffold.ready_fn`` wants
    ├── DamagedCheckpointError                committed bytes that are no longer what was committed
    ├── StorageError (OSError)                the store could not be read, listed or written
    ├── SaveError                             an accepted save did not become a checkpoint
    ├── NonFiniteStateError                   the final state holds NaN or a new infinity
    ├── DirectoryInUseError                   another run owns the directory
    ├── InputPositionError                    the input cannot go on where the checkpoint says
    ├── ClusterError                          the processes are not what was expected
    ├── ReplicasDifferError                   devices hold different copies of the state
    ├── ProcessesDivergedError                processes run different programs
    ├── LeftAloneError                        a process left the loop at another step than its peers
    ├── PeerFailedError                       another process failed
    ├── SessionClosedError                    a method of a closed session was called
    ├── RunAfterStopError                     ``run`` was called after an agreed stop
    └── NanLossDuringTrainingError            a watched output is not finite

``EndOfData`` is a signal, not an error, and stands outside the tree. Errors raised by a user's step, hook or
input keep their own type; monsess only adds notes that say where they came from.

The base in brackets is the one that TensorFlow 1 code may already catch; where none is given it is ``RuntimeError``.
"""

from __future__ import annotations


class EndOfData(Exception):
    """The training input has ended: a clean end wherever it is raised inside a session.

    It may be raised by a step, a hook, a feed function or the data source. A bare ``StopIteration`` is never taken
    for it, so that an iterator that runs out elsewhere cannot end training by accident.

    Example:
        >>> import monsess as ms
        >>> issubclass(ms.EndOfData, ms.MonsessError)
        False
    """


class MonsessError(RuntimeError):
    """Base of every error that monsess raises on its own account.

    Example:
        >>> import monsess as ms
        >>> issubclass(ms.SaveError, ms.MonsessError)
        True
    """


class StepDefinitionError(MonsessError, TypeError):
    """A step function cannot be used as it is written: its signature, its outputs or the state it returns."""


class BatchError(MonsessError, ValueError):
    """A batch does not fit the local devices or its own leaves disagree; names leaf, shape and device count."""


class FetchError(MonsessError, KeyError):
    """A hook asked for an output that the step does not return; lists the outputs that there are."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class FeedConflictError(MonsessError):
    """Two hooks, or a hook and the caller or the input, feed the same argument of the step."""


class HookError(MonsessError, TypeError):
    """An object in the list of hooks is not a usable hook; found when the session is made."""


class UnstorableLeafError(MonsessError, TypeError):
    """The state holds a leaf that no checkpoint can store; names its path, found when the session is made."""


class StateMismatchError(MonsessError, ValueError):
    """A stored state differs from the one that ``init_fn`` describes; lists exactly the differing leaves."""


class StateNotReadyError(MonsessError):
    """``Scaffold.ready_fn`` says that the initialised or restored state is not ready to be trained."""


class DamagedCheckpointError(MonsessError):
    """A committed checkpoint no longer holds the bytes that were committed; names the step and the files."""


class StorageError(MonsessError, OSError):
    """The store could not be listed, read or written. It is never read as "there is nothing"."""


class SaveError(MonsessError):
    """A save that was accepted did not become a committed checkpoint; names the step."""


class NonFiniteStateError(MonsessError):
    """The state holds NaN, or infinity in a leaf that was finite at the start, and is therefore not committed."""


class DirectoryInUseError(MonsessError):
    """The checkpoint directory belongs to another run."""


class InputPositionError(MonsessError):
    """The input cannot continue at the position that the checkpoint holds."""


class ClusterError(MonsessError):
    """The processes found are not the ones that were expected."""


class ReplicasDifferError(MonsessError):
    """The devices hold different copies of the state, mostly for a forgotten ``pmean``; names the leaves."""


class ProcessesDivergedError(MonsessError):
    """The processes of one job run different programs."""


class LeftAloneError(MonsessError):
    """A process left the training loop at another step than its peers."""


class PeerFailedError(MonsessError):
    """Another process of the job failed; names it."""


class SessionClosedError(MonsessError):
    """A method of a session that is already closed was called."""


class RunAfterStopError(MonsessError):
    """``run`` was called although the session had agreed to stop."""


class NanLossDuringTrainingError(MonsessError):
    """A watched output became NaN or infinite."""

    def __init__(self, message: str = "NaN loss during training.") -> None:
        super().__init__(message)
