"""The train, test and predict steps of a model, each written for one replica; modes of modules."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax._errors import ArgumentError
from distribute_jax._messages import PyTree, promoting
from distribute_jax.losses._loss import aligned_weights
from distribute_jax.strategies import get_replica_context
from distribute_jax.training._batches import real_examples, rows_of, unpack_x_y_sample_weight
from distribute_jax.training._compile import Setup
from distribute_jax.training._objective import with_added_losses


def forward(
    module: nnx.Module, setup: Setup, x: PyTree, *, training: bool
) -> tuple[PyTree, jax.Array | None]:
    """Calls the module in its dtype policy's precision.

    Returns:
        The outputs, and this replica's part of what the module's layers add to the loss, if any.
    """
    keywords = {
        **mode_keywords(setup.call, training=training),
        **linen_keywords(module, training=training),
    }
    with setup.policy.computing(module):
        outputs, added = with_added_losses(module, setup.policy.cast_input(x), keywords)
    return setup.policy.cast_output(outputs), added


def train(module: nnx.Module, setup: Setup, batch: PyTree) -> None:
    """Takes one step of gradient descent, and adds the batch to loss and metrics."""
    x, y, given = unpack_x_y_sample_weight(batch)
    optimizer, tracker = setup.optimizer, setup.tracker

    def loss_fn(module: nnx.Module) -> tuple[jax.Array, tuple[Any, ...]]:
        outputs, added = forward(module, setup, x, training=True)
        weight = class_weighted(setup.class_weight, y, outputs, given)
        parts = setup.objective(y, outputs, weight)
        total = setup.objective.total(parts, added)
        return optimizer.scale_loss(total), (total, parts, outputs, weight)

    grad = nnx.grad(loss_fn, argnums=nnx.DiffState(0, optimizer.wrt), has_aux=True)
    gradients, (total, parts, outputs, weight) = grad(module)
    update(setup, module, gradients)
    tracker.update_loss(setup.objective, total, parts, real_examples(rows_of(x)))
    tracker.update_metrics(y, outputs, weight)


def update(setup: Setup, module: nnx.Module, gradients: Any) -> None:
    """Updates the module; a penalty alone has the same gradients everywhere, which is no mistake."""
    if setup.objective.losses:
        setup.optimizer.update(module, gradients)
        return
    summed = get_replica_context().all_reduce("sum", gradients)
    setup.optimizer.update(module, summed, skip_gradients_aggregation=True)


def test(module: nnx.Module, setup: Setup, batch: PyTree) -> None:
    """Adds a batch to loss and metrics, in evaluation mode; the module stays as it is."""
    x, y, weight = unpack_x_y_sample_weight(batch)
    outputs, added = forward(nnx.clone(module), setup, x, training=False)
    if setup.objective.losses or added is not None:
        parts = setup.objective(y, outputs, weight)
        total = setup.objective.total(parts, added)
        setup.tested.update_loss(setup.objective, total, parts, real_examples(rows_of(x)))
    setup.tested.update_metrics(y, outputs, weight)


def predict(module: nnx.Module, setup: Setup, batch: PyTree) -> PyTree:
    """Gives the outputs, in evaluation mode; the module stays as it is."""
    x, _, _ = unpack_x_y_sample_weight(batch)
    return forward(nnx.clone(module), setup, x, training=False)[0]


@promoting
def class_weighted(weights: tuple[tuple[int, float], ...], y: Any, outputs: Any, given: Any) -> Any:
    """Multiplies the sample weights by those of the classes; a class that is not named counts 1.

    Labels of the outputs' shape are one-hot, as Keras takes them; with a dim less they are class
    numbers, one for each example or, in a sequence, for each token.
    """
    if not weights:
        return given
    nested = (dict, list, tuple)
    if isinstance(y, nested) or isinstance(outputs, nested) or isinstance(given, nested):
        raise ArgumentError(
            "class_weight is for a model with a single output, and this one has several. Pass "
            "sample_weight for each output instead."
        )
    labels = jnp.asarray(y)
    if labels.ndim > 1 and labels.shape[-1] == 1 and labels.ndim >= outputs.ndim:
        labels = labels[..., 0]
    elif labels.ndim > 1 and labels.ndim >= outputs.ndim:
        labels = jnp.argmax(labels, axis=-1)
    factor = jnp.ones(labels.shape, jnp.float32)
    for label, weight in weights:
        factor = jnp.where(labels == label, weight, factor)
    return factor if given is None else factor * aligned_weights("class_weight", given, factor)


class Step:
    """A step of a compiled model, which it does not keep alive: the key of a program holds the step.

    Args:
        kind: ``"train"``, ``"test"`` or ``"predict"``.
        module: what the step calls.
        setup: what ``compile`` decided.
    """

    def __init__(self, kind: str, module: nnx.Module, setup: Setup) -> None:
        self.__name__ = f"{kind}_step"
        self._run = {"train": train, "test": test, "predict": predict}[kind]
        self._parts = weakref.ref(module), weakref.ref(setup)

    def __call__(self, batch: PyTree) -> Any:
        """Runs the step on this replica's share of a batch."""
        module, setup = (part() for part in self._parts)
        return self._run(cast("nnx.Module", module), cast("Setup", setup), batch)


