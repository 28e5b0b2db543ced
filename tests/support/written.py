"""Records written by hand, and the story of a small run that was killed three times."""

from __future__ import annotations

from typing import Any

from command_line import Files

from monsess.records.lines import FILE, encode

RUN_ID = "1daeb141e4aa"
#: A moment in 2025.
BEGAN = 1764467000.0


def start(step: int, when: float, attempt: str = "a1", **more: Any) -> dict[str, Any]:
    restored = more.pop("restored_from", step or None)
    about = {"run_id": RUN_ID, "attempt": attempt, "restored_from": restored, "processes": 1, "devices": 4}
    versions = {"monsess": "0.1.0", "jax": "0.10.2", "python": "3.11.7"}
    return {"event": "start", "step": step, "time": BEGAN + when, **about, "host": "here", "versions": versions, **more}


def values(step: int, when: float, **scalars: float) -> dict[str, Any]:
    return {"step": step, "time": BEGAN + when, "scalars": {name.replace("__", "/"): v for name, v in scalars.items()}}


def checkpoint(step: int, when: float, **more: Any) -> dict[str, Any]:
    return {"event": "checkpoint", "step": step, "time": BEGAN + when, "seconds": 0.5, "bytes": 3000, **more}


def end(step: int, when: float, reason: str = "LAST_STEP", **more: Any) -> dict[str, Any]:
    about = {"text": f"step {step} is reached", "error": None, "seconds": {}, "hooks": {}}
    return {"event": "end", "step": step, "time": BEGAN + when, "reason": reason, **about, **more}


def three_kills() -> list[dict[str, Any]]:
    """Killed at 8, 11 and 17, with a checkpoint each five steps, one second a step; ends at 20."""
    records: list[dict[str, Any]] = []
    when, begin = 0.0, 0
    for number, last in enumerate((8, 11, 17, 20), 1):
        records.append(start(begin, when, f"a{number}"))
        for step in range(begin + 1, last + 1):
            when += 1.0
            records.append(values(step, when, loss=1.0 / step + number / 1000, eval__loss=2.0 / step))
            if step % 5 == 0:
                records.append(checkpoint(step, when + 0.25))
                begin = step
        when += 3.0
    records.append(
        end(20, when - 2.0, seconds={"step": 2.5, "input": 0.5}, hooks={"StopAtStepHook": 0.25, "Slow": 1.0})
    )
    return records


def write(url: str, records: list[dict[str, Any]], append: bool = False) -> None:
    """Put records into a directory, as a run would."""
    files = Files(url)
    before = files.read(FILE) if append else b""
    files.write(FILE, before + b"".join(map(encode, records)))
