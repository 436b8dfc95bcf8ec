"""The base of all callbacks, the list that calls them, ``LambdaCallback`` and ``History``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from distribute_jax._absent import getattr_with_hints
from distribute_jax._checks import brief, check_choice, importing, is_real, refusing, takes
from distribute_jax._errors import ArgumentError, ArgumentTypeError, log_once
from distribute_jax._messages import not_a_name


class Callback:
    """Code that ``fit``, ``evaluate`` and ``predict`` call at fixed points.

    Override the hooks that you need. ``logs`` maps names to numbers: the running loss and metrics of
    the epoch; callbacks later in the list see what a hook adds to it. Setting
    ``self.model.stop_training = True`` ends the training after the step.

    Attributes:
        model: the ``dj.Model`` that is running.
        params: a dict with ``epochs``, ``steps`` and ``validation_steps`` (None if unknown), ``verbose``,
            ``batches`` (how many were trained on since the start of the first epoch of this ``fit``) and
            ``examples`` (how many real ones so far in this epoch, evaluation or prediction). A callback
            that restores a training sets ``initial_epoch`` and ``initial_batch`` in ``on_train_begin``,
            and optionally ``position``, the position in the data.

    Example:
        >>> import distribute_jax as dj
        >>> class Stop(dj.callbacks.Callback):
        ...     def on_epoch_end(self, epoch, logs=None):
        ...         self.model.stop_training = logs["loss"] < 0.1

    Source: https://keras.io/api/callbacks/base_callback/
    """

    reads_late = False
    """True if the batch hooks do not read ``logs``, which are then not copied from the devices."""

    _read_logs: Callable[[], dict[str, Any]]
    """Returns the logs of the last batch, for a callback with ``reads_late`` that needs them after all."""

    if not TYPE_CHECKING:
        __getattr__ = getattr_with_hints("dj.callbacks.Callback")

    def __init__(self) -> None:
        self.model: Any = None
        self.params: dict[str, Any] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "stop_training":
            raise ArgumentError(
                f"{type(self).__name__}.stop_training has no effect; set self.model.stop_training."
            )
        super().__setattr__(name, value)

    def set_params(self, params: dict[str, Any]) -> None:
        """Sets ``params``, before a run begins."""
        self.params = params

    def set_model(self, model: Any) -> None:
        """Sets ``model``, before a run begins."""
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
        """Closes files and other resources; called when a run ends, also after an error."""


Hook = Callable[..., Any]

HOOKS = sorted(name for name in vars(Callback) if name.startswith("on_"))


class CallbackList:
    """The callbacks of one run, from a nested list; a context manager that releases their resources."""

    def __init__(self, callbacks: Any, model: Any, params: dict[str, Any]) -> None:
        self.model = model
        self.params = {"batches": 0, **params}
        self._callbacks = list(_flatten(callbacks))
        self._releases = ExitStack()
        for callback in self._callbacks:
            _check_hooks(callback)

    def call(self, hook: str, *args: Any) -> None:
        """Calls one hook of every callback; hooks that have no logs yet get an empty dict, as in Keras."""
        if hook.endswith("_begin") or hook == "on_predict_end":
            args = (*args, {})
        for callback in self._callbacks:
            getattr(callback, hook)(*args)

    def batch_end(
        self,
        kind: str,
        batch: int,
        num_batches: int,
        examples: int,
        logs: Callable[[], dict[str, Any]],
    ) -> None:
        """Calls the hook after the last batch of a dispatch; ``examples`` counts the run's real ones."""
        self.params["examples"] = examples
        self.params["batches"] += num_batches if kind == "train" else 0
        hook = f"on_{kind}_batch_end"
        read_logs = cache(logs)
        for callback in self._callbacks:
            if _overrides(callback, hook) or (
                kind == "train" and _overrides(callback, "on_batch_end")
            ):
                callback._read_logs = read_logs
                getattr(callback, hook)(batch, None if callback.reads_late else read_logs())

    def __enter__(self) -> Self:
        with ExitStack() as releases:  # also of those before one that raises
            for callback in self._callbacks:
                callback.set_model(self.model)
                releases.callback(callback._release)
                callback.set_params(self.params)
            self._releases = releases.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._releases.close()  # all of them, even if one raises


