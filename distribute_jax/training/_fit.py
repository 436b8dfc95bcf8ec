"""One call of ``Model.fit``: distributes the data, runs the epochs and calls the callbacks."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from distribute_jax._checks import check_int, check_optional, converting, refuse
from distribute_jax._errors import ArgumentError, log_once
from distribute_jax.data import DistributedDataset
from distribute_jax.data._dataset import is_infinite, set_epoch
from distribute_jax.training._batches import Batches, Keys, arrays_of, dataset_of
from distribute_jax.training._progress import progress
from distribute_jax.training._trainer import warn_of_early_end
from distribute_jax.training.callbacks._callback import CallbackList, History


@dataclass(eq=False)
class Fit:
    """One call of ``Model.fit``; the fields are its arguments."""

    model: Any
    x: Any
    y: Any
    batch_size: int | None
    epochs: int
    verbose: int | str
    callbacks: Any
    validation_split: float
    validation_data: Any
    shuffle: bool
    class_weight: Any
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int | Sequence[int]
    keys: Keys

    def __post_init__(self) -> None:
        check_int("fit(epochs)", self.epochs, 0)
        check_int("fit(initial_epoch)", self.initial_epoch, 0)
        for name in ("steps_per_epoch", "validation_steps", "validation_batch_size"):
            check_optional(check_int, f"fit({name})", getattr(self, name))
        freq = self.validation_freq
        for number in freq if isinstance(freq, (list, tuple, set, range)) else [freq]:
            check_int("fit(validation_freq), or each epoch of its list,", number)
        self.validation_keys = self.keys
        self.class_weights = class_weights(self.class_weight)
        self.trainer = self.model.trainer
        self.validation: DistributedDataset | None = None
        self._batches: Batches | None = None
        self._validating: Batches | None = None

    def take_data(self) -> None:
        """Distributes the data to train and to validate on."""
        x, y, self.keys = without_keys(self.keys, self.x, self.y)
        data, validation_data = arrays_of("fit", x, y, self.sample_weight), self.validation_data
        if validation_data is None and self.validation_split:
            if data is None:
                raise ArgumentError(
                    "validation_split is for arrays, and x is a dataset. Pass validation_data=dataset."
                )
            data, validation_data = data.split(self.validation_split)
        strategy = self.model.strategy
        # A fixed seed: a program gives the same numbers each time it runs.
        seed = 0 if self.shuffle and data is not None else None
        left = self._left = self.model._unfinished.take(x, self.keys)
        self.data = (
            left.dataset
            if left
            else dataset_of(strategy, "fit", data or x, self.batch_size, seed=seed)
        )
        check_ends("fit", self.data, self.steps_per_epoch)
        if validation_data is not None:
            if isinstance(validation_data, dict) and self.validation_keys:
                validation_data = self.validation_keys.arguments(validation_data)
            if isinstance(validation_data, tuple):
                self.validation_keys = Keys()
            size = self.validation_batch_size or self.batch_size
            keys, unfinished = self.validation_keys, self.model._unfinished_validation
            left = self._validating = unfinished.take(validation_data, keys)
            self.validation = (
                left.dataset if left else validation_dataset(strategy, validation_data, size, keys)
            )
            check_ends("fit(validation_data)", self.validation, self.validation_steps)

    def run(self) -> History:
        history = History()
        params = {
            "epochs": self.epochs,
            "steps": self.steps_per_epoch or self.data.cardinality,
            "validation_steps": self.validation_steps
            or getattr(self.validation, "cardinality", None),
            "verbose": self.verbose,
            "initial_epoch": self.initial_epoch,
            "initial_batch": 0,
        }
        callbacks = [self.callbacks, history, progress(self.verbose, "fit")]
        self._callbacks = CallbackList(callbacks, self.model, params)
        self.model.stop_training = False
        self.model.history = history
        outer = self.trainer.batches
        try:
            with self._callbacks, self.trainer.setup.weighing_classes(self.class_weights):
                self._train()
        finally:
            self.trainer.batches = outer
            self.model._unfinished.keep(self.x, self._batches or self._left)
            self.model._unfinished_validation.keep(self.validation_data, self._validating)
            history.set_model(None)  # no reference cycle: the model holds its history
        return history

    def _train(self) -> None:
        self._callbacks.call("on_train_begin")
        first = self._start()
        logs: dict[str, Any] = {}
        if self.initial_epoch >= self.epochs:
            log_once(
                "fit(epochs=%s, initial_epoch=%s) trains nothing: epochs is where the training ends, "
                "counted from the first epoch.", self.epochs, self.initial_epoch,
            )  # fmt: skip
        for epoch in range(first, self.epochs):
            logs = self._epoch(epoch)
            if self.model.stop_training:
                break
        if self.initial_epoch < self.epochs:
            setup, module = self.trainer.setup, self.trainer.module
            setup.swap_averages(module, averages=False)
            setup.swap_averages(module, averages=True, keep=True)
        self._callbacks.call("on_train_end", logs)

    def _start(self) -> int:
        """Returns the first epoch; moves to its first batch, or to the next one after an interruption."""
        params = self._callbacks.params
        epoch, self._done = int(params["initial_epoch"]), int(params["initial_batch"])
        params["batches"] = self._done
        self._pass, count = epoch, self._done
        # A pass through the data continues from epoch to epoch.
        if self.steps_per_epoch is not None:
            count += (epoch - self.initial_epoch) * self.steps_per_epoch
            passes, count = divmod(count, size := self.data.cardinality or count + 1)
            if self._done and not count:  # the pass has ended, and the epoch has not
                passes, count = passes - 1, size
            self._pass = self.initial_epoch + passes
        if count:
            self._batches = self._next_pass()
            self._batches.resume(count, params.get("position") or "")
        return epoch

    def _next_pass(self) -> Batches:
        """Starts a pass in the order of its number, since others may iterate over the dataset too."""
        set_epoch(self.data, self._pass)
        self._pass += 1
        return Batches(self.data, self.keys)

    def _epoch(self, epoch: int) -> dict[str, Any]:
        steps = self.steps_per_epoch
        self._callbacks.call("on_epoch_begin", epoch)
        batches = self._batches
        is_over = batches is None or steps is None or batches.count == self.data.cardinality
        if batches is None or (is_over and not self._done):
            batches = self._batches = self._left or self._next_pass()
            self._left = None
        self.trainer.batches = batches
        logs: dict[str, Any]
        done, logs = self.trainer.epoch(
            batches, limit=steps, callbacks=self._callbacks, done=self._done
        )
        self._done = 0
        if steps is not None and done < steps and not self.model.stop_training:
            requested = steps * (self.epochs - self.initial_epoch)
            warn_of_early_end("training", steps * (epoch - self.initial_epoch) + done, requested)
            self.model.stop_training = True
        freq = self.validation_freq
        if isinstance(freq, SupportsIndex):
            is_due = (epoch + 1) % operator.index(freq) == 0
        else:
            is_due = epoch + 1 in freq
        if self.validation is not None and is_due:
            steps, batches = self.validation_steps, self._validating
            # An iterator cannot start again: as in Keras the next validation continues with it.
            if batches is None or not steps or not isinstance(self.validation_data, Iterator):
                batches = self._validating = Batches(self.validation, self.validation_keys)
            numbers = self.trainer.evaluate(
                batches, limit=steps, callbacks=self._callbacks, method="fit(validation_data)"
            )
            logs |= {f"val_{name}": value for name, value in numbers.items()}
        self._callbacks.call("on_epoch_end", epoch, logs)
        return logs


def without_keys(keys: Keys, x: Any, y: Any) -> tuple[Any, Any, Keys]:
    """Applies the keys to ``x`` if it is a dict of arrays; otherwise they apply to each batch."""
    if not keys:
        return x, y, keys
    if y is not None:
        raise ArgumentError("x_key and y_key name entries of x; leave out y, or them.")
    if not isinstance(x, dict):
        return x, y, keys
    x, y = (*keys.arguments(x), None)[:2]
    return x, y, Keys()


def check_ends(method: str, dataset: DistributedDataset, steps: int | None) -> None:
    """Raises if the dataset is infinite and no number of steps was passed."""
    if is_infinite(dataset) and steps is None:
        names = {"fit": "steps_per_epoch", "fit(validation_data)": "validation_steps"}
        name = names.get(method, "steps")
        raise ArgumentError(
            f"{method} got a dataset that is repeated without end, and no {name}, so it would never "
            f"end. Pass {name}=…, or give repeat() a number."
        )


def class_weights(weights: Any) -> tuple[tuple[int, float], ...]:
    wanted = "a dict of numbers, as {0: 1.0, 1: 5.0} or dict(enumerate(weights))"
    with converting("class_weight", weights, wanted):
        pairs = [] if weights is None else sorted(weights.items())
        return tuple((operator.index(label), float(weight)) for label, weight in pairs)


def validation_dataset(
    strategy: Any, data: Any, batch_size: int | None, keys: Keys
) -> DistributedDataset:
    # A list of tuples is a list of batches.
    is_arrays = isinstance(data, tuple) or (
        isinstance(data, list) and not keys and not isinstance(next(iter(data), ()), tuple)
    )
    if is_arrays and (len(data) in (2, 3) or (len(data) == 1 and hasattr(data[0], "shape"))):
        arrays = arrays_of("fit(validation_data)", *(*data, None, None)[:3])
        return dataset_of(strategy, "fit(validation_data)", arrays, batch_size)
    if hasattr(data, "shape") and hasattr(data, "__array__"):  # a Hugging Face dataset has a shape
        refuse("fit(validation_data)", "(x, y), (x, y, sample_weight) or a dataset", data)
    return dataset_of(strategy, "fit(validation_data)", data, None)
