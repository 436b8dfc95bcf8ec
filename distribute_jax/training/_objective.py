"""The training objective: losses of outputs and layers, checks of labels; Linen modules as NNX modules."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from distribute_jax import losses
from distribute_jax._absent import describe_foreign
from distribute_jax._checks import converting, refuse
from distribute_jax._errors import ArgumentError
from distribute_jax._messages import PyTree, is_array, leaf_text, promoting
from distribute_jax.strategies import Strategy


class AddedLoss(nnx.Intermediate[Any]):
    """The type of variable by which a module adds to the loss of ``Model.fit``.

    A scalar is a penalty that does not depend on the batch; an array with a value for each example
    is averaged over the real examples of the global batch.

    Example:
        >>> import distribute_jax as dj, jax.numpy as jnp
        >>> from flax import nnx
        >>> class Decayed(nnx.Linear):
        ...     def __call__(self, x):
        ...         self.sow(dj.AddedLoss, "decay", 0.01 * jnp.sum(self.kernel[...] ** 2))
        ...         return super().__call__(x)

    Source: https://keras.io/api/losses/#the-addloss-api
    """


class Objective:
    """The losses of a model's outputs and their weights: a single one, or a list or dict."""

    def __init__(self, loss: Any, weights: Any = None) -> None:
        self.is_single = not isinstance(loss, (list, tuple, dict))
        self.losses = {key: losses.get(one) for key, one in _keyed(loss)}
        self.weights = _loss_weights(self, weights)
        self.labels = LabelCheck(self.losses)

    def __call__(self, y: PyTree, outputs: PyTree, weight: PyTree) -> dict[Any, jax.Array]:
        """Returns this replica's part of each loss, to be summed over the replicas."""
        if y is None and self.losses:
            raise ArgumentError(
                "The loss needs targets, and this batch has none. Pass y=…, or batches (x, y)."
            )
        parts = {}
        for key, loss in self.losses.items():
            output = select_output(outputs, key, "outputs")
            if getattr(loss, "reduction", "sum") in ("none", None):
                raise ArgumentError(
                    f"The loss {loss.name} has reduction={loss.reduction!r}, which leaves one number for "
                    'each example, and fit needs one for the batch. Leave it out, or pass "sum".'
                )
            y_true = select_output(y, key, "targets")
            parts[key] = loss(y_true, output, select_weight(weight, key, y))
            self.labels.note_num_classes(key, output)
        return parts

    @promoting
    def total(self, parts: dict[Any, jax.Array], added: jax.Array | None) -> jax.Array:
        """Returns the weighted sum of the parts, plus what the module's layers ``added``."""
        terms = [self.weights[key] * part for key, part in parts.items()]
        terms += [] if added is None else [added]
        if not terms:
            raise ArgumentError(
                "There is nothing to minimise: compile got no loss, and no layer of the module adds one. "
                "Pass compile(optimizer, loss=…), or override train_step."
            )
        return sum(terms[1:], terms[0])

    def functions(self) -> tuple[Any, ...]:
        """Returns the user's loss functions, whose captured state a step must find."""
        return tuple(getattr(loss, "function", loss) for loss in self.losses.values())

    def names(self) -> dict[Any, str]:
        return {} if self.is_single else {key: f"{output_name(key)}_loss" for key in self.losses}


