"""The train, test and predict steps of ``Model``, each written for one replica; the mode of modules."""

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

from distribute_jax._checks import is_real, takes
from distribute_jax._errors import ArgumentError, ArgumentTypeError, log_once, warn_user
from distribute_jax._messages import PyTree, leaf_text, promoting, real_array
from distribute_jax._padding import align
from distribute_jax.collectives._check_in_sync import bit_hash
from distribute_jax.program import results_are_parts
from distribute_jax.strategies import get_replica_context
from distribute_jax.training._batches import example_counts, unpack_x_y_sample_weight
from distribute_jax.training._compile import Setup
from distribute_jax.training._objective import MODE_KEYWORDS, variables, with_added_losses
from distribute_jax.training._weights import is_trained


def forward(
    module: nnx.Module, setup: Setup, x: PyTree, *, training: bool
) -> tuple[PyTree, jax.Array | None]:
    """Returns the outputs, and this replica's part of the losses that the module's layers add."""
    keywords = call_keywords(module, setup.call, training=training)
    with setup.policy.computing(module):
        outputs, added = with_added_losses(module, setup.policy.cast_input(x), keywords)
    return setup.policy.cast_output(outputs), added


def _gradients(module: nnx.Module, setup: Setup, batch: PyTree) -> Any:
    """Returns this replica's gradients and, as aux, loss, its parts, outputs and sample weights."""
    x, y, sample_weight = unpack_x_y_sample_weight(batch)
    optimizer = setup.optimizer

    def loss_fn(module: nnx.Module) -> tuple[jax.Array, tuple[Any, ...]]:
        outputs, added = forward(module, setup, x, training=True)
        weight = apply_class_weights(setup.class_weight, y, outputs, sample_weight)
        parts = setup.objective(y, outputs, weight)
        total = setup.objective.total(parts, added)
        return optimizer.scale_loss(total), (total, parts, outputs, weight)

    return nnx.grad(loss_fn, argnums=nnx.DiffState(0, optimizer.wrt), has_aux=True)(module)


def train(module: nnx.Module, setup: Setup, batch: PyTree) -> None:
    x, y, _ = unpack_x_y_sample_weight(batch)
    optimizer, tracker = setup.optimizer, setup.tracker
    gradients, (total, parts, outputs, weight) = _gradients(module, setup, batch)
    if tracker.spikes is not None:
        tracker.spikes.judge(get_replica_context().all_reduce("sum", total))
    if setup.objective.losses:
        optimizer.update(module, gradients)
    else:  # a penalty alone has equal gradients on all replicas, which update would refuse to sum
        summed = get_replica_context().all_reduce("sum", gradients)
        optimizer.update(module, summed, skip_gradients_aggregation=True)
    tracker.update_loss(setup.objective, total, parts, example_counts(x))
    tracker.update_metrics(y, outputs, weight)


def replay(module: nnx.Module, setup: Setup, batch: PyTree) -> jax.Array:
    """Returns hashes of all replicas' gradients, of shape (replicas, leaves, 2); changes no state."""
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
        setup.test_tracker.update_loss(setup.objective, total, parts, example_counts(x))
    setup.test_tracker.update_metrics(y, outputs, weight)


def predict(module: nnx.Module, setup: Setup, batch: PyTree) -> PyTree:
    """Returns the outputs, in evaluation mode; the module is not changed."""
    x, _, _ = unpack_x_y_sample_weight(batch)
    return forward(nnx.clone(module), setup, x, training=False)[0]


@promoting
def apply_class_weights(
    weights: tuple[tuple[int, float], ...], y: Any, outputs: Any, sample_weight: Any
) -> Any:
    """Multiplies the sample weights by those of the classes; a class that is not listed has weight 1.

    As in Keras, labels of the outputs' shape are one-hot; with one dim less they are class numbers, one
    per example or, in a sequence, per token.
    """
    if not weights:
        return sample_weight
    labels = real_array("class_weight", "y", y)
    if 1 < labels.ndim >= real_array("class_weight", "outputs", outputs).ndim:
        labels = labels[..., 0] if labels.shape[-1] == 1 else jnp.argmax(labels, axis=-1)
    factor = jnp.ones(labels.shape, jnp.float32)
    for label, weight in weights:
        factor = jnp.where(labels == label, weight, factor)
    if sample_weight is None:
        return factor
    array = real_array("class_weight", "sample_weight", sample_weight).astype(factor.dtype)
    return factor * align("class_weight", "sample_weight", array, "labels", factor.shape)


_NEVER_CALLED = {
    "call": "the forward pass is that of the module: dj.Model(module)",
    "configure_optimizers": "pass the optimizer to compile",
    "forward": "the forward pass is that of the module: dj.Model(module)",
    "training_step": "write train_step(self, batch)",
    "validation_step": "write test_step(self, batch)",
}


