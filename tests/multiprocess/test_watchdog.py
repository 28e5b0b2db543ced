"""A process that hangs is ended by the WatchdogHook within its limit, by name, and all others end with it.

Acceptance: a step, an input and a save that hang, in a job of one and of two processes.
"""

from __future__ import annotations

import pytest
import watching
from cluster import outputs

pytestmark = pytest.mark.timeout(200)

#: From the limit to the end of the last process: the others' patience, five seconds for an answer, and the exit.
MORE = 25.0
SAYS = {
    "input": ("waiting for the next batch of the input",),
    "step": ("waiting for the devices to finish step", "running a step"),  # a CPU device may run it in this thread
    "save": ("waiting for a checkpoint to be saved",),
    "hook": ("in hook hang.<locals>.Hangs.after_run",),
    "loop": ("in the program's own code",),
}
CASES = [
    pytest.param(count, where, who, marks=() if (count, where) in {(1, "step"), (2, "input")} else pytest.mark.slow)
    for count in (1, 2)
    for where in SAYS
    for who in range(count if where != "save" else 1)
]


@pytest.mark.parametrize(("count", "where", "who"), CASES)
def test_what_hangs_is_named_and_all_end(cluster, figures, count, where, who):
    url = str(cluster.folder("checkpoints"))
    ended = cluster.run(count, call="watching:hang", url=url, arguments={"where": where, "process": who})
    assert [one.code for one in ended] == [1] * count, outputs(ended)
    culprit = ended[who]
    # A process whose devices wait for another one's cannot tell itself from that one.
    speaker = culprit if where != "step" else next(one for one in ended if "WatchdogHook: no progress" in one.output)
    said = f"WatchdogHook: no progress{'' if count == 1 else f' of process {speaker.index}'} for "
    assert said in speaker.output, outputs(ended)
    assert any(text in speaker.output for text in SAYS[where]), outputs(ended)
    assert "Thread MainThread (most recent call last):" in speaker.output
    if where == "input":  # the training thread looks up while it waits
        assert "told of the error" in culprit.output, outputs(ended)
        assert "MonsessError: WatchdogHook: no progress" in culprit.output
    else:
        assert "the process ends itself" in speaker.output, outputs(ended)
    for other in ended:
        if other is not speaker and where != "step":
            assert "PeerFailedError" in other.output, outputs(ended)
            assert f"Process {who} failed at step" in other.output, outputs(ended)
    begun = max(one.seconds for one in ended)
    figures.append(f"{where} hangs in process {who} of {count}: all ended {begun:.1f} s after the start of the job")
    assert begun < 60 + watching.LIMIT + MORE, outputs(ended)