class LabelCheck:
    """Raises for class numbers that are not classes, before a step turns them into NaN."""

    def __init__(self, losses: dict[Any, Any]) -> None:
        self._losses = {key: loss for key, loss in losses.items() if loss.takes_class_numbers}
        self._classes: dict[Any, int] = {}
        """The number of classes of each output, known once a step was traced."""
        self._pending: dict[Any, tuple[Any, Any]] = {}
        """The label ranges of the batches before that."""

    def __bool__(self) -> bool:
        return bool(self._losses)

    def restart(self) -> None:
        self._pending.clear()

    def ranges(self, y: PyTree) -> dict[Any, tuple[Any, Any]]:
        """Returns the smallest and the largest class number for each loss whose targets are on the host."""
        ranges = {}
        for key, loss in self._losses.items():
            labels = y
            if key is not None:
                with suppress(KeyError, IndexError, TypeError):
                    labels = y[key]
            if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "biuf":
                continue
            if labels.dtype.kind == "f" and not np.array_equal(labels, np.trunc(labels)):
                name = "" if key is None else f" for the output {output_name(key)!r}"
                raise ArgumentError(
                    f"{loss.name} takes class numbers, and got labels{name} that are not integers, such as "
                    f"{labels[labels != np.trunc(labels)][0]}. For regression use a loss like 'mse'."
                )
            if (ignored := getattr(loss, "ignore_class", None)) is not None:
                labels = labels[labels != ignored]
            if labels.size:
                # Twice as fast as the methods, which matters in a step of 0.3 ms.
                ranges[key] = np.minimum.reduce(labels, None), np.maximum.reduce(labels, None)
        return ranges

    def add(self, ranges: dict[Any, tuple[Any, Any]], where: str = "") -> None:
        """Checks the labels of a batch, now or once the number of classes is known."""
        for key, (low, high) in ranges.items():
            if key in self._classes:
                self._check(key, low, high, where)
            else:
                lowest, highest = self._pending.get(key, (low, high))
                self._pending[key] = min(low, lowest), max(high, highest)

    def note_num_classes(self, key: Any, output: Any) -> None:
        """Records the number of classes of a model that is being traced, and checks the pending labels."""
        if key in self._losses:
            self._classes[key] = output.shape[getattr(self._losses[key], "axis", -1)]
            if key in self._pending:
                self._check(key, *self._pending.pop(key))

    def _check(self, key: Any, low: Any, high: Any, where: str = "") -> None:
        classes, name = self._classes[key], self._losses[key].name
        if low <= -1 or high >= classes:  # fractions are truncated
            of_output = "" if key is None else f" for the output {output_name(key)!r}"
            raise ArgumentError(
                f"{name} got labels from {low} to {high}{where}{of_output}, and the model has {classes} "
                f"outputs for the classes 0 to {classes - 1}: the loss of the others is NaN. Number the "
                "classes from 0, or give the last layer an output for each; to exclude a class, pass "
                "ignore_class=… to the loss."
            )


def output_name(key: Any) -> str:
    return key if isinstance(key, str) else f"output_{key}"


def with_added_losses(
    module: Any, x: PyTree, keywords: dict[str, Any]
) -> tuple[PyTree, jax.Array | None]:
    """Returns a module's outputs, and this replica's part of what its layers added to the loss."""
    if not callable(module):
        raise ArgumentError(
            f"{type(module).__name__} has no __call__. Write def __call__(self, x):, PyTorch's forward."
        )
    if isinstance(module, nnx.bridge.ToNNX):  # Linen's layers cannot sow into it
        with _updating_in_place(module):
            return module(x, **keywords), None
    outputs, added = nnx.capture(lambda module, x: module(x, **keywords), AddedLoss)(module, x)
    values = list(map(jnp.asarray, jax.tree.leaves(added)))
    parts = [
        losses.scale_regularization_loss(value) if value.ndim == 0 else _average(value)
        for value in values
    ]
    return outputs, sum(parts[1:], parts[0]) if parts else None


@promoting
def _average(values: jax.Array) -> jax.Array:
    return losses.compute_average_loss(values.reshape(values.shape[0], -1).mean(axis=1))


def _keyed(tree: Any) -> list[tuple[Any, Any]]:
    if tree is None:
        return []
    if isinstance(tree, dict):
        return list(tree.items())
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    return [(None, tree)]


def _loss_weights(objective: Objective, weights: Any) -> dict[Any, float]:
    if weights is None:
        return dict.fromkeys(objective.losses, 1.0)
    with converting("compile(loss_weights)", weights, "a number for each loss"):
        by_key = {key: float(value) for key, value in _keyed(weights)}
    if set(by_key) != set(objective.losses):
        wanted = f"a number for each of the {len(objective.losses)} losses, in the same structure"
        refuse("compile(loss_weights)", wanted, weights)
    return by_key