def check_methods(cls: type) -> None:
    """Raises if a subclass's step does not take one batch; warns of methods that are never called."""
    for name in ("train_step", "test_step", "predict_step"):
        if name in vars(cls):
            step = vars(cls)[name]
            if not takes(step, None, ()):
                raise ArgumentTypeError(
                    f"{cls.__name__}.{name}{inspect.signature(step)} is called with one argument, the "
                    f"batch. Write def {name}(self, batch), and in it x, y, sample_weight = "
                    "dj.unpack_x_y_sample_weight(batch)."
                )
    for name in _NEVER_CALLED.keys() & vars(cls).keys():
        warn_user(f"{cls.__name__}.{name} is never called: {_NEVER_CALLED[name]}.")


Step: TypeAlias = Callable[..., Any]

STEPS = {"train": train, "test": test, "predict": predict, "replay": replay}


def bind_step(
    kind: str, module: nnx.Module, setup: Setup, constants: tuple[Any, ...], model: Any = None
) -> Step:
    """Returns a step for ``run`` with positional arguments; the model's method if a ``model`` is passed.

    ``constants`` are the user's functions and numbers that the step reads from the setup. The model must
    not hold a step that holds the model.
    """
    # ``run`` finds state in a step's closure but not inside the library's objects, so the closure names all
    # of it. Programs hold modules weakly, so their cache keys must not hold the setup either.
    optimizer, tracker, test_tracker = setup.optimizer, setup.tracker, setup.test_tracker
    step, setup_ref = STEPS[kind], weakref.ref(setup)

    def run_step(*batch: Any) -> Any:
        _ = optimizer, tracker, test_tracker, constants
        return step(module, cast("Setup", setup_ref()), batch)

    def user_step(*batch: Any) -> Any:
        _ = module, optimizer, tracker, test_tracker, constants
        return _checked(kind, method(model, batch))

    bound, name = run_step if model is None else user_step, f"{kind}_step"
    method: Any = getattr(type(model), name, None)
    bound.__name__ = bound.__qualname__ = name
    return bound


def _checked(kind: str, returned: Any) -> Any:
    """Returns what a user's step returned; raises if that is not None, or a dict of numbers by name."""
    if kind == "predict" or returned is None:
        return returned
    wrong = leaf_text(returned)
    if isinstance(returned, dict):
        keys = [k for k, value in returned.items() if not (isinstance(k, str) and is_real(value))]
        wrong = ", ".join(f"{k!r}: {leaf_text(returned[k])}" for k in keys)
    if wrong:
        raise ArgumentError(
            f"{kind}_step returned {wrong}. It must return None, or a dict of numbers by name, each this "
            "replica's part of a value of the global batch, such as dj.compute_average_loss(values)."
        )
    return returned


@contextmanager
def checking_first_call(kind: str, module: nnx.Module) -> Iterator[None]:
    """Warns if the first call of a user's step changes no weight or returns values that are not parts."""
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


_MODE_ATTRIBUTES = ("deterministic", "use_running_average")
"""Attributes of Flax's layers that are True in evaluation mode; the second is that of batch norm."""


@contextmanager
def mode(module: nnx.Module, *, training: bool, trained: Any = None) -> Iterator[None]:
    """Puts every layer into training or evaluation mode for the block, then restores its mode.

    A batch norm whose weights the filter ``trained`` does not select stays in evaluation mode.
    """
    frozen = (
        set()
        if trained is None
        else _layers_with(module, is_trained) - _layers_with(module, trained)
    )
    before = [
        (path, node, name, getattr(node, name))
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Module)
        for name in _MODE_ATTRIBUTES
        if name in vars(node)
    ]
    for path, node, name, _ in before:
        setattr(node, name, not training or (name == _MODE_ATTRIBUTES[1] and path in frozen))
    try:
        yield
    finally:
        for _, node, name, old in before:
            setattr(node, name, old)


def _layers_with(module: nnx.Module, of: Any) -> set[Any]:
    return {path[:-1] for path, _ in nnx.to_flat_state(nnx.state(module, of))}


def call_keywords(
    module: nnx.Module, call: Callable[..., Any], *, training: bool
) -> dict[str, Any]:
    """Returns the keywords that tell a module its mode, and a Linen module its mutable collections."""
    known = inspect.signature(call).parameters
    keywords: dict[str, Any] = {
        name: value == training for name, value in MODE_KEYWORDS.items() if name in known
    }
    if isinstance(module, nnx.bridge.ToNNX) and training:
        kinds = {
            type(variable)
            for variable in variables(module).values()
            if not isinstance(variable, (nnx.Param, nnx.RngState))
        }
        collections = map(nnx.variablelib.variable_name_from_type, kinds)
        keywords["mutable"] = sorted(collections)  # e.g. batch_stats
    return keywords