def bound(
    step: Callable[..., Any], module: nnx.Module, setup: Setup, functions: tuple[Any, ...]
) -> Callable[..., Any]:
    """Makes a step of positional arguments, for ``run``.

    Args:
        step: takes a batch.
        module: what it trains or calls.
        setup: what else it reaches: ``run`` looks for state in a step's closure, and not inside the
            library's own objects.
        functions: the user's functions that it calls.
    """
    optimizer, tracker, tested = setup.optimizer, setup.tracker, setup.tested

    def run_step(*batch: Any) -> Any:
        _ = module, optimizer, tracker, tested, functions  # named, so that they are in the closure
        return step(batch)

    run_step.__name__ = run_step.__qualname__ = getattr(step, "__name__", "step")
    return run_step


def bound_to(
    model: Any, module: nnx.Module, setup: Setup, functions: tuple[Any, ...]
) -> Callable[..., Any]:
    """Makes a step of a model's own ``train_step``, as ``bound`` does of another.

    The model stands in the closure by itself, where ``run`` holds it weakly. Nothing that the model
    reaches may hold the step, or a strategy would keep both.
    """
    optimizer, tracker, tested = setup.optimizer, setup.tracker, setup.tested

    def train_step(*batch: Any) -> Any:
        _ = module, optimizer, tracker, tested, functions
        return model.train_step(batch)

    return train_step


_SWITCHES = ("deterministic", "use_running_average")
"""Attributes of Flax's layers that are True in evaluation."""

_KEYWORDS = {
    "training": True,
    "train": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
"""Keywords of a user's ``__call__``, and their value in training."""


@contextmanager
def mode(module: nnx.Module, *, training: bool) -> Iterator[None]:
    """Puts every layer into training or evaluation mode for the block, and back into its own."""
    found = [
        (node, name, getattr(node, name))
        for _, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Module)
        for name in _SWITCHES
        if name in vars(node)
    ]
    for node, name, _ in found:
        setattr(node, name, not training)
    try:
        yield
    finally:
        for node, name, old in found:
            setattr(node, name, old)


def mode_keywords(call: Callable[..., Any], *, training: bool) -> dict[str, bool]:
    """Gives the keywords by which a module's own ``__call__`` wants to know the mode."""
    known = inspect.signature(call).parameters
    return {name: value == training for name, value in _KEYWORDS.items() if name in known}


def linen_keywords(module: nnx.Module, *, training: bool) -> dict[str, Any]:
    """Gives the keyword by which a Linen module may change its statistics in training."""
    if not isinstance(module, nnx.bridge.ToNNX) or not training:
        return {}
    return {"mutable": nnx_collections(module)}


def nnx_collections(module: nnx.Module) -> list[str]:
    """Names the collections of a bridged Linen module that are no weights, such as batch_stats."""
    kinds = {
        type(variable)
        for _, variable in nnx.iter_graph(module)
        if isinstance(variable, nnx.Variable)
        and not isinstance(variable, (nnx.Param, nnx.RngState))
    }
    return sorted(nnx.variablelib.variable_name_from_type(kind) for kind in kinds)
