"""The train, test and predict steps of a model, each written for one replica; modes of modules."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx

from distribute_jax._checks import takes
from distribute_jax._errors import ArgumentError, ArgumentTypeError
from distribute_jax._messages import PyTree, promoting, real_array
from distribute_jax._padding import align
from distribute_jax._user_frames import log_once, warn_user
from distribute_jax.collectives._check_in_sync import bit_hash
from distribute_jax.program import results_are_parts
from distribute_jax.strategies import get_replica_context
from distribute_jax.training._batches import example_counts, unpack_x_y_sample_weight
from distribute_jax.training._compile import Setup
from distribute_jax.training._objective import MODES, variables, with_added_losses
from distribute_jax.training._weights import is_trained


def forward(
    module: nnx.Module, setup: Setup, x: PyTree, *, training: bool
) -> tuple[PyTree, jax.Array | None]:
    """Returns the outputs, and this replica's part of what the module's layers add to the loss."""
    keywords = call_keywords(module, setup.call, training=training)
    with setup.policy.computing(module):
        outputs, added = with_added_losses(module, setup.policy.cast_input(x), keywords)
    return setup.policy.cast_output(outputs), added


def _gradients(module: nnx.Module, setup: Setup, batch: PyTree) -> Any:
    """Returns this replica's gradients, and its loss, parts of it, outputs and sample weights."""
    x, y, sample_weight = unpack_x_y_sample_weight(batch)
    optimizer = setup.optimizer

    def loss_fn(module: nnx.Module) -> tuple[jax.Array, tuple[Any, ...]]:
        outputs, added = forward(module, setup, x, training=True)
        weight = class_weighted(setup.class_weight, y, outputs, sample_weight)
        parts = setup.objective(y, outputs, weight)
        total = setup.objective.total(parts, added)
        return optimizer.scale_loss(total), (total, parts, outputs, weight)

    return nnx.grad(loss_fn, argnums=nnx.DiffState(0, optimizer.wrt), has_aux=True)(module)


def train(module: nnx.Module, setup: Setup, batch: PyTree) -> None:
    """Updates the module, and adds the batch to loss and metrics."""
    x, y, _ = unpack_x_y_sample_weight(batch)
    optimizer, tracker = setup.optimizer, setup.tracker
    gradients, (total, parts, outputs, weight) = _gradients(module, setup, batch)
    if tracker.spikes is not None:
        tracker.spikes.judge(get_replica_context().all_reduce("sum", total))
    if setup.objective.losses:
        optimizer.update(module, gradients)
    else:  # a penalty alone has the same gradients on all replicas, which update would refuse to sum
        summed = get_replica_context().all_reduce("sum", gradients)
        optimizer.update(module, summed, skip_gradients_aggregation=True)
    tracker.update_loss(setup.objective, total, parts, example_counts(x))
    tracker.update_metrics(y, outputs, weight)


def replay(module: nnx.Module, setup: Setup, batch: PyTree) -> jax.Array:
    """Returns hashes of all replicas' gradients, (replicas, leaves, 2); the module is not changed."""
    gradients, _ = _gradients(nnx.clone(module), setup, batch)
    hashes = jnp.stack([bit_hash(leaf) for leaf in jax.tree.leaves(gradients)])
    return jnp.asarray(get_replica_context().all_gather(hashes[None], axis=0))


def test(module: nnx.Module, setup: Setup, batch: PyTree) -> None:
    """Adds a batch to loss and metrics, in evaluation mode; the module is not changed."""
    x, y, weight = unpack_x_y_sample_weight(batch)
    outputs, added = forward(nnx.clone(module), setup, x, training=False)
    if setup.objective.losses or added is not None:
        parts = setup.objective(y, outputs, weight)
        total = setup.objective.total(parts, added)
        setup.tested.update_loss(setup.objective, total, parts, example_counts(x))
    setup.tested.update_metrics(y, outputs, weight)


def predict(module: nnx.Module, setup: Setup, batch: PyTree) -> PyTree:
    """Returns the outputs, in evaluation mode; the module is not changed."""
    x, _, _ = unpack_x_y_sample_weight(batch)
    return forward(nnx.clone(module), setup, x, training=False)[0]


@promoting
def class_weighted(
    weights: tuple[tuple[int, float], ...], y: Any, outputs: Any, sample_weight: Any
) -> Any:
    """Multiplies the sample weights by those of the classes; a class that is not named counts 1.

    Labels of the outputs' shape are one-hot, as in Keras; with a dim less they are class numbers, one
    for each example or, in a sequence, for each token.
    """
    if not weights:
        return sample_weight
    if any(isinstance(tree, (dict, list, tuple)) for tree in (y, outputs, sample_weight)):
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
    if sample_weight is None:
        return factor
    array = real_array("class_weight", "sample_weight", sample_weight).astype(factor.dtype)
    return factor * align("class_weight", "sample_weight", array, "labels", factor.shape)


