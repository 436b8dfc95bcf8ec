"""``Model``: Keras's compile, fit, evaluate and predict for a Flax module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from flax import nnx

from distribute_jax._absent import attribute_error, getattr_with_hints
from distribute_jax._checks import check_int, check_number, check_optional, refusing
from distribute_jax._errors import ArgumentError, ContextError
from distribute_jax._messages import PyTree, leaf_text
from distribute_jax.program._trace_errors import module_hint
from distribute_jax.strategies import Strategy, get_strategy, has_strategy
from distribute_jax.strategies._devices import log_default_strategy
from distribute_jax.training import _steps
from distribute_jax.training._batches import (
    Batches,
    Keys,
    Unfinished,
    arrays_of,
    check_placed,
    dataset_of,
    hint,
    several_inputs_hint,
)
from distribute_jax.training._compile import Setup
from distribute_jax.training._fit import Fit, check_ends, class_weights, without_keys
from distribute_jax.training._objective import as_nnx
from distribute_jax.training._progress import progress
from distribute_jax.training._tracker import as_keras
from distribute_jax.training._trainer import Trainer
from distribute_jax.training._weights import Stateful
from distribute_jax.training.callbacks._callback import Callback, CallbackList, History


class Model(Stateful):
    """A Flax module with the methods of ``keras.Model``.

    It runs under the strategy that was current when it was created, and trains as on one device:
    gradients, losses and metrics are exact, also for a partial batch. All methods may be called inside or
    outside the strategy's scope.

    Args:
        module: an ``nnx.Module``, or a Linen module with a ``sample_input``.
        sample_input: inputs of a Linen module, from which its weights get their shapes.
        rngs: streams for a Linen module's weights and dropout; by default ``nnx.Rngs(0)``.

    Attributes:
        module: the ``nnx.Module``.
        strategy: the strategy that was current.
        stop_training: set this to True in a callback to end ``fit`` after the step.

    Raises:
        ValueError: the module was not built under the strategy.

    Example:
        >>> import distribute_jax as dj, numpy as np, optax
        >>> from flax import nnx
        >>> with dj.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     model = dj.Model(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
        >>> model.compile(optax.sgd(0.1), loss="mse")
        >>> x = np.arange(6.0).reshape(6, 1)
        >>> history = model.fit(x, 2 * x, batch_size=4, epochs=20, verbose=0)
        >>> history.history["loss"][-1] < history.history["loss"][0]
        True

    Source: https://keras.io/api/models/model_training_apis/
    """

    _followed_in_steps = ("module",)
    """Attributes of a captured model that a step may use, beside those that a subclass adds."""

    if not TYPE_CHECKING:
        __getattr__ = getattr_with_hints("dj.Model")
        __reduce__ = __deepcopy__ = refusing(
            "A dj.Model cannot be copied or pickled: its steps are compiled for devices. "
            "Keep weights = model.get_weights(), for model.set_weights(weights), or model.save(folder); a "
            "second model is dj.Model(nnx.clone(model.module)) in the scope, compiled."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "trainable":  # Keras's way of freezing weights, which would have no effect
            raise attribute_error("dj.Model", "'Model' object", name, self)
        super().__setattr__(name, value)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _steps.check_methods(cls)

    def __init__(self, module: Any, sample_input: PyTree = None, *, rngs: Any = None) -> None:
        self.strategy: Strategy = get_strategy()
        self.stop_training = False
        self.module: nnx.Module = as_nnx(module, sample_input, rngs, self.strategy)
        check_placed(self.module, self.strategy)
        self._trainer: Trainer | None = None
        self._predictor: Trainer | None = None
        self._unfinished, self._unfinished_validation = Unfinished(), Unfinished()

    def __repr__(self) -> str:
        weights = nnx.to_flat_state(nnx.state(self.module, self._trained_filter))
        count = sum(v[...].size for _, v in weights)
        kind, compiled = type(self.module).__name__, "" if self._trainer else ", not compiled"
        return f"<Model of {kind}: {count:,} trained parameters under {self.strategy!r}{compiled}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, as ``model.module(x)``."""
        module: Any = self.module
        with hint(module_hint):
            return module(*args, **kwargs)

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        loss_weights: Any = None,
        steps_per_execution: int | str = 1,
        gradient_accumulation_steps: int = 1,
        clip_global_norm: float | None = None,
        dtype_policy: str | None = None,
        verify: str | None = None,
        skip_nonfinite: bool = False,
        trainable: Any = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
    ) -> None:
        """Configures the training.

        Args:
            optimizer: an ``optax.GradientTransformation``, or Keras's name for one, with Keras's
                default rate.
            loss: a function that returns one loss per example, one of ``dj.losses``, or Keras's name; for
                several outputs a list or dict of them, like the module's outputs.
            metrics: a list of names, functions or metric objects; for several outputs a list or dict of
                such lists.
            weighted_metrics: likewise, metrics that use the sample weights.
            loss_weights: a number for each of several losses.
            steps_per_execution: batches in one dispatch; ``"auto"`` measures the best number.
            gradient_accumulation_steps: batches whose gradients are averaged for one update.
            clip_global_norm: the norm to which a larger gradient of the global batch is scaled down.
            dtype_policy: the precision in which the module computes, such as ``"mixed_bfloat16"``.
            verify: ``"first"`` also runs the first batch of training, evaluation and prediction on one
                device, from a copy of the state, and raises if the numbers differ by more than rounding, as
                for a module that mixes the examples of a batch; ``"off"`` turns the comparison off for a
                ``train_step`` that is meant to depend on the number of replicas.
            skip_nonfinite: whether a batch whose gradients are not finite changes nothing; see
                ``dj.Optimizer``.
            trainable: which weights are trained and have optimizer state: a regular expression that is
                searched in their paths, such as ``"^head"``, or a filter of Flax. A frozen
                ``nnx.BatchNorm`` uses its running statistics, as in Keras.
            use_ema: whether the optimizer keeps a moving average of the weights, which replaces them at
                the end of ``fit``; see ``callbacks.SwapEMAWeights``.
            ema_momentum: the weight of the old average in each update.
            ema_overwrite_frequency: every so many updates the average replaces the weights, too.

        Raises:
            ValueError: an argument that is not one of these; a module built outside the scope.
            ContextError: a callback compiled the model that its ``fit`` trains.
        """
        if self._trainer is not None and self._trainer.is_running:
            raise ContextError(
                "compile was called while fit, evaluate or predict runs this model with another optimizer. "
                "Compile between two calls of fit: the second continues with initial_epoch=."
            )
        with self.strategy.scope():
            check_placed(self.module, self.strategy)
            check_number("compile(ema_momentum)", ema_momentum, at_least=0, most=1)
            check_optional(check_int, "compile(ema_overwrite_frequency)", ema_overwrite_frequency)
            setup = Setup(
                self.module, optimizer, loss, metrics, weighted_metrics, loss_weights,
                steps_per_execution, dtype_policy, verify, trainable,
                (ema_momentum, ema_overwrite_frequency) if use_ema else None,
                gradient_accumulation_steps=gradient_accumulation_steps,
                clip_global_norm=clip_global_norm, skip_nonfinite=skip_nonfinite,
            )  # fmt: skip
        self._trainer = self._trainer_of(setup)

    def _trainer_of(self, setup: Setup) -> Trainer:
        names = [f"{kind}_step" for kind in ("train", "test", "predict")]
        overridden = [n for n in names if getattr(type(self), n) is not getattr(Model, n)]
        model = weakref.ref(self) if overridden else None
        return Trainer(self.strategy, self.module, setup, model, frozenset(overridden))

    def train_step(self, batch: PyTree) -> Any:
        """Trains on one replica's share of a batch; override it to write your own step.

        An override is code for one replica, as for ``strategy.run``. It returns a dict of numbers by
        name, each this replica's part of a value of the global batch: ``fit`` sums the parts, leaves
        values that are equal on all replicas as they are, and reports the mean over the steps.

        Args:
            batch: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, this replica's share.

        Returns:
            An empty dict, to which an override may add: ``fit`` itself reports the loss and the metrics.
        """
        _steps.train(self.module, self.trainer.setup, batch)
        return {}

    def test_step(self, batch: PyTree) -> Any:
        """Evaluates one replica's share of a batch; override it to report your own numbers.

        An override returns the same as for ``train_step``; ``evaluate`` and the validation of ``fit``
        report it. The module is in evaluation mode.

        Args:
            batch: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``, this replica's share.

        Returns:
            An empty dict, as ``train_step`` does.
        """
        _steps.test(self.module, self.trainer.setup, batch)
        return {}

    def predict_step(self, batch: PyTree) -> Any:
        """Returns the outputs for one replica's share of a batch; override it to return others.

        Args:
            batch: ``(x,)``, with targets and weights if the dataset has them, this replica's share.

        Returns:
            Arrays with one row for each example, in any structure.
        """
        return _steps.predict(self.module, self._predicting_trainer().setup, batch)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Sequence[Callback] | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        *,
        x_key: str | Sequence[str] | None = None,
        y_key: str | Sequence[str] | None = None,
    ) -> History:
        """Trains the model.

        Args:
            x: arrays of examples, or dicts of them; a list or tuple of equally long arrays is several
                inputs, which the module gets as a tuple. Or any source of global batches that
                ``strategy.distribute_dataset`` takes, such as a list of ``(x, y)``, or its result.
            y: targets, for arrays. Labels that are not valid class numbers raise an error, in the first
                batch and in every later one that consists of NumPy arrays.
            batch_size: examples in a global batch, for arrays; 32 by default.
            epochs: the epoch at which to stop, counted from 0; as many epochs, if ``initial_epoch`` is 0.
            verbose: 0 for silence, 1 for a bar, 2 for a line per epoch.
            callbacks: ``dj.callbacks`` to call during training.
            validation_split: the fraction of the arrays, at their end, to validate on.
            validation_data: ``(x, y)`` or ``(x, y, sample_weight)``, or a source of batches.
            shuffle: whether arrays are shuffled in each epoch.
            class_weight: a dict from class number to the weight of that class in the loss.
            sample_weight: the weight of each example in the loss, for arrays; for several outputs
                one array for all, or a list or dict of them.
            initial_epoch: the first epoch, to continue a training.
            steps_per_epoch: batches in an epoch; None for all that the data has.
            validation_steps: batches of a validation; None for all.
            validation_batch_size: examples in a batch of validation arrays.
            validation_freq: validate every so many epochs, or after those listed, counted from 1.
            x_key: the entry of dict batches that is the input; a list of names makes a dict of them.
            y_key: likewise, the entry that is the target.

        Returns:
            A ``History`` with the numbers of every epoch: ``history.history["loss"]`` and so on.

        Raises:
            ValueError: invalid data or arguments.
        """
        fit = Fit(
            self, x, y, batch_size, epochs, verbose, callbacks, validation_split, validation_data, shuffle,
            class_weight, sample_weight, initial_epoch, steps_per_epoch, validation_steps,
            validation_batch_size, validation_freq, Keys(x_key, y_key),
        )  # fmt: skip
        with self.strategy.scope(), hint(partial(several_inputs_hint, "fit", x, y)):
            if not has_strategy():
                log_default_strategy()
            fit.take_data()
            with self.trainer.running("fit"):
                return fit.run()

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Sequence[Callback] | None = None,
        return_dict: bool = False,
        *,
        x_key: str | Sequence[str] | None = None,
        y_key: str | Sequence[str] | None = None,
    ) -> Any:
        """Computes loss and metrics over all examples, in evaluation mode.

        Args:
            x: as for ``fit``.
            y: targets, for arrays.
            batch_size: examples in a global batch, for arrays; 32 by default.
            verbose: 0 for silence, otherwise a bar or a line.
            sample_weight: the weight of each example, for arrays.
            steps: how many batches; None for all.
            callbacks: ``dj.callbacks`` to call during evaluation.
            return_dict: whether to return a dict by name.
            x_key: as for ``fit``.
            y_key: as for ``fit``.

        Returns:
            The loss; with metrics a list, the loss first; or a dict.

        Raises:
            ValueError: invalid data or arguments.
        """
        with self._running(
            self.trainer, "evaluate", (x, y, sample_weight), Keys(x_key, y_key),
            batch_size, steps, callbacks, verbose,
        ) as run:  # fmt: skip
            logs = self.trainer.evaluate(**run)
        return as_keras(logs, return_dict)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Sequence[Callback] | None = None,
        *,
        x_key: str | Sequence[str] | None = None,
    ) -> Any:
        """Computes the outputs for every example, in order, in evaluation mode.

        Args:
            x: as for ``fit``; targets and weights of a dataset are ignored.
            batch_size: examples in a global batch, for arrays; 32 by default.
            verbose: 0 for silence, otherwise a bar or a line.
            steps: how many batches; None for all.
            callbacks: ``dj.callbacks`` to call during prediction.
            x_key: as for ``fit``.

        Returns:
            NumPy arrays in the structure of the outputs; None for a dataset without batches.

        Raises:
            ValueError: invalid data or arguments.
        """
        trainer = self._predicting_trainer()
        with self._running(
            trainer, "predict", (x, None, None), Keys(x_key), batch_size, steps, callbacks, verbose
        ) as run:
            return trainer.predict(**run)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Trains on one batch, and returns its loss and metrics, as ``evaluate`` does.

        Args:
            x: arrays of the examples of one global batch.
            y: targets.
            sample_weight: the weight of each example.
            class_weight: a dict from class number to the weight of that class.
            return_dict: whether to return a dict by name.
        """
        with (
            self._one_batch(self.trainer, "train_on_batch", x, y, sample_weight) as run,
            self.trainer.setup.weighing_classes(class_weights(class_weight)),
        ):
            _, logs = self.trainer.epoch(**run)
        return as_keras(logs, return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Computes loss and metrics of one batch; see ``train_on_batch``."""
        with self._one_batch(self.trainer, "test_on_batch", x, y, sample_weight) as run:
            logs = self.trainer.evaluate(**run)
        return as_keras(logs, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Computes the outputs for one batch of arrays."""
        trainer = self._predicting_trainer()
        with self._one_batch(trainer, "predict_on_batch", x) as run:
            return trainer.predict(**run)

    @property
    def optimizer(self) -> Any:
        """The ``dj.Optimizer`` that ``compile`` made."""
        return self.trainer.setup.optimizer

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate; it can be set if it is part of the optimizer's state."""
        return self.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.optimizer.learning_rate = rate

    @property
    def trainer(self) -> Trainer:
        """The compiled training loop."""
        if self._trainer is None:
            raise ContextError(
                "This model has not been compiled yet. Call model.compile(optimizer, loss) first."
            )
        return self._trainer

    def _predicting_trainer(self) -> Trainer:
        """Returns ``trainer``, or one that can only predict if the model was not compiled."""
        if self._trainer is not None:
            return self._trainer
        if self._predictor is None:
            with self.strategy.scope():
                self._predictor = self._trainer_of(Setup(self.module, "sgd"))
        return self._predictor

    @contextmanager
    def _evaluating(self) -> Iterator[Callable[[nnx.Module, PyTree], PyTree]]:
        def predict(module: nnx.Module, x: PyTree) -> PyTree:
            twin = object.__new__(type(self))
            vars(twin).update(vars(self), module=module)
            return twin.predict_step((x,))

        self._predicting_trainer()  # made here, so that the twin shares it
        with _steps.mode(self.module, training=False):
            yield predict

    @contextmanager
    def _running(
        self,
        trainer: Trainer,
        method: str,
        xyw: tuple[Any, Any, Any],
        keys: Keys,
        batch_size: int | None,
        steps: int | None,
        callbacks: Any = None,
        verbose: int | str = 0,
    ) -> Iterator[dict[str, Any]]:
        """Distributes the data, prepares the callbacks, and yields them as arguments for ``trainer``."""
        check_optional(check_int, f"{method}(steps)", steps, at_least=0)
        x, y, keys = without_keys(keys, *xyw[:2])
        with self.strategy.scope(), hint(partial(several_inputs_hint, method, x, y)):
            arrays = arrays_of(method, x, y, xyw[2])
            left = self._unfinished.take(x, keys)
            data = (
                left.dataset if left else dataset_of(self.strategy, method, arrays or x, batch_size)
            )
            check_ends(method, data, steps)
            with trainer.running(method):
                params = {"steps": steps or data.cardinality, "verbose": verbose}
                with CallbackList([callbacks, progress(verbose, method)], self, params) as hooks:
                    batches = left or Batches(data, keys)
                    try:
                        yield {"batches": batches, "limit": steps, "callbacks": hooks}
                    finally:
                        self._unfinished.keep(x, batches)

    def _one_batch(
        self, trainer: Trainer, method: str, x: Any, y: Any = None, weight: Any = None
    ) -> AbstractContextManager[dict[str, Any]]:
        """Returns ``_running`` for a single batch of arrays."""
        arrays = arrays_of(method, x, y, weight)
        if arrays is None:
            raise ArgumentError(
                f"{method} takes the arrays of one batch, and got {leaf_text(x)}. For a dataset call "
                "fit, evaluate or predict."
            )
        return self._running(trainer, method, arrays, Keys(), arrays.length, steps=1)
