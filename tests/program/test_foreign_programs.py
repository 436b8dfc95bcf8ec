"""Programs that were written for one device, or for ``pmap``, with few lines changed: the same losses.

Each program is two functions: the original, which knows nothing of this library, and its port, which takes a
strategy. Both return the loss of each step.
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
from flax import linen, nnx
from flax.training import train_state

import distribute_jax as dj

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(22, 6, 6, 1)).astype(np.float32)
LABELS = RNG.integers(0, 3, 22).astype(np.int32)
TOKENS = RNG.integers(1, 11, (22, 7)).astype(np.int32)
LENGTHS = RNG.integers(0, 8, 22)
TOKENS[np.arange(7) >= LENGTHS[:, None]] = 0  # padding; some sentences are empty

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def batches(*arrays: Any, partial: bool = True) -> Iterator[tuple[Any, ...]]:
    """Global batches of 8; the last has 6 examples, and is left out unless a program takes it."""
    for i in range(0, 22 if partial else 16, 8):
        yield tuple(array[i : i + 8] for array in arrays)


# 1. Flax's imagenet example: Linen, batch norm over the axis "batch", pmap.


class ConvNet(linen.Module):
    """A convolution, batch norm over all devices, and a dense layer."""

    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = linen.Conv(4, (3, 3))(x)
        x = linen.BatchNorm(use_running_average=not train, axis_name="batch", momentum=0.9)(x)
        return linen.Dense(3)(linen.relu(x).mean((1, 2)))


class StateWithStatistics(train_state.TrainState):
    """What the example keeps."""

    batch_stats: Any


def new_imagenet() -> StateWithStatistics:
    model = ConvNet()
    variables = model.init(jax.random.key(0), IMAGES[:1], train=False)
    return StateWithStatistics.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.sgd(0.1, momentum=0.9, nesterov=True),
        batch_stats=variables["batch_stats"],
    )


def imagenet_step(state: StateWithStatistics, image: Any, label: Any) -> tuple[Any, Any]:
    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, image, train=True, mutable=["batch_stats"])
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params) if p.ndim > 1)
        return cross_entropy(logits, label).mean() + 1e-4 * penalty, new["batch_stats"]

    (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = jax.lax.pmean(grads, axis_name="batch")
    loss = jax.lax.pmean(loss, axis_name="batch")
    return state.apply_gradients(grads=grads, batch_stats=statistics), loss


def imagenet() -> list[float]:
    step = jax.pmap(imagenet_step, axis_name="batch", devices=jax.devices()[:1])
    state = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], new_imagenet())
    losses = []
    for image, label in batches(IMAGES, LABELS, partial=False):
        state, loss = step(state, image[None], label[None])
        losses.append(float(loss[0]))
    return losses


def imagenet_ported(make: Callable[..., dj.Strategy]) -> list[float]:
    strategy = make(axis_name="batch")
    with strategy.scope():
        state = new_imagenet()
    losses = []
    for batch in strategy.distribute_dataset(list(batches(IMAGES, LABELS, partial=False))):
        state, loss = strategy.run(imagenet_step, args=(state, *batch))
        losses.append(float(loss))
    return losses


# 2. A Linen TrainState with dropout, the key folded with the step. One mask for all examples.


class Dropped(linen.Module):
    """Two layers with dropout between them."""

    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = linen.relu(linen.Dense(8)(x.reshape(len(x), -1)))
        x = linen.Dropout(0.5, broadcast_dims=(0,), deterministic=not train)(x)
        return linen.Dense(3)(x)


def new_dropout() -> train_state.TrainState:
    model = Dropped()
    params = model.init(jax.random.key(0), IMAGES[:1], train=False)["params"]
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01))
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def dropout_step(state: Any, key: Any, image: Any, label: Any, mean: Any, total: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        rngs = {"dropout": jax.random.fold_in(key, state.step)}
        return mean(
            cross_entropy(state.apply_fn({"params": params}, image, True, rngs=rngs), label)
        )

    loss, grads = total(jax.value_and_grad(loss_fn)(state.params))
    return state.apply_gradients(grads=grads), loss


def dropout() -> list[float]:
    state, key, losses = new_dropout(), jax.random.key(7), []
    step = jax.jit(partial(dropout_step, mean=jnp.mean, total=lambda tree: tree))
    for batch in batches(IMAGES, LABELS):
        state, loss = step(state, key, *batch)
        losses.append(float(loss))
    return losses


def all_sum(tree: Any) -> Any:
    """Sums over the replicas."""
    return dj.get_replica_context().all_reduce("sum", tree)


def dropout_ported(make: Callable[..., dj.Strategy]) -> list[float]:
    strategy, losses = make(), []
    with strategy.scope():
        state, key = new_dropout(), jax.random.key(7)
    step = partial(dropout_step, mean=dj.compute_average_loss, total=all_sum)
    for batch in strategy.distribute_dataset(list(batches(IMAGES, LABELS))):
        state, loss = strategy.run(step, args=(state, key, *batch))
        losses.append(float(loss))
    return losses


# 4. A language model: the loss is that of a token, and replicas have different numbers of tokens, or none.


class LM(nnx.Module):
    """A recurrent model over eleven words."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs))
        self.head = nnx.Linear(8, 11, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        return self.head(self.rnn(self.embed(tokens)))


def lm() -> list[float]:
    model = LM(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)

    @nnx.jit
    def step(model: LM, optimizer: Any, tokens: Any) -> Any:
        def loss_fn(model: LM) -> Any:
            weights = (tokens[:, 1:] > 0).astype(jnp.float32)
            losses = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
            return (losses * weights).sum() / weights.sum()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, *batch)) for batch in batches(TOKENS)]


