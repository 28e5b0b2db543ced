"""How a session begins: the chief restores or initialises the state, and all processes get its bits."""

from __future__ import annotations

from typing import Any, NamedTuple

from monsess.checkpoint import CheckpointOptions
from monsess.checkpoint.restore import Restored
from monsess.errors import MonsessError, StateMismatchError
from monsess.initial_state import initial_state
from monsess.job import Job
from monsess.layout import Layout
from monsess.placement import on_first_device, place
from monsess.saving import Saving
from monsess.scaffold import Scaffold
from monsess.shared_state import receive_state, send_state

_PARTS = ("hooks", "hooks_of_each_process", "input")


class Beginning(NamedTuple):
    """What a session begins with.

    Args:
        restored: The checkpoint, or None for a fresh start.
        state: Placed on the local devices; the same bits in all processes.
    """

    restored: Restored | None
    state: Any

    @property
    def step(self) -> int:
        """The global step."""
        return 0 if self.restored is None else self.restored.step

    @property
    def input_position(self) -> Any:
        """Where the input goes on, as the checkpoint holds it."""
        return None if self.restored is None else self.restored.session.get("input")

    def hook_states(self, job: Job) -> dict[str, Any]:
        """What the checkpoint holds for this process's hooks.

        Raises:
            StateMismatchError: A hook has one state for each of another number of processes.
        """
        if self.restored is None:
            return {}
        session = self.restored.session
        of_each = session.get("hooks_of_each_process") or []
        if any(of_each) and len(of_each) != job.process_count:
            names = sorted({key for states in of_each for key in states})
            raise StateMismatchError(
                f"The checkpoint holds a state for each of {len(of_each)} processes for the hooks {', '.join(names)} "
                f"(per_process_state), and {job.process_count} are running. Run as many as then, or leave these hooks "
                "out."
            )
        return {**session["hooks"], **(of_each[job.process_index] if of_each else {})}


def begin(
    job: Job, saving: Saving, scaffold: Scaffold, options: CheckpointOptions, layout: Layout, again: bool, fresh: bool
) -> Beginning:
    """Restore or initialise the state; the chief does it, and gives it to all.

    Args:
        job: The processes.
        saving: Finds the checkpoint.
        scaffold: Describes and makes the state.
        options: Which step to restore, and how.
        layout: The local devices.
        again: This is a recovery, which goes back to the newest step, whichever the session was told to begin with.
        fresh: A recovery without a checkpoint may start from step 0.

    Raises:
        MonsessError: There is no checkpoint to recover from.
        StateMismatchError: The checkpoint has another structure.
    """
    if not job.is_chief:
        about, received = receive_state(job)
        saving.join_lineage(about)
        state = place(initial_state(scaffold, received, CheckpointOptions()), layout)
        return Beginning(None if about["step"] is None else received, state)
    restored = saving.find(None if again else options.restore_step)
    if restored is None and again and not fresh:
        where = "Pass checkpoint_dir=" if saving.store is None else "Save more often"
        raise MonsessError(
            f"There is no checkpoint to recover from yet. {where}, or allow starting again from step 0 with "
            "Recovery(allow_reinit=True)."
        )
    state = place(initial_state(scaffold, restored, options), layout)
    if job.process_count > 1:
        session = None if restored is None else {name: restored.session.get(name) for name in _PARTS}
        about = {"step": None if restored is None else restored.step, "session": session, **saving.lineage()}
        send_state(job, on_first_device(state), about)
    return Beginning(restored, state)
