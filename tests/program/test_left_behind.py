"""Tracers do not leak into the user's objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import distribute_jax as dj


class Trainer:
    """A plain object with attributes that a step may assign."""

    best: Any

    def __init__(self) -> None:
        self.best = 0.0
        self.history: list[Any] = [1.0]
        self.logs: dict[str, Any] = {"step": 1}


def _into_a_new_attribute(trainer: Trainer, loss: jax.Array) -> None:
    trainer.loss = loss  # type: ignore[attr-defined]


def _into_an_old_attribute(trainer: Trainer, loss: jax.Array) -> None:
    trainer.best = loss


LEAKS: dict[str, Callable[[Trainer, jax.Array], Any]] = {
    r"trainer\.logs\['loss'\]": lambda trainer, loss: trainer.logs.update(loss=loss),
    r"trainer\.history\[1\]": lambda trainer, loss: trainer.history.append(loss),
    r"trainer\.loss": _into_a_new_attribute,
    r"trainer\.best": _into_an_old_attribute,
    r"trainer\.logs\['all'\]\[0\]\['loss'\]\[0\]": lambda trainer, loss: trainer.logs.update(
        all=[{"loss": (loss,)}]
    ),
}


@pytest.mark.parametrize("place", LEAKS)
def test_an_array_left_in_an_object_is_named_and_removed(s2: dj.MirroredStrategy, place: str):
    """The error names the place; the object is as before, and a correct step then works."""
    trainer = Trainer()

    def step(x: jax.Array, keep: bool) -> jax.Array:
        if keep:
            LEAKS[place](trainer, x * 2)
        return x * 2 + trainer.best

    with pytest.raises(dj.StaleCaptureError, match=place):
        s2.run(step, args=(1.0, True))
    assert vars(trainer) == {"best": 0.0, "history": [1.0], "logs": {"step": 1}}
    assert float(s2.run(step, args=(1.0, False))) == 2.0


def test_a_result_that_is_not_a_pytree_is_refused(s2: dj.MirroredStrategy):
    """Arrays in a plain object would be leaked tracers; the error says how to return them."""

    class Outcome:
        def __init__(self, loss: jax.Array) -> None:
            self.loss = loss

    with pytest.raises(ValueError, match=r"Outcome as result\['out'\].*loss.*register_dataclass"):
        s2.run(lambda x: {"out": Outcome(x * 2)}, args=(1.0,))


def test_a_nonlocal_that_is_assigned_is_named(s2: dj.MirroredStrategy):
    """``nonlocal loss`` cannot pass a number out of a step."""
    loss = None

    def step() -> jax.Array:
        nonlocal loss
        loss = jnp.float32(1) * dj.get_replica_context().replica_id_in_sync_group
        return loss

    with pytest.raises(dj.StaleCaptureError, match="loss"):
        s2.run(step)


def test_containers_are_restored_when_the_step_raises(s2: dj.MirroredStrategy):
    """A step that fails halfway through its trace leaves no tracer in a dict."""
    logs: dict[str, Any] = {}

    def step(x: jax.Array) -> None:
        logs["x"] = x * 2
        raise KeyError("half way")

    with pytest.raises(KeyError, match="half way"):
        s2.run(step, args=(1.0,))
    assert logs == {}


def test_an_array_that_a_cache_kept_of_an_earlier_trace_is_named(s2: dj.MirroredStrategy):
    """It has no numbers, so the program of another batch would lack an input."""

    @functools.cache
    def table(length: int) -> jax.Array:
        return jnp.arange(length)

    def step(x: jax.Array) -> jax.Array:
        return x * table(4).sum()

    s2.run(step, args=(jnp.ones(2),))
    with pytest.raises(
        dj.StaleCaptureError, match=r"earlier trace of it, and have no numbers:\n  int32\[4\]"
    ):
        s2.run(step, args=(jnp.ones(3),))


def test_python_values_assigned_while_tracing_stay(s2: dj.MirroredStrategy):
    """Python values that are assigned while tracing stay, as users count traces with them."""
    trainer = Trainer()

    def step(x: jax.Array) -> jax.Array:
        trainer.history.append(len(trainer.history))
        return x

    s2.run(step, args=(1.0,))
    s2.run(step, args=(2.0,))
    assert trainer.history == [1.0, 1]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        out = self.layer(x)
        self.sow(nnx.Intermediate, "seen", out)
        return out


@pytest.mark.parametrize("kind", ["sow", "layer", "array", "data"])
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_a_step_stores_on_a_module_is_named(s2: dj.MirroredStrategy, kind: str):
    """A sown value, a replaced layer and an assigned array: each gets the right advice."""
    with s2.scope():
        net = Net(nnx.Rngs(0))
    layer = net.layer

    def step(x: jax.Array) -> jax.Array:
        if kind == "sow":
            return net(x)
        if kind == "layer":
            net.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
        else:
            net.seen = nnx.data(x * 2) if kind == "data" else x * 2
        return x

    advice = {
        "sow": r"seen \(Intermediate\) on Net.*return it from the step instead of self\.sow",
        "layer": r"layer \(Linear\) on Net.*Create layers and variables before",
        "array": r"seen on Net, an array.*nnx\.Variable\(value\) in __init__",
        "data": r"assigned seen on Net.*nnx\.Variable",
    }
    with pytest.raises(dj.StaleCaptureError, match=advice[kind]):
        s2.run(step, args=(jnp.ones((2, 2)),))
    assert net.layer is layer
    assert not hasattr(net, "seen")
