"""One attempt of a small training run with everything that is worth looking at; killed at a step, if told so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

LAST_STEP, EVERY = 30, 5
#: Where three attempts are killed, and what they had saved for certain.
KILLS = (8, 14, 23)


def train(url: str, die_at: int | None = None, wait_for: int | None = None) -> Any:
    """Train to `LAST_STEP`, and return the session.

    Args:
        url: The checkpoint directory.
        die_at: A step after which the process is killed, as soon as ``wait_for`` is committed.
        wait_for: A step.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import ticks

    import monsess as ms

    @ms.train_step
    def step(state: Any, batch: Any) -> Any:
        def loss_of(w: Any) -> Any:
            return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

        loss, grad = jax.value_and_grad(loss_of)(state["w"])
        rate = 0.3 * 0.95 ** state["updates"]
        w = state["w"] - rate * jax.lax.pmean(grad, "data")
        return {"w": w, "updates": state["updates"] + 1}, {"loss": loss, "learning_rate": rate}

    @ms.eval_step
    def evaluate(state: Any, batch: Any) -> Any:
        error = batch["x"] @ state["w"] - batch["y"]
        return {"loss": jnp.mean(error**2), "accuracy": jnp.mean(jnp.abs(error) < 0.3)}

    def batch(index: int) -> dict[str, Any]:
        generator = np.random.default_rng(index)
        x = generator.normal(size=(16, 3)).astype(np.float32)
        noise = 0.1 * generator.normal(size=16).astype(np.float32)
        return {"x": x, "y": x @ np.array([1.0, -2.0, 0.5], np.float32) + noise}

    class Dies(ms.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            session = run_context.session
            if run_context.global_step == die_at:
                ticks.wait_until(lambda: ms.latest_checkpoint(url) == wait_for)
                session._recording.flush()  # what a kill leaves out is another test's matter
                os.kill(os.getpid(), signal.SIGKILL)

    hooks = [
        ms.EvaluationHook(evaluate, [batch(1000), batch(1001)], every_n_steps=EVERY),
        ms.GoodputHook(every_n_steps=EVERY),
        ms.StopAtStepHook(last_step=LAST_STEP),
        Dies(),
    ]
    with ms.MonitoredTrainingSession(
        lambda: {"w": jnp.zeros(3), "updates": jnp.zeros(())},
        data=[batch(index) for index in range(LAST_STEP + 5)],
        checkpoint_dir=url,
        save_checkpoint_steps=EVERY,
        save_summaries_steps=1,
        log_step_count_steps=2,
        keep=ms.KeepLast(2) | ms.KeepBest(1, "eval/loss"),
        hooks=hooks,
    ) as sess:
        while not sess.should_stop():
            sess.run(step)
    return sess


def train_with_kills(url: str) -> None:
    """Four attempts as processes of their own, the first three killed."""
    for die_at in (*KILLS, None):
        wait_for = None if die_at is None else die_at // EVERY * EVERY
        given = json.dumps({"url": url, "die_at": die_at, "wait_for": wait_for})
        done = subprocess.run(
            [sys.executable, "-W", "error", __file__], input=given, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == (0 if die_at is None else -signal.SIGKILL), done.stderr


def main() -> None:
    """Read the arguments of `train` from standard input, and train."""
    from monsess.testing import emulate_devices

    emulate_devices(2)
    train(**json.load(sys.stdin))


if __name__ == "__main__":
    main()