def lm_ported(make: Callable[..., dj.Strategy]) -> list[float]:
    strategy = make()
    with strategy.scope():
        model = LM(nnx.Rngs(0))
        optimizer = dj.Optimizer(model, optax.adam(0.05))

    def step(model: LM, optimizer: Any, tokens: Any) -> Any:
        def loss_fn(model: LM) -> Any:
            weights = (tokens[:, 1:] > 0).astype(jnp.float32)
            losses = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
            return dj.compute_average_loss(losses, sample_weight=weights, divide_by="weights")

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return all_sum(loss)

    data = strategy.distribute_dataset([tokens for (tokens,) in batches(TOKENS)])
    return [float(strategy.run(step, args=(model, optimizer, tokens))) for tokens in data]


# 5. TensorFlow's tutorial "Custom training with tf.distribute.Strategy".


class Classifier(nnx.Module):
    """The network of the tutorial, smaller."""

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

    def test_step(inputs: Any) -> None:
        images, labels = inputs
        test_loss.update(loss=loss_object(labels, model(images)))

    losses, total = [], 0.0
    for batch in strategy.distribute_dataset(list(batches(IMAGES, LABELS))):
        per_replica = strategy.run(train_step, args=(batch,))
        losses.append(float(strategy.reduce("sum", per_replica, axis=None)))
        test_loss.reset()
        strategy.run(test_step, args=(batch,))
        total += float(test_loss.compute()) / 3
    assert int(steps.read_value()) == 3
    return [*losses, total]


# 6. optax.MultiSteps with a state of plain arrays.


def new_multi_steps() -> tuple[Any, Any, Any]:
    tx = optax.MultiSteps(optax.adam(0.1), every_k_schedule=2).gradient_transformation()
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


# 7. A GAN: two networks, two optimizers, one step; the noise comes with the batch.


NOISE = RNG.normal(size=(22, 4)).astype(np.float32)


def new_gan(optimizer: Any) -> tuple[Any, ...]:
    rngs = nnx.Rngs(0)
    generator = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 36, rngs=rngs))
    critic = nnx.Sequential(nnx.Linear(36, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 1, rngs=rngs))
    rates = optax.adam(0.01), optax.adam(0.02)
    return generator, critic, *map(optimizer, (generator, critic), rates)


def gan_step(nets: tuple[Any, ...], x: Any, z: Any, mean: Any) -> Any:
    generator, critic, generator_optimizer, critic_optimizer = nets
    entropy = optax.sigmoid_binary_cross_entropy

    def of_critic(critic: Any) -> Any:
        real, fake = critic(x.reshape(len(x), 36)), critic(generator(z))
        return mean((entropy(real, jnp.ones_like(real)) + entropy(fake, 0 * fake))[:, 0])

    def of_generator(generator: Any) -> Any:
        fake = critic(generator(z))
        return mean(entropy(fake, jnp.ones_like(fake))[:, 0])

    first, grads = nnx.value_and_grad(of_critic)(critic)
    critic_optimizer.update(critic, grads)
    second, grads = nnx.value_and_grad(of_generator)(generator)
    generator_optimizer.update(generator, grads)
    return first + second


def gan() -> list[float]:
    nets = new_gan(partial(nnx.Optimizer, wrt=nnx.Param))
    step = nnx.jit(partial(gan_step, mean=jnp.mean))
    return [float(step(nets, *batch)) for batch in batches(IMAGES, NOISE)]


def gan_ported(make: Callable[..., dj.Strategy]) -> list[float]:
    strategy = make()
    with strategy.scope():
        nets = new_gan(dj.Optimizer)

    def step(x: Any, z: Any) -> Any:
        return all_sum(gan_step(nets, x, z, mean=dj.compute_average_loss))

    data = strategy.distribute_dataset(list(batches(IMAGES, NOISE)))
    return [float(strategy.run(step, args=batch)) for batch in data]


# 8. Batches that are dicts, as of Hugging Face: one epoch of an NNX loop, and ``fit``.


def dicts() -> list[float]:
    model = Classifier()
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: dict[str, Any]) -> Any:
        def loss_fn(model: Any) -> Any:
            return cross_entropy(model(batch["image"]), batch["label"]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    losses = [
        float(step(model, optimizer, {"image": image, "label": label}))
        for image, label in batches(IMAGES, LABELS)
    ]
    return [float(np.average(losses, weights=[8, 8, 6]))]


def dicts_ported(make: Callable[..., dj.Strategy]) -> list[float]:
    strategy = make()
    with strategy.scope():
        model = dj.Model(Classifier())
    model.compile(optax.adam(0.01), dj.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = [{"image": image, "label": label} for image, label in batches(IMAGES, LABELS)]
    rate = dj.callbacks.LearningRateScheduler(lambda epoch: 0.01)
    history = model.fit(data, x_key="image", y_key="label", verbose=0, callbacks=[rate])
    return list(history.history["loss"])


PROGRAMS = {
    "imagenet": (imagenet, imagenet_ported),
    "dropout": (dropout, dropout_ported),
    "language model": (lm, lm_ported),
    "tutorial": (tutorial, tutorial_ported),
    "MultiSteps": (multi_steps, multi_steps_ported),
    "gan": (gan, gan_ported),
    "dicts": (dicts, dicts_ported),
}
QUICK = {("imagenet", 4)}


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        pytest.param(name, n, marks=() if (name, n) in QUICK else pytest.mark.exhaustive)
        for name in PROGRAMS
        for n in (1, 4)
    ],
)
def test_a_ported_program_has_the_losses_of_the_original(name: str, replicas: int):
    """To 1e-5, on whole and partial batches."""
    original, ported = PROGRAMS[name]
    losses = ported(lambda **options: dj.MirroredStrategy(list(range(replicas)), **options))
    expected = original()
    assert len(set(expected)) > len(expected) / 2
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
