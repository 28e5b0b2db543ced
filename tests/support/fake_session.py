"""As much of a session as hooks see, so that each of them can be looked at alone."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from monsess import clock
from monsess.coordinator import Coordinator
from monsess.errors import FetchError
from monsess.hook import SessionRunContext, SessionRunValues, check_hooks


class FakeSession:
    """As much of a session as hooks see, and what they asked of it."""

    def __init__(self, *hooks, step=0, restored=None, checkpoint_dir="/ckpt", chief=True, processes=1):
        self.hooks = check_hooks(hooks)
        self.coord = Coordinator()
        self.global_step = step
        self.state = step
        self.outputs = None
        self.checkpoint_dir = checkpoint_dir
        self.is_chief, self.process_count = chief, processes
        self.seconds = dict.fromkeys(("input", "compile", "step", "hooks", "save"), 0.0)
        self.run_id, self.stop_reason, self.last_step, self.storage = "run", None, None, None
        self.recorded, self.logged, self.hook_seconds = [], [], {}
        self.is_logging, self.summary_dir = True, checkpoint_dir
        self.restored_from, self.recoveries = (step or None), 0
        self.stop_requested = False
        self.stops, self.saves, self.limits, self.listeners = [], [], [], []
        self.fetched, self.fed, self.pending = [], [], []
        for hook in self.hooks:
            hook.begin()
        for hook, stored in zip(self.hooks, restored or [], strict=False):
            hook.load_state_dict(stored)
        self.create()

    standing = ()

    def create(self):
        self.standing = ()
        for hook in self.hooks:
            hook.after_create_session(self, self.coord)

    def recover(self, step):
        """Go back to the checkpoint of ``step``, which holds the hooks' states of now."""
        self.recoveries += 1
        self.left_behind = self.global_step, clock.monotonic()
        self.global_step = self.state = self.restored_from = step
        self.pending.clear()
        for hook in self.hooks:
            hook.load_state_dict(hook.state_dict())
        self.create()

    def run(self, steps=1, **outputs):
        """One run that adds ``steps`` steps and returns ``outputs``; returns what the hooks fetched in it."""
        context = SessionRunContext(self, (), self.global_step)
        wanted = [hook.before_run(context) for hook in self.hooks]
        self.outputs = outputs
        self.global_step = self.state = context.global_step = self.global_step + steps
        leaves = [jnp.asarray(value) for value in jax.tree.leaves(outputs)]
        bad = sum(jnp.sum(~jnp.isfinite(x)) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))
        results = [None if args is None else self.evaluate(args.fetches) for args in wanted]
        self.fetched.append([args and args.fetches for args in wanted])
        self.fed.append([args and args.feed_dict for args in wanted])
        for check in self.standing:
            self.pending.append((self.global_step, jnp.asarray(bad), partial(check, self.global_step)))
        for hook, result in zip(self.hooks, results, strict=True):
            hook.after_run(context, SessionRunValues(result, jnp.asarray(bad)))
        for hook in self.hooks:
            if self.stop_reason is not None and hasattr(hook, "_at_stop"):
                hook._at_stop(context)
        return results

    def end(self):
        self.finish()
        for hook in reversed(self.hooks):
            hook.end(self)

    def finish(self):
        """The device has caught up: look at what is watched."""
        while self.pending:
            _, value, check = self.pending.pop(0)
            check(value)

    def evaluate(self, fetches, feed_dict=None):
        def one(fetch):
            if callable(fetch):
                return fetch(self.state, self.outputs, **(feed_dict or {}))
            if self.outputs is None or fetch not in self.outputs:
                raise FetchError(f"no output {fetch!r}")
            return jax.tree.map(jnp.asarray, self.outputs[fetch])

        return jax.tree.map(one, fetches)

    def request_stop(self, reason=None, everywhere=False):
        self.stop_requested = True
        self.stops.append((self.global_step, reason, everywhere))

    def request_save(self, everywhere=False):
        self.saves.append((self.global_step, everywhere))

    def stop_at_step(self, last_step, by):
        self.limits.append((last_step, by))

    def add_saver_listener(self, listener):
        self.listeners.append(listener)

    def log(self, scalars, step=None):
        self.logged.append((self.global_step if step is None else step, dict(scalars)))

    def summary(self):
        return {"hooks": dict(self.hook_seconds)}

    def _storage(self):
        return self.storage

    def _record(self, event, **fields):
        self.recorded.append((self.global_step, event, fields))

    def _watch(self, step, value, check):
        self.pending.append((step, value, check))

    def _left_behind(self):
        return self.left_behind

    def _watch_each_run(self, check):
        new = check not in self.standing
        self.standing += (check,) if new else ()
        return new

    @property
    def saved_steps(self):
        return [step for step, _ in self.saves]
