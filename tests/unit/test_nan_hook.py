"""NanTensorHook alone: what it looks at and what it says."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_session import FakeSession

from monsess.errors import NanLossDuringTrainingError
from monsess.hooks import NanTensorHook


class TestNanTensor:
    def test_loss_that_is_finite(self):
        session = FakeSession(NanTensorHook("loss"))
        for _ in range(3):
            session.run(loss=1.0)
        session.end()
        assert session.stops == []

    @pytest.mark.parametrize(("value", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
    def test_loss_that_is_not(self, value, shown):
        session = FakeSession(NanTensorHook("loss"))
        session.run(loss=1.0)
        session.run(loss=value)
        with pytest.raises(NanLossDuringTrainingError) as caught:
            session.finish()
        assert str(caught.value) == f"NaN loss during training. At step 2: loss = {shown}."

    def test_nothing_waits_in_the_run(self):
        session = FakeSession(NanTensorHook("loss"))
        session.run(loss=np.nan)
        assert [step for step, _, _ in session.pending] == [1]

    def test_without_a_name_all_floating_outputs_are_looked_at(self):
        session = FakeSession(NanTensorHook())
        session.run(loss=1.0, grads={"w": np.ones(3)}, count=3)
        session.finish()
        assert session.fetched == [[None]]
        session.run(loss=1.0, grads={"w": np.array([1.0, np.inf, np.nan])}, count=3)
        with pytest.raises(NanLossDuringTrainingError, match="At step 2: 2 of the values"):
            session.finish()

    def test_w37_arrays_and_pytrees(self):
        hook = NanTensorHook({"l": "loss", "g": "grads"})
        session = FakeSession(hook)
        good = {"w": np.ones((2, 2), np.float32), "n": np.arange(3)}
        session.run(loss=jnp.bfloat16(1.0), grads=good)
        session.finish()
        session.run(loss=jnp.bfloat16(1.0), grads={**good, "w": np.array([[1, np.inf], [0, 0]], np.float32)})
        with pytest.raises(NanLossDuringTrainingError, match=r"At step 2: grads\['w'\] holds NaN or infinity\."):
            session.finish()

    def test_arrays_stay_on_the_device(self):
        session = FakeSession(NanTensorHook("grads"))
        session.run(grads=np.ones((1000, 10)))
        ((_, value, _),) = session.pending
        assert [leaf.shape for leaf in jax.tree.leaves(value)] == [()]

    def test_callables(self):
        def ratio(state, outputs):
            return outputs["a"] / outputs["b"]

        session = FakeSession(NanTensorHook([ratio, "a"]))
        session.run(a=jnp.float32(1), b=jnp.float32(0))
        with pytest.raises(NanLossDuringTrainingError, match=r"At step 1: .*ratio = inf\."):
            session.finish()

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2", "complex64", "float32"])
    def test_every_floating_type(self, dtype):
        session = FakeSession(NanTensorHook(["loss"]))
        session.run(loss=jnp.array(1.0).astype(dtype))
        session.finish()
        session.run(loss=jnp.array(np.nan).astype(dtype))
        with pytest.raises(NanLossDuringTrainingError):
            session.finish()

    @pytest.mark.parametrize("name", ["loss", None])
    def test_warning_and_stop(self, lines, name):
        session = FakeSession(NanTensorHook(name, fail_on_nan_loss=False))
        session.run(loss=np.nan)
        thread = threading.Thread(target=session.finish)  # as the thread that writes checkpoints may
        thread.start()
        thread.join()
        assert session.stops == [], "a check must not touch the session"
        session.run(loss=1.0)
        ((step, reason, everywhere),) = session.stops
        assert (step, everywhere) == (2, False)
        assert reason.startswith("NaN loss during training. At step 1: ")
        assert len([line for line in lines() if "asking for a stop" in line]) == 1

    def test_integers_can_never_be_nan(self):
        session = FakeSession(NanTensorHook("count"))
        with pytest.raises(ValueError, match="count holds no floating value"):
            session.run(count=3)

    @pytest.mark.parametrize("loss", [[], {}, 3.0, ["loss", 1], "", np.ones(2)])
    def test_impossible_tensors(self, loss):
        with pytest.raises(ValueError, match="invalid loss_tensor"):
            NanTensorHook(loss)

    def test_w31_and_recovery_forget_what_was_found(self):
        hook = NanTensorHook("loss", fail_on_nan_loss=False)
        session = FakeSession(hook)
        session.run(loss=np.nan)
        session.finish()
        session.recover(0)
        session.run(loss=1.0)
        assert session.stops == []
        session.run(loss=np.nan)
        session.finish()
        session = FakeSession(hook)
        session.run(loss=1.0)
        assert session.stops == []
