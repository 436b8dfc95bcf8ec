"""The base of all callbacks, the list that calls them, ``LambdaCallback`` and ``History``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any, Protocol

import numpy as np

from distribute_jax._errors import ArgumentError


class Callback:
    """Code that ``fit``, ``evaluate`` and ``predict`` call at fixed points.

    Override the hooks that matter. ``logs`` maps names to numbers: the running loss and metrics of
    the epoch; what a hook adds to it, the callbacks after it see too. Setting
    ``self.model.stop_training = True`` ends the training after the step.

    Attributes:
        model: the ``dj.Model`` that is running.
        params: a dict with ``epochs``, ``steps`` (None where unknown), ``verbose``, and ``examples``:
            the real ones so far in this epoch, evaluation or prediction. A callback that restores a
            training sets ``initial_epoch`` and ``initial_batch`` in ``on_train_begin``, and maybe
            ``position``, where in the data that is.

    Example:
        >>> import distribute_jax as dj
        >>> class Stop(dj.callbacks.Callback):
        ...     def on_epoch_end(self, epoch, logs=None):
        ...         self.model.stop_training = logs["loss"] < 0.1

    Source: https://keras.io/api/callbacks/base_callback/
    """

    reads_late = False
    """Whether the batch hooks leave ``logs`` unread, so that none is brought from the devices."""

    _read: Callable[[], dict[str, Any]]
    """Gives the logs of the batch that ended, for a callback that reads late and needs them now."""

    def __init__(self) -> None:
        """Starts without a model; ``fit`` sets it."""
        self.model: Any = None
        self.params: dict[str, Any] = {}

    def set_params(self, params: dict[str, Any]) -> None:
        """Takes the facts about the run that begins."""
        self.params = params

    def set_model(self, model: Any) -> None:
        """Takes the model that runs."""
        self.model = model

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Called when ``fit`` begins."""

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Called when ``fit`` ends, with the logs of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Called before the first batch of an epoch, which counts from 0."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Called after the validation of an epoch; ``logs`` has its numbers under ``val_``."""

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called before a batch, or the first of several in one dispatch."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called after a batch, or the last of several in one dispatch."""
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keras's other name for ``on_train_batch_begin``."""

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keras's other name for ``on_train_batch_end``."""

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Called when an evaluation or validation begins."""

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Called when an evaluation or validation ends."""

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called before a batch of an evaluation."""

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called after a batch of an evaluation."""

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Called when ``predict`` begins."""

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        """Called when ``predict`` ends."""

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called before a batch of ``predict``."""

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called after a batch of ``predict``; ``logs`` has its ``outputs``."""

    def _release(self) -> None:
        """Gives back files and the like; called when a run ends, also by an error."""


BATCH_ENDS = {
    "train": ("on_train_batch_end", "on_batch_end"),
    "test": ("on_test_batch_end",),
    "predict": ("on_predict_batch_end",),
}
"""For each kind of run the hook at the end of a batch, and other names of it."""

WITHOUT_LOGS = frozenset(
    {"on_predict_end", *(name for name in vars(Callback) if name.endswith("_begin"))}
)


class Ran(Protocol):
    """What went to the devices together."""

    last: int
    """Its last batch, counted in the epoch from 0."""
    examples: int
    """The real examples of all batches so far."""


class CallbackList:
    """The callbacks of one run of ``fit``, ``evaluate`` or ``predict``.

    Args:
        callbacks: one, or a nest of lists of them, or None.
        model: the model that runs.
        params: the facts about the run; ``examples`` is kept in it.
    """

    def __init__(self, callbacks: Any, model: Any, params: dict[str, Any]) -> None:
        self.model = model
        self.params = params
        self._callbacks = list(_flat(callbacks))
        for callback in self._callbacks:
            callback.set_model(model)
            callback.set_params(params)

    def call(self, hook: str, *args: Any) -> None:
        """Calls one hook of every callback; a hook that has no logs yet gets an empty dict, as in Keras."""
        if hook in WITHOUT_LOGS:
            args = (*args, {})
        for callback in self._callbacks:
            getattr(callback, hook)(*args)

    def batch_end(self, kind: str, ran: Ran, logs: Callable[[], dict[str, Any]]) -> None:
        """Calls the hook at the end of a batch; ``logs`` makes the numbers if any callback reads them."""
        self.params["examples"] = ran.examples
        hooks = BATCH_ENDS[kind]
        made = cache(logs)
        for callback in self._callbacks:
            if not any(_overrides(callback, hook) for hook in hooks):
                continue
            callback._read = made
            getattr(callback, hooks[0])(ran.last, None if callback.reads_late else made())

    def release(self) -> None:
        """Lets every callback give back its files, whatever became of the run."""
        with ExitStack() as stack:
            for callback in reversed(self._callbacks):
                stack.callback(callback._release)


def _flat(callbacks: Any) -> Iterator[Callback]:
    if callbacks is None:
        return
    if isinstance(callbacks, (list, tuple)):
        for callback in callbacks:
            yield from _flat(callback)
    elif isinstance(callbacks, Callback):
        yield callbacks
    else:
        raise ArgumentError(
            f"callbacks holds {callbacks!r:.80}, which is no dj.callbacks.Callback. {_remedy(callbacks)}"
        )


def _remedy(given: Any) -> str:
    if isinstance(given, type) and issubclass(given, Callback):
        return f"It is the class; pass an object of it: callbacks=[{given.__name__}(…)]."
    if callable(given):
        return (
            "To call a function, say which hook it is: "
            "callbacks=[dj.callbacks.LambdaCallback(on_epoch_end=function)]."
        )
    return (
        "Pass one, or a list of them: callbacks=[dj.callbacks.EarlyStopping()], or objects of a subclass "
        "of dj.callbacks.Callback."
    )


def _overrides(callback: Callback, hook: str) -> bool:
    """Tells whether a callback has a hook of its own, in its class or set on the instance."""
    own = getattr(callback, hook)
    return getattr(own, "__func__", own) is not getattr(Callback, hook)


Hook = Callable[..., Any]


class LambdaCallback(Callback):
    """Calls a function of yours at each hook that you name.

    Args:
        on_epoch_begin: called with ``epoch, logs``.
        on_epoch_end: called with ``epoch, logs``.
        on_train_begin: called with ``logs``.
        on_train_end: called with ``logs``.
        on_train_batch_begin: called with ``batch, logs``.
        on_train_batch_end: called with ``batch, logs``.
        **kwargs: any other hook of ``Callback`` by its name, such as ``on_test_end``.

    Raises:
        ValueError: a name that is no hook, or a value that cannot be called.

    Example:
        >>> import distribute_jax as dj
        >>> ends = []
        >>> callback = dj.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(epoch))
        >>> callback.on_epoch_end(3, {})
        >>> ends
        [3]

    Source: https://keras.io/api/callbacks/lambda_callback/
    """

    def __init__(
        self,
        on_epoch_begin: Hook | None = None,
        on_epoch_end: Hook | None = None,
        on_train_begin: Hook | None = None,
        on_train_end: Hook | None = None,
        on_train_batch_begin: Hook | None = None,
        on_train_batch_end: Hook | None = None,
        **kwargs: Hook | None,
    ) -> None:
        super().__init__()
        hooks = {
            "on_epoch_begin": on_epoch_begin,
            "on_epoch_end": on_epoch_end,
            "on_train_begin": on_train_begin,
            "on_train_end": on_train_end,
            "on_train_batch_begin": on_train_batch_begin,
            "on_train_batch_end": on_train_batch_end,
            **kwargs,
        }
        for name, function in hooks.items():
            if not name.startswith("on_") or not hasattr(Callback, name):
                known = ", ".join(sorted(n for n in vars(Callback) if n.startswith("on_")))
                raise ArgumentError(
                    f"LambdaCallback got {name}=…, which is no hook. Hooks: {known}."
                )
            if function is None:
                continue
            if not callable(function):
                raise ArgumentError(
                    f"LambdaCallback got {name}={function!r}, which is no function."
                )
            setattr(self, name, function)


class History(Callback):
    """What ``fit`` returns: the logs of every epoch.

    Attributes:
        epoch: the epochs that ended, from 0.
        history: for each name the list of its values, one for each epoch.

    Source: https://keras.io/api/callbacks/base_callback/
    """

    def __init__(self) -> None:
        """Starts empty."""
        super().__init__()
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}
        self._epochs: dict[str, list[int]] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keeps the logs of an epoch."""
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)
            self._epochs.setdefault(name, []).append(epoch)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws every number over the epochs into a PNG file, training and validation together.

        Args:
            path: the file, such as ``"history.png"``.

        Raises:
            ImportError: matplotlib is missing.
        """
        plot(self._epochs, self.history, path)


def plot(
    epochs: dict[str, list[int]], history: dict[str, list[Any]], path: str | os.PathLike[str]
) -> None:
    """Draws a panel for each number, with that of the validation in the same one; see ``History.plot``.

    Args:
        epochs: for each name the epochs of its numbers, from 0; they are drawn from 1.
        history: for each name its numbers.
        path: the PNG file.
    """
    figure_class = _figure_class()
    single = {name: values for name, values in history.items() if not np.ndim(values[0])}
    panels = [n for n in single if not (n.startswith("val_") and n[4:] in single)]
    figure = figure_class(figsize=(6.4, 2.8 * max(len(panels), 1)), layout="constrained")
    for place, name in enumerate(panels, 1):
        axes = figure.add_subplot(len(panels), 1, place)
        for label, key in (("training", name), ("validation", f"val_{name}")):
            if key in single:
                at = [epoch + 1 for epoch in epochs[key]]
                axes.plot(at, single[key], marker=".", label=label)
        axes.set(ylabel=name, xlabel="epoch")
        axes.legend()
    figure.savefig(path, format="png", dpi=120)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "history.plot draws with matplotlib, which is not installed. Install it with pip install "
            "'distribute-jax[plot]', or draw history.history with another library.",
            name="matplotlib",
        ) from error
    return Figure