_FOREIGN = {
    "call": "the forward pass is that of the module: dj.Model(module)",
    "configure_optimizers": "pass the optimizer to compile",
    "forward": "the forward pass is that of the module: dj.Model(module)",
    "training_step": "write train_step(self, batch)",
    "validation_step": "write test_step(self, batch)",
}


def check_methods(cls: type) -> None:
    """Raises for a step of a subclass that takes no batch; warns of methods that are never called."""
    for name in ("train_step", "test_step", "predict_step"):
        if name in vars(cls):
            step = vars(cls)[name]
            if not takes(step, None, ()):
                raise ArgumentTypeError(
                    f"{cls.__name__}.{name}{inspect.signature(step)} is called with one argument, the "
                    f"batch. Write def {name}(self, batch), and in it x, y, sample_weight = "
                    "dj.unpack_x_y_sample_weight(batch)."
                )
    for name in _FOREIGN.keys() & vars(cls).keys():
        warn_user(f"{cls.__name__}.{name} is never called: {_FOREIGN[name]}.")


Step: TypeAlias = Callable[..., Any]

STEPS = {"train": train, "test": test, "predict": predict, "replay": replay}


def bind_step(
    kind: str, module: nnx.Module, setup: Setup, constants: tuple[Any, ...], model: Any = None
) -> Step:
    """Returns a step of positional arguments for ``run``, of a model if that overrides it.

    ``constants`` is what it reads of the setup: the user's functions, and numbers. Nothing that the model
    holds may hold the step.
    """
    # ``run`` looks for state in a step's closure, and not inside objects of the library, so all of it is
    # named there. It holds modules weakly, so the key of a program must not hold the setup either.
    optimizer, tracker, tested = setup.optimizer, setup.tracker, setup.tested
    step, setup_ref = STEPS[kind], weakref.ref(setup)

    def run_step(*batch: Any) -> Any:
        _ = optimizer, tracker, tested, constants
        return step(module, cast("Setup", setup_ref()), batch)

    def user_step(*batch: Any) -> Any:
        _ = module, optimizer, tracker, tested, constants
        return getattr(model, name)(batch)

    bound, name = run_step if model is None else user_step, f"{kind}_step"
    bound.__name__ = bound.__qualname__ = name
    return bound


@contextmanager
def watching(kind: str, module: nnx.Module) -> Iterator[None]:
    """Looks at the first call of a user's step, of which ``fit`` sums what it returns."""
    weights = variables(module).values()
    before = [weight.get_raw_value() for weight in weights]
    token = results_are_parts.set(True)
    try:
        yield
    finally:
        results_are_parts.reset(token)
    after = [weight.get_raw_value() for weight in weights]
    if kind == "train" and all(map(operator.is_, before, after)):
        log_once(
            "train_step has changed no variable of the module, so nothing is trained. Compute gradients "
            "with nnx.grad, and call self.optimizer.update(self.module, gradients)."
        )


_SWITCHES = ("deterministic", "use_running_average")
"""Attributes of Flax's layers that are True in evaluation mode."""


@contextmanager
def mode(module: nnx.Module, *, training: bool, trained: Any = None) -> Iterator[None]:
    """Puts every layer into training or evaluation mode for the block, and restores its mode afterwards.

    Of ``trained``, a filter, a batch norm without weights stays in evaluation mode.
    """
    frozen = set() if trained is None else _layers(module, is_trained) - _layers(module, trained)
    before = [
        (path, node, name, getattr(node, name))
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Module)
        for name in _SWITCHES
        if name in vars(node)
    ]
    for path, node, name, _ in before:
        setattr(node, name, not training or (name == _SWITCHES[1] and path in frozen))
    try:
        yield
    finally:
        for _, node, name, old in before:
            setattr(node, name, old)


def _layers(module: nnx.Module, of: Any) -> set[Any]:
    """Returns the paths of the layers that hold variables of a filter."""
    return {path[:-1] for path, _ in nnx.to_flat_state(nnx.state(module, of))}


def call_keywords(
    module: nnx.Module, call: Callable[..., Any], *, training: bool
) -> dict[str, Any]:
    """Returns the keywords by which a module gets the mode, and a Linen module what it may change."""
    known = inspect.signature(call).parameters
    keywords: dict[str, Any] = {
        name: value == training for name, value in MODES.items() if name in known
    }
    if isinstance(module, nnx.bridge.ToNNX) and training:
        kinds = {
            type(variable)
            for variable in variables(module).values()
            if not isinstance(variable, (nnx.Param, nnx.RngState))
        }
        collections = map(nnx.variablelib.variable_name_from_type, kinds)
        keywords["mutable"] = sorted(collections)  # such as batch_stats
    return keywords
