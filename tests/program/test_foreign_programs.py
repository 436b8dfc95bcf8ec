"""Programs for one device and their ports have the same losses. The gallery has more of them.

Each program is two functions: the original, without this library, and its port, which takes a strategy. Both
return the loss of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx

import distribute_jax as dj

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(22, 6, 6, 1)).astype(np.float32)
LABELS = RNG.integers(0, 3, 22).astype(np.int32)

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def batches(*arrays: Any) -> Iterator[tuple[Any, ...]]:
    """Global batches of 8; the last has 6 examples."""
    for i in range(0, 22, 8):
        yield tuple(array[i : i + 8] for array in arrays)


def all_sum(tree: Any) -> Any:
    return dj.get_replica_context().all_reduce("sum", tree)


# 1. TensorFlow's tutorial "Custom training with tf.distribute.Strategy".


class Classifier(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.dense = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dense(nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2)).mean((1, 2)))


def tutorial() -> list[float]:
    model, total = Classifier(), 0.0
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    @nnx.jit
    def train_step(model: Any, optimizer: Any, images: Any, labels: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(images), labels).mean())(model)
        optimizer.update(model, grads)
        return loss

    losses = []
    for images, labels in batches(IMAGES, LABELS):
        losses.append(float(train_step(model, optimizer, images, labels)))
        total += float(cross_entropy(model(images), labels).mean()) / 3
    return [*losses, total]


def tutorial_ported(make: Callable[..., dj.Strategy]) -> list[float]:
    strategy = make()
    with strategy.scope():
        model = Classifier()
        optimizer = dj.Optimizer(model, optax.adam(0.01))
        loss_object = dj.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        test_loss = dj.metrics.Average("loss")
        steps = dj.Variable(
            initial_value=0, name="steps", aggregation=dj.VariableAggregation.ONLY_FIRST_REPLICA
        )

    def compute_loss(labels: Any, predictions: Any) -> Any:
        return dj.compute_average_loss(loss_object(labels, predictions))

    def train_step(inputs: Any) -> Any:
        images, labels = inputs
        loss, grads = nnx.value_and_grad(lambda m: compute_loss(labels, m(images)))(model)
        optimizer.update(model, grads)
        steps.assign_add(1)
        return loss

    def evaluate_step(inputs: Any) -> None:
        images, labels = inputs
        test_loss.update(loss=loss_object(labels, model(images)))

    losses, total = [], 0.0
    for batch in strategy.distribute_dataset(list(batches(IMAGES, LABELS))):
        per_replica = strategy.run(train_step, args=(batch,))
        losses.append(float(strategy.reduce("sum", per_replica, axis=None)))
        test_loss.reset()
        strategy.run(evaluate_step, args=(batch,))
        total += float(test_loss.compute()) / 3
    assert int(steps.read_value()) == 3
    return [*losses, total]


# 2. optax.MultiSteps with a state of plain arrays.


def new_multi_steps() -> tuple[Any, Any, Any]:
    tx = optax.MultiSteps(
        optax.sgd(0.1, momentum=0.9), every_k_schedule=2
    ).gradient_transformation()
    params = {"w": jnp.zeros((36, 3)), "b": jnp.zeros(3)}
    return tx, params, tx.init(params)


def multi_steps_step(tx: Any, state: Any, x: Any, y: Any, mean: Any, total: Any) -> Any:
    params, opt_state = state
    loss_fn = lambda p: mean(cross_entropy(x.reshape(len(x), 36) @ p["w"] + p["b"], y))  # noqa: E731
    loss, grads = total(jax.value_and_grad(loss_fn)(params))
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def multi_steps() -> list[float]:
    tx, *state = new_multi_steps()
    losses = []
    step = jax.jit(partial(multi_steps_step, tx, mean=jnp.mean, total=lambda tree: tree))
    for batch in [*batches(IMAGES, LABELS)] * 2:
        state, loss = step(tuple(state), *batch)
        losses.append(float(loss))
    return losses


def multi_steps_ported(make: Callable[..., dj.Strategy]) -> list[float]:
    strategy, losses = make(), []
    with strategy.scope():
        tx, *state = new_multi_steps()
    step = partial(multi_steps_step, tx, mean=dj.compute_average_loss, total=all_sum)
    for batch in strategy.distribute_dataset([*batches(IMAGES, LABELS)] * 2):
        state, loss = strategy.run(step, args=(tuple(state), *batch))
        losses.append(float(loss))
    return losses


PROGRAMS = {
    "tutorial": (tutorial, tutorial_ported),
    "MultiSteps": (multi_steps, multi_steps_ported),
}


@pytest.mark.parametrize(
    ("name", "replicas"),
    [("MultiSteps", 4), long("MultiSteps", 1), long("tutorial", 1), long("tutorial", 4)],
)
def test_a_ported_program_has_the_losses_of_the_original(name: str, replicas: int):
    """To 1e-5, on whole and partial batches."""
    original, ported = PROGRAMS[name]
    losses = ported(lambda **options: dj.MirroredStrategy(list(range(replicas)), **options))
    expected = original()
    assert len(set(expected)) > len(expected) / 2
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
