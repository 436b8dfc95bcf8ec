"""Checks that training on many replicas equals training on one device, to the last example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from distribute_jax._errors import NotEqualError, OutOfSyncError, PaddingLeakError
from distribute_jax.collectives import check_in_sync
from distribute_jax.losses import compute_average_loss
from distribute_jax.program import RunOptions
from distribute_jax.testing.conformance._core import Fact, Subject, refuses, replica, same, succeeds
from distribute_jax.training import Optimizer

_TOLERANCE = 1e-4
"""What float32 rounding may have grown to after a few steps."""


def _flax_optimizer(model: Any) -> Any:
    return nnx.Optimizer(model, transformation(), wrt=nnx.Param)


def _made(s: Subject, make_optimizer: Callable[[Any], Any]) -> tuple[Any, Any]:
    model = s.made(new_model)
    return model, s.made(lambda: make_optimizer(model))


def _gradients(model: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
    def loss(model: Any) -> jax.Array:
        return compute_average_loss(example_losses(model, x, y))

    found: tuple[Any, Any] = nnx.value_and_grad(loss)(model)
    return found


def _step(model: Any, optimizer: Any) -> Callable[..., Any]:
    """Makes the step with the sum of the gradients written out, or left to ``dj.Optimizer``."""

    def step(x: jax.Array, y: jax.Array) -> Any:
        loss, gradients = _gradients(model, x, y)
        if not isinstance(optimizer, Optimizer):
            gradients = replica().all_reduce("sum", gradients)
        optimizer.update(model, gradients)
        return replica().all_reduce("sum", loss)

    return step


def _equal_training(s: Subject, make_optimizer: Callable[[Any], Any]) -> Iterator[Fact]:
    sizes = (8, 8, 5, 1)
    model, optimizer = _made(s, make_optimizer)
    wanted = by_hand(trained([], model, optimizer).parameters, sizes)
    step = _step(model, optimizer)
    losses = [float(s.run(step, *batch)) for batch in s.batches(data(sizes))]
    yield from _as_by_hand(trained(losses, model, optimizer), wanted)
    yield succeeds("all copies of the state are equal", lambda: check_in_sync((model, optimizer)))


def _as_by_hand(found: Trained, wanted: Trained) -> Iterator[Fact]:
    for name in found._fields:
        yield from same(name, getattr(found, name), getattr(wanted, name), rtol=_TOLERANCE)


def training(s: Subject) -> Iterator[Fact]:
    """``nnx.Optimizer`` on summed gradients: four steps, two of them on partial batches."""
    yield from _equal_training(s, _flax_optimizer)


def training_with_dj_optimizer(s: Subject) -> Iterator[Fact]:
    """``dj.Optimizer`` sums the gradients itself, before they are clipped."""
    yield from _equal_training(s, lambda model: Optimizer(model, transformation()))


def run_steps(s: Subject) -> Iterator[Fact]:
    """Batches scanned in one program, and a partial remainder, are the single steps."""
    sizes = (8, 8, 8, 5)
    model, optimizer = _made(s, _flax_optimizer)
    wanted = by_hand(trained([], model, optimizer).parameters, sizes)
    step, iterator = _step(model, optimizer), iter(s.strategy.distribute_dataset(data(sizes)))
    take = partial(s.strategy.run_steps, step, iterator, 3, s.options)
    losses = [np.asarray(take()), np.asarray(take())]
    yield Fact("how many steps ran in each call", [len(part) for part in losses], [3, 1])
    yield from _as_by_hand(trained(np.concatenate(losses), model, optimizer), wanted)
    yield refuses("run_steps at the end", take, StopIteration)


def donation(s: Subject) -> Iterator[Fact]:
    """State is updated in place; with ``donate_state=False``, and under pmap, the old arrays stay."""
    model, optimizer = _made(s, lambda model: nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))
    step, (batch,) = _step(model, optimizer), s.batches(data((8,)))
    for donate in (False, True):
        options = RunOptions(lowering=s.options.lowering, donate_state=donate)
        old = model.kernel.get_raw_value()
        s.strategy.run(step, args=batch, options=options)
        gone = bool(old.is_deleted())
        wanted = donate and s.options.lowering != "pmap"
        yield Fact(f"the old array is gone with donate_state={donate}", gone, wanted)


def partial_batches(s: Subject) -> Iterator[Fact]:
    """5 of 8 examples: sums, means, masks and results leave out the padding, and leaks are found."""

    def step(x: jax.Array) -> Any:
        total = replica().all_reduce("sum", jax.numpy.sum(x * replica().batch_mask))
        mean = replica().all_reduce("sum", compute_average_loss(x**2))
        return total, mean, replica().all_reduce("sum", replica().batch_mask.sum()), 2 * x

    whole, rest = np.arange(8, dtype=np.float32) + 1, np.arange(5, dtype=np.float32) + 1
    full, partial = s.batches([whole, rest])
    for batch, x in ((full, whole), (partial, rest)):
        total, mean, count, doubled = s.run(step, batch)
        name = f"{len(x)} examples"
        yield Fact(f"their number, of {name}", int(count), len(x))
        yield Fact(f"the sum of {name}", float(total), float(x.sum()))
        yield Fact(f"the mean square of {name}", float(mean), float((x**2).mean()))
        yield from same(f"twice {name}", s.strategy.gather(doubled, axis=0), 2 * x)
    call = lambda: s.run(lambda x: replica().all_reduce("sum", x.sum()), partial)  # noqa: E731
    yield refuses("a sum without the mask", call, PaddingLeakError)


def unreduced_gradients_refused(s: Subject) -> Iterator[Fact]:
    """Gradients that were not summed, and those that were summed twice, are refused."""
    (batch,) = s.batches(data((8,)))
    model, optimizer = _made(s, _flax_optimizer)

    def forgets(x: jax.Array, y: jax.Array) -> None:
        optimizer.update(model, _gradients(model, x, y)[1])

    own = s.made(lambda: Optimizer(model, transformation()))

    def twice(x: jax.Array, y: jax.Array) -> None:
        own.update(model, replica().all_reduce("sum", _gradients(model, x, y)[1]))

    if s.n > 1:
        yield refuses(
            "gradients that were not summed", lambda: s.run(forgets, *batch), OutOfSyncError
        )
        yield refuses("gradients summed twice", lambda: s.run(twice, *batch), OutOfSyncError)


def verify_option(s: Subject) -> Iterator[Fact]:
    """``RunOptions(verify=…)`` passes a right step and finds gradients of a mean that were summed."""
    (batch,) = s.batches([data((8,))[0][0]])
    options = RunOptions(lowering=s.options.lowering, verify="always")

    def run(step: Callable[..., Any]) -> Any:
        return s.strategy.run(step, args=(batch,), options=options)

    right = lambda x: replica().all_reduce("mean", x.mean(0))  # noqa: E731
    wrong = lambda x: replica().all_reduce("sum", x.mean(0))  # noqa: E731
    yield succeeds("the mean of means", lambda: run(right))
    if s.n > 1:
        yield refuses("the sum of means", lambda: run(wrong), NotEqualError)


CHECKS = (
    training,
    training_with_dj_optimizer,
    run_steps,
    donation,
    partial_batches,
    unreduced_gradients_refused,
    verify_option,
)


_RATE, _MOMENTUM, _NORM = 0.2, 0.9, 1.0


class Trained(NamedTuple):
    """What training gave: the loss of each step, and at the end bias and kernel with their momenta."""

    losses: Any
    parameters: Any
    momenta: Any


def new_model() -> Any:
    """Three weights and a bias."""
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0))


def transformation() -> Any:
    """Clipping, which must see the gradient of the global batch, and momentum, which is state."""
    return optax.chain(optax.clip_by_global_norm(_NORM), optax.sgd(_RATE, momentum=_MOMENTUM))


def data(sizes: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Makes global batches of inputs and targets."""
    rng = np.random.default_rng(0)
    draw = [(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in sizes]
    return [(x.astype(np.float32), y.astype(np.float32)) for x, y in draw]


def example_losses(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the loss of each example."""
    return jnp.square(model(x)[:, 0] - y)


def trained(losses: Any, model: Any, optimizer: Any) -> Trained:
    """Copies what training gave to the host."""
    return Trained(np.asarray(losses, np.float32), _arrays(model), _arrays(optimizer))


def _arrays(node: Any) -> list[np.ndarray]:
    leaves = map(np.asarray, jax.tree.leaves(nnx.state(node)))
    return [leaf for leaf in leaves if leaf.ndim]


def by_hand(start: list[np.ndarray], sizes: tuple[int, ...]) -> Trained:
    """Trains on whole batches from a bias and a kernel, with the gradients worked out on paper."""
    b, w = (leaf.astype(np.float64) for leaf in start)
    momenta, losses = [np.zeros_like(b), np.zeros_like(w)], []
    for x, y in data(sizes):
        error = x @ w + b - y[:, None]
        losses.append((error**2).mean())
        gradients = [2 * error.mean(0), 2 * x.T @ error / len(x)]
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        scale = min(1.0, _NORM / norm)
        momenta = [_MOMENTUM * m + scale * g for m, g in zip(momenta, gradients, strict=True)]
        b, w = b - _RATE * momenta[0], w - _RATE * momenta[1]
    rounded = [np.float32(leaf) for leaf in (b, w, *momenta)]
    return Trained(np.asarray(losses, np.float32), rounded[:2], rounded[2:])