def select_output(tree: Any, key: Any, what: str, measured: str = "loss") -> Any:
    """Returns the entry of the targets or outputs (``what``) for a loss or metric (``measured``)."""
    if key is None:
        if isinstance(tree, (dict, list, tuple)):
            raise ArgumentError(
                f"The model's {what} are a {type(tree).__name__}, and compile got a single loss. Pass "
                "one for each: compile(loss={'name': …}) or a list."
            )
        return tree
    try:
        if hasattr(tree, "shape"):
            raise TypeError(tree)
        return tree[key]
    except (KeyError, IndexError, TypeError) as error:
        raise ArgumentError(
            f"compile got a {measured} for {output_name(key)!r}, which the {what} of this batch do not have: "
            f"they are {_describe(tree)}. Use the same names for losses, metrics, outputs and targets."
        ) from error


def select_weight(weight: Any, key: Any, y: PyTree) -> Any:
    """Returns the sample weights of an output: one array for all, or in the structure of the targets."""
    if not isinstance(weight, (dict, list, tuple)):
        return weight
    by_key, targets = dict(_keyed(weight)), [name for name, _ in _keyed(y)]
    if not (set(targets) >= set(by_key) if isinstance(weight, dict) else targets == [*by_key]):
        raise ArgumentError(
            f"sample_weight is {_describe(weight)}, and the targets are {_describe(y)}. Pass one array for "
            "all outputs, or arrays in the structure of the targets, of which a dict may leave some out."
        )
    return by_key.get(key)


def _describe(tree: Any) -> str:
    if isinstance(tree, dict):
        return f"a dict of {sorted(tree)}"
    return f"a list of {len(tree)}" if isinstance(tree, (list, tuple)) else "one array"


MODE_KEYWORDS = {
    "training": True,
    "train": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
"""Keywords by which a module's ``__call__`` gets the mode, and their value in training."""


def as_nnx(module: Any, sample_input: PyTree, rngs: Any, strategy: Strategy) -> nnx.Module:
    """Returns an NNX module as it is, or bridges a Linen one, creating its weights under the strategy."""
    if isinstance(module, nnx.Module):
        for path, part in nnx.iter_graph(module):
            if described := describe_foreign(part):
                name = ".".join(map(str, path))
                raise ArgumentError(
                    f"{name} of the module for dj.Model is {described}. Its weights would not be trained."
                )
        return module
    if not isinstance(module, linen.Module):
        raise ArgumentError(
            "dj.Model: module must be an instance of an nnx.Module, or of a Linen module with a "
            f"sample_input; got {leaf_text(module)}. Layers go into nnx.Sequential(*layers)."
        )
    if sample_input is None or not all(map(is_array, jax.tree.leaves(sample_input))):
        wanted = "an array or a pytree of arrays, as x[:1], for a Linen module"
        refuse("dj.Model: sample_input", wanted, sample_input)
    with strategy.scope():
        bridged = nnx.bridge.ToNNX(module, rngs=rngs or nnx.Rngs(0))
        sample = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), sample_input)
        known = inspect.signature(type(module).__call__).parameters
        eval_mode = {
            name: not value
            for name, value in MODE_KEYWORDS.items()
            if name in known and known[name].default is known[name].empty
        }
        return bridged.lazy_init(sample, **eval_mode)


@contextmanager
def _updating_in_place(module: nnx.Module) -> Iterator[None]:
    """Makes a bridged Linen module write new statistics into its existing variables.

    The bridge itself replaces the variables, which ``run`` cannot follow.
    """
    attributes = {
        k: v for k, v in vars(module).items() if not k.startswith(("to_nnx__", "_pytree__"))
    }
    before = variables(module)
    yield
    after = {path: variable.get_raw_value() for path, variable in variables(module).items()}
    for name, value in attributes.items():
        setattr(module, name, value)
    for path, variable in before.items():
        if after[path] is not variable.get_raw_value():
            variable.set_raw_value(after[path])


def variables(node: nnx.Pytree) -> dict[tuple[Any, ...], Any]:
    """Returns every variable once, by its path, in an order that copies of the node share."""
    return {tuple(path): v for path, v in nnx.iter_graph(node) if isinstance(v, nnx.Variable)}
