"""Several epochs from data that can be iterated again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from monsess.errors import BatchError, InputPositionError
from monsess.source import Source


def repeat(data: Iterable[Any], epochs: int | None = None) -> Iterable[Any]:
    """Go through ``data`` again and again, as an input of several epochs.

    Each epoch is a new ``iter(data)``; what it shuffles is up to ``data``. If the iterators of ``data`` have a state
    (Grain's do), those of the result have one too, so that a restart skips no batches.

    Args:
        data: An iterable of batches that can be iterated more than once.
        epochs: How often; None for ever.

    Returns:
        An iterable that can itself be iterated more than once. An epoch without a single batch raises BatchError, so
        that an empty source cannot spin for ever.

    Raises:
        InputPositionError: ``data`` is an iterator, which cannot be iterated twice.
        BatchError: ``data`` is nothing that yields batches.
        ValueError: ``epochs`` is less than 1.

    Example:
        >>> import monsess as ms
        >>> list(ms.repeat(["a", "b"], epochs=2))
        ['a', 'b', 'a', 'b']
    """
    if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1):
        raise ValueError(f"epochs must be None or a number of at least 1, found {epochs!r}.")
    if Source(data).is_iterator:
        raise InputPositionError(
            f"repeat() got a {type(data).__name__}, which is an iterator and cannot be iterated twice. Pass what the "
            "iterator was made from."
        )
    return _Repeated(data, epochs)


class _Repeated:
    def __init__(self, data: Iterable[Any], epochs: int | None) -> None:
        self._data = data
        self._epochs = epochs

    def __iter__(self) -> Iterator[Any]:
        source = Source(self._data)
        source.restart()
        return (_StatefulEpochs if source.kind == "stateful" else _Epochs)(source, self._epochs)


class _Epochs:
    """Goes through a source, whose first pass has begun, ``epochs`` times."""

    def __init__(self, source: Source, epochs: int | None) -> None:
        self._source = source
        self._epochs = epochs
        self._epoch = 0
        self._any = False  # whether this epoch gave a batch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self._epochs is None or self._epoch < self._epochs:
            try:
                batch = next(self._source)
            except StopIteration:
                self._end_epoch()
            else:
                self._any = True
                return batch
        raise StopIteration

    def close(self) -> None:
        """Close the pass that is under way."""
        self._epochs = 0
        self._source.close()

    def _end_epoch(self) -> None:
        if not self._any:
            raise BatchError(
                f"Epoch {self._epoch} of the repeated {type(self._source.data).__name__} is empty. Expected at least "
                "one batch each time that it is iterated."
            ) from None
        self._epoch += 1
        self._any = False
        if self._epochs is None or self._epoch < self._epochs:
            self._source.restart()


class _StatefulEpochs(_Epochs):
    """The same over a source that has a state."""

    def get_state(self) -> dict[str, Any]:
        """The number of the epoch and the state inside it."""
        return {"epoch": self._epoch, "any": self._any, "state": self._source.read_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go back to what `get_state` returned."""
        self._source.restart(state["state"])
        self._epoch = state["epoch"]
        self._any = state["any"]
