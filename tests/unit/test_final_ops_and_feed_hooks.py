"""FinalOpsHook and FeedFnHook alone, and the list of the built-in hooks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from conforms import conforms
from fake_session import FakeSession

from monsess import hooks as builtin
from monsess.errors import EndOfData
from monsess.hook import SessionRunHook, check_hooks
from monsess.hooks import (
    CheckpointSaverHook,
    FeedFnHook,
    FinalOpsHook,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    NanTensorHook,
    StepCounterHook,
    StopAtStepHook,
)


def test_hooks_are_usable_and_exported_sorted():
    assert builtin.__all__ == sorted(builtin.__all__)
    assert all(hasattr(builtin, name) for name in builtin.__all__)
    check_hooks(
        [
            CheckpointSaverHook(save_steps=1),
            FeedFnHook(dict),
            FinalOpsHook(None),
            GlobalStepWaiterHook(0),
            LoggingTensorHook(["loss"], at_end=True),
            NanTensorHook(),
            StepCounterHook(),
            StopAtStepHook(1),
        ]
    )


class TestFinalOps:
    @conforms("BH-076", "BH-077")
    @pytest.mark.parametrize("value", [3.5, np.arange(4)])
    def test_value_of_the_end(self, value):
        hook = FinalOpsHook("loss")
        session = FakeSession(hook)
        assert hook.final_ops_values is None
        session.run(loss=0.0)
        session.run(loss=value)
        assert hook.final_ops_values is None
        session.end()
        assert isinstance(hook.final_ops_values, np.ndarray)
        np.testing.assert_array_equal(hook.final_ops_values, value)

    def test_structure_is_kept(self):
        hook = FinalOpsHook({"loss": "loss", "state": [lambda state, outputs: jnp.int32(state)]})
        session = FakeSession(hook)
        session.run(loss=2.0)
        session.end()
        assert hook.final_ops_values == {"loss": 2.0, "state": [1]}

    def test_nothing(self):
        hook = FinalOpsHook(None)
        FakeSession(hook).end()
        assert hook.final_ops_values is None

    @conforms("BH-079")
    def test_feed_dict_is_handed_to_callables(self):
        hook = FinalOpsHook([lambda state, outputs, x, y: outputs["loss"] * x + y, "loss"], {"x": 10, "y": 1})

        class NotFed(SessionRunHook):
            pass

        session = FakeSession(hook, NotFed())
        session.run(loss=2.0)
        session.end()
        assert hook.final_ops_values == [21.0, 2.0]

    @conforms("BH-078")
    def test_end_of_data(self, lines):
        def reads(state, outputs):
            raise EndOfData

        hook = FinalOpsHook(reads)
        session = FakeSession(hook)
        session.run(loss=1.0)
        with pytest.raises(EndOfData):
            session.end()
        assert "dependency back to some input source" in lines()[0]
        assert hook.final_ops_values is None

    def test_w31_values_of_another_session_are_forgotten(self):
        hook = FinalOpsHook("loss")
        session = FakeSession(hook)
        session.run(loss=1.0)
        session.end()
        FakeSession(hook)
        assert hook.final_ops_values is None

    def test_impossible_arguments(self):
        with pytest.raises(ValueError, match="invalid final_ops"):
            FinalOpsHook(3.0)
        with pytest.raises(ValueError, match="no callable to take arguments"):
            FinalOpsHook("loss", {"x": 1})
        with pytest.raises(ValueError, match="expected names of arguments"):
            FinalOpsHook(lambda state, outputs: 1, {1: 1})


class TestFeedFn:
    @conforms("BH-081")
    def test_feeds_each_run_anew(self):
        numbers = iter(range(10))
        session = FakeSession(FeedFnHook(lambda: {"batch": next(numbers)}))
        session.run()
        session.run()
        assert session.fed == [[{"batch": 0}], [{"batch": 1}]]
        assert session.fetched == [[None], [None]]

    def test_end_of_data_goes_through(self):
        def ended():
            raise EndOfData

        with pytest.raises(EndOfData):
            FakeSession(FeedFnHook(ended)).run()

    def test_what_is_no_dict(self):
        with pytest.raises(TypeError, match="feed_fn must return a dict from argument name to value, found list"):
            FakeSession(FeedFnHook(lambda: [1])).run()
        with pytest.raises(ValueError, match="invalid feed_fn="):
            FeedFnHook({"batch": 1})
