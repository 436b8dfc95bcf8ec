"""One call of ``fit``: its data, its epochs, its callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax.data import DistributedDataset
from distribute_jax.data._dataset import is_infinite, start_at
from distribute_jax.training._batches import Batches, Keys
from distribute_jax.training._inputs import Arrays, arrays_of, dataset_of
from distribute_jax.training._progress import progress
from distribute_jax.training._trainer import warn_of_early_end
from distribute_jax.training.callbacks._callback import Callback, CallbackList, History

SEED = 0
"""Of the order of shuffled arrays: the same run each time."""


class Fit:
    """One call of ``Model.fit``; the arguments are those of ``fit``."""

    def __init__(
        self,
        model: Any,
        *,
        callbacks: Sequence[Callback] | None,
        verbose: int | str,
        epochs: int,
        initial_epoch: int,
        steps_per_epoch: int | None,
        validation_steps: int | None,
        validation_freq: int | Sequence[int],
        class_weight: dict[int, float] | None,
        keys: Keys,
    ) -> None:
        for name, value in (("epochs", epochs), ("initial_epoch", initial_epoch)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ArgumentError(f"fit({name}={value!r}): it is a whole number of at least 0.")
        for name, steps in (
            ("steps_per_epoch", steps_per_epoch),
            ("validation_steps", validation_steps),
        ):
            if steps is not None and (not isinstance(steps, int) or steps < 1):
                raise ArgumentError(
                    f"fit({name}={steps!r}): it is a number of batches, at least 1."
                )
        often = isinstance(validation_freq, int) and validation_freq >= 1
        if not often and not isinstance(validation_freq, (list, tuple, set, range)):
            raise ArgumentError(
                f"fit(validation_freq={validation_freq!r}): validate every so many epochs, at least 1, or "
                "give the list of epochs."
            )
        self.model, self.trainer = model, model.trainer
        self.verbose = verbose
        self.epochs, self.initial_epoch = epochs, initial_epoch
        self.steps, self.validation_steps = steps_per_epoch, validation_steps
        self.validation_freq = validation_freq
        self.given = callbacks
        self.keys = self.validation_keys = keys
        self.class_weight = class_weights(class_weight)
        self.validation: DistributedDataset | None = None

    def take_data(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        *,
        batch_size: int | None,
        shuffle: bool,
        validation_split: float,
        validation_data: Any,
        validation_batch_size: int | None,
    ) -> None:
        """Distributes the data to train and to validate on."""
        x, y, self.keys = without_keys(self.keys, x, y)
        data = arrays_of("fit", x, y, sample_weight)
        if validation_data is None and validation_split:
            if data is None:
                raise ArgumentError(
                    "fit(validation_split=…) cuts a part off arrays, and x is a dataset. Pass "
                    "validation_data=another_dataset."
                )
            data, held_out = data.split(validation_split)
            validation_data = held_out.tree
        strategy = self.model.strategy
        seed = SEED if shuffle and data is not None else None
        self.data = dataset_of(strategy, "fit", data or x, batch_size, seed=seed)
        check_ends("fit", self.data, self.steps)
        if validation_data is not None:
            if isinstance(validation_data, dict) and self.validation_keys:
                validation_data = self.validation_keys.arguments(validation_data)
            if isinstance(validation_data, tuple):
                self.validation_keys = Keys()
            size = validation_batch_size or (batch_size if isinstance(data, Arrays) else None)
            self.validation = _validation(strategy, validation_data, size, self.validation_keys)
            check_ends("fit(validation_data)", self.validation, self.validation_steps)

    def run(self) -> History:
        """Trains, epoch after epoch."""
        history = History()
        steps = self.steps or self.data.cardinality
        params = {
            "epochs": self.epochs, "steps": steps, "verbose": self.verbose,
            "initial_epoch": self.initial_epoch, "initial_batch": 0,
        }  # fmt: skip
        self.callbacks = CallbackList(
            [self.given, history, progress(self.verbose, "fit")], self.model, params
        )
        self.model.stop_training = False
        self.model.history = history
        around = self.trainer.batches
        try:
            with self.trainer.setup.weighing_classes(self.class_weight):
                self._train()
        finally:
            self.trainer.batches = around
            self.callbacks.release()
            history.set_model(None)  # the model keeps its history, which must not keep the model
        return history

    def _train(self) -> None:
        self.callbacks.call("on_train_begin")
        first = self._start()
        logs: dict[str, Any] = {}
        for epoch in range(first, self.epochs):
            logs = self._epoch(epoch)
            if self.model.stop_training:
                break
        self.callbacks.call("on_train_end", logs)

    def _start(self) -> int:
        """Goes to where the training begins, or goes on after an interruption; gives the epoch."""
        epoch = int(self.callbacks.params["initial_epoch"])
        self._done = int(self.callbacks.params["initial_batch"])
        self._batches: Batches | None = None
        if self.steps is None:
            start_at(self.data, epoch)
            had = self._done
        else:  # one pass through the data goes on from epoch to epoch
            start_at(self.data, self.initial_epoch)
            had = (epoch - self.initial_epoch) * self.steps + self._done
        if had:
            self._batches = Batches(self.data, self.keys)
            self._batches.go_on(had, self.callbacks.params.get("position") or "")
        return epoch

    def _epoch(self, epoch: int) -> dict[str, Any]:
        self.callbacks.call("on_epoch_begin", epoch)
        if self._batches is None or (self.steps is None and not self._done):
            self._batches = Batches(self.data, self.keys)
        logs: dict[str, Any]
        self.trainer.batches = self._batches
        done, logs = self.trainer.epoch(
            self._batches, limit=self.steps, callbacks=self.callbacks, done=self._done
        )
        self._done = 0
        if self.steps is not None and done < self.steps and not self.model.stop_training:
            wanted = self.steps * (self.epochs - self.initial_epoch)
            warn_of_early_end("training", self._batches.taken, wanted)
            self.model.stop_training = True
        if self.validation is not None and self._validates(epoch):
            found = self.trainer.evaluate(
                Batches(self.validation, self.validation_keys),
                limit=self.validation_steps,
                callbacks=self.callbacks,
            )
            logs = {**logs, **{f"val_{name}": value for name, value in found.items()}}
        self.callbacks.call("on_epoch_end", epoch, logs)
        return logs

    def _validates(self, epoch: int) -> bool:
        often = self.validation_freq
        return (epoch + 1) % often == 0 if isinstance(often, int) else epoch + 1 in often


def without_keys(keys: Keys, x: Any, y: Any) -> tuple[Any, Any, Keys]:
    """Takes inputs and targets out of a dict of arrays; of a dataset that is left to its batches."""
    if not keys:
        return x, y, keys
    if y is not None:
        raise ArgumentError(
            "x_key and y_key name entries of x, and y was passed too. Leave one out."
        )
    if not isinstance(x, dict):
        return x, y, keys
    found = (*keys.arguments(x), None)
    return found[0], found[1], Keys()


def check_ends(called: str, dataset: DistributedDataset, steps: int | None) -> None:
    """Refuses a dataset without end where nothing says when an epoch is over."""
    if is_infinite(dataset) and steps is None:
        name = "steps_per_epoch" if called == "fit" else "steps"
        raise ArgumentError(
            f"{called} got a dataset that is repeated without end, and no {name}, so it would never "
            f"end. Pass {name}=…, or give repeat() a number."
        )


def class_weights(given: dict[int, float] | None) -> tuple[tuple[int, float], ...]:
    """Checks class weights, and makes them a value that a step can hold."""
    if not given:
        return ()
    for label, weight in given.items():
        if not isinstance(weight, (int, float, np.number)):
            raise ArgumentError(
                f"class_weight[{label!r}]={weight!r:.60}: the weight of a class is a number, as in "
                "class_weight={0: 1.0, 1: 5.0}."
            )
        if not isinstance(label, (int, np.integer)) or label < 0:
            raise ArgumentError(
                f"class_weight has the class {label!r}. Classes are numbered from 0: "
                "class_weight={0: 1.0, 1: 5.0}."
            )
    return tuple((int(label), float(weight)) for label, weight in sorted(given.items()))


def _validation(strategy: Any, data: Any, batch_size: int | None, keys: Keys) -> DistributedDataset:
    is_arrays = isinstance(data, tuple) or (
        isinstance(data, list) and not keys and not isinstance(data[0], tuple)
    )
    if is_arrays and len(data) in (2, 3):  # of lists, those of tuples are lists of batches
        x, y, weight = (*data, None)[:3]
        arrays = arrays_of("fit(validation_data)", x, y, weight)
        return dataset_of(strategy, "fit(validation_data)", arrays, batch_size)
    return dataset_of(strategy, "fit(validation_data)", data, None)