def _flatten(callbacks: Any) -> Iterator[Callback]:
    if isinstance(callbacks, (list, tuple)):
        for callback in callbacks:
            yield from _flatten(callback)
    elif isinstance(callbacks, Callback):
        yield callbacks
    elif callbacks is not None:
        raise ArgumentError(
            "callbacks must be objects of dj.callbacks.Callback, as EarlyStopping(), or for a function "
            f"LambdaCallback(on_epoch_end=function); got {brief(callbacks)}."
        )


def _check_hooks(callback: Callback) -> None:
    """Raises if a hook takes the wrong arguments; warns of an ``on_…`` method that is not a hook."""
    kind = type(callback)
    for hook in HOOKS:
        arguments = list(inspect.signature(getattr(Callback, hook)).parameters)[1:]
        if _overrides(callback, hook) and not takes(getattr(callback, hook), *arguments):
            raise ArgumentTypeError(
                f"{kind.__name__}.{hook} is called with {' and '.join(arguments)}, which it does not take. "
                f"Write def {hook}(self, {', '.join(arguments)}=None)."
            )
    for name in dir(kind):
        if name.startswith("on_") and name not in HOOKS:
            text = f"{kind.__name__}.{name} is never called. {not_a_name('a hook', name, HOOKS)}"
            log_once(text)


def _overrides(callback: Callback, hook: str) -> bool:
    """True if a callback's class or instance replaces the hook of ``Callback``."""
    method = getattr(callback, hook)
    return getattr(method, "__func__", method) is not getattr(Callback, hook)


class LambdaCallback(Callback):
    """Calls your functions at the hooks that you name.

    Args:
        on_epoch_begin: called with ``epoch, logs``.
        on_epoch_end: called with ``epoch, logs``.
        on_train_begin: called with ``logs``.
        on_train_end: called with ``logs``.
        on_train_batch_begin: called with ``batch, logs``.
        on_train_batch_end: called with ``batch, logs``.
        **kwargs: any other hook of ``Callback`` by its name, such as ``on_test_end``.

    Raises:
        ValueError: a name that is not a hook, or a value that cannot be called.

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
            check_choice("A hook of LambdaCallback", name, HOOKS)
            if function is not None:
                setattr(self, name, function)


class History(Callback):
    """What ``fit`` returns: the logs of every epoch.

    Attributes:
        epoch: the epochs that ended, counted from 0.
        history: for each name the list of its values, one per epoch.

    Source: https://keras.io/api/callbacks/base_callback/
    """

    if not TYPE_CHECKING:
        __getitem__ = refusing(
            "The numbers are in a dict of the History: write history.history['loss']."
        )

    def __init__(self) -> None:
        super().__init__()
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}
        self._epochs: dict[str, list[int]] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)
            self._epochs.setdefault(name, []).append(epoch)

    def __repr__(self) -> str:
        last = [f"{name}: {values[-1]:.4g}" for name, values in self._scalars().items()]
        return f"<History of {len(self.epoch)} epochs; last {', '.join(last) or 'nothing'}>"

    def _scalars(self) -> dict[str, list[Any]]:
        return {name: values for name, values in self.history.items() if is_real(values[0])}

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws every number over the epochs, training and validation together.

        Args:
            path: a PNG file to write, such as ``"history.png"``.

        Returns:
            The ``matplotlib.figure.Figure``, which a notebook shows.

        Raises:
            ImportError: matplotlib is missing.
        """
        with importing("history.plot needs matplotlib", "plot"):
            from matplotlib.figure import Figure
        scalars = self._scalars()
        panels = [n for n in scalars if not (n.startswith("val_") and n[4:] in scalars)]
        figure = Figure(figsize=(6.4, 2.8 * max(len(panels), 1)), layout="constrained")
        for row, name in enumerate(panels, 1):
            axes = figure.add_subplot(len(panels), 1, row)
            for label, key in (("training", name), ("validation", f"val_{name}")):
                if key in scalars:
                    epochs = [epoch + 1 for epoch in self._epochs[key]]
                    axes.plot(epochs, scalars[key], marker=".", label=label)
            axes.set(ylabel=name, xlabel="epoch")
            axes.legend()
        if path is not None:
            figure.savefig(path, format="png", dpi=120)
        return figure
