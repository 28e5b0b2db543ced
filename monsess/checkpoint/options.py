"""How checkpoints are made and chosen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How a session makes checkpoints and which one it restores.

    Args:
        snapshot: ``"device"``: a copy of the state is made on the device and the training thread does not wait for
            it; ``"host"``: the training thread waits until the state has reached the host, for want of device memory.
        save_timeout_secs: Seconds after which a save that is not committed is an error; also the bound of every wait
            for one.
        staging_dir: Local directory for files on their way to or from a remote store; None for the system's own. On
            a local path the files are made inside the checkpoint directory itself.
        check_finite: True: a state with NaN, or with infinity in a leaf that had none at the start, is not committed.
            False: no check. A callable ``(path, array) -> bool``: called with every array and float leaf, decides
            whether it is fit to be committed.
        strict: A damaged newest checkpoint is an error; otherwise the one before is taken.
        convert: Cast dtypes, and Python scalars to arrays and back, where the stored state differs from the live one.
        restore_step: The step to restore; None for the newest.
        newer: What happens to steps newer than ``restore_step``: ``"refuse"`` to start, or move them ``"aside"``.

    Example:
        >>> import monsess as ms
        >>> ms.CheckpointOptions(save_timeout_secs=60).strict
        False
    """

    snapshot: Literal["device", "host"] = "device"
    save_timeout_secs: float = 300.0
    staging_dir: str | None = None
    check_finite: bool | Callable[[str, np.ndarray], bool] = True
    strict: bool = False
    convert: bool = False
    restore_step: int | None = None
    newer: Literal["refuse", "aside"] = "refuse"

    def __post_init__(self) -> None:
        if self.snapshot not in ("device", "host"):
            raise ValueError(f"snapshot must be 'device' or 'host', found {self.snapshot!r}.")
        if self.newer not in ("refuse", "aside"):
            raise ValueError(f"newer must be 'refuse' or 'aside', found {self.newer!r}.")
        seconds = self.save_timeout_secs
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise ValueError(f"save_timeout_secs must be a positive number of seconds, found {seconds!r}.")
        step = self.restore_step
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise ValueError(f"restore_step must be None or a step number from 0 on, found {step!r}.")
        if not isinstance(self.check_finite, bool) and not callable(self.check_finite):
            raise ValueError(f"check_finite must be True, False or a callable, found {self.check_finite!r}.")
