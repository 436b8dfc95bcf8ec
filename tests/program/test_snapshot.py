"""A second copy of the weights: averaged, fixed for some steps, or the best so far.

State is donated, but for the arrays that something beside their variable refers to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import long
from flax import nnx

import distribute_jax as dj
from distribute_jax.program import _call

STEPS = 5
EVERY = 3
random = np.random.default_rng(0)
X = random.normal(size=(STEPS, 8, 3)).astype(np.float32)
X *= np.array([3, 1, 1, 0.2, 4], np.float32)[:, None, None]  # the fourth loss is the smallest
ACTIONS = random.integers(0, 2, size=(STEPS, 8))
Run = Callable[..., Any]


class Agent(nnx.Module):
    """Two models of one shape, an optimizer for the first, and the number of steps."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.model = nnx.Linear(3, 2, rngs=rngs)
        self.other = nnx.clone(self.model)
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1, momentum=0.5), wrt=nnx.Param)
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))


def learn(agent: Agent, x: jax.Array, action: jax.Array) -> jax.Array:
    """A step towards the value that the other model predicts for the next state, as in Q-learning."""

    def loss_fn(model: nnx.Linear) -> jax.Array:
        chosen = jnp.take_along_axis(model(x), action[:, None], 1)[:, 0]
        wanted = 1.0 + 0.9 * agent.other(x[:, ::-1]).max(1)
        return dj.compute_average_loss((chosen - wanted) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(agent.model)
    loss, grads = dj.get_replica_context().all_reduce("sum", (loss, grads))
    agent.optimizer.update(agent.model, grads)
    agent.steps[...] += 1
    return loss


def towards(model: nnx.Module, new: nnx.Module, share: Any) -> None:
    """Interpolates the weights of a model towards those of another."""
    mixed = lambda old, new: (1 - share) * old + share * new  # noqa: E731
    nnx.update(model, jax.tree.map(mixed, nnx.state(model), nnx.state(new)))


# Ways to use a copy: each takes an agent, a function that runs a step, and the batches.


def averaged(
    agent: Agent, run: Run, batches: list[Any], share: Callable[[Any], Any] = lambda _: 0.25
) -> list[Any]:
    def step(agent: Agent, x: jax.Array, action: jax.Array) -> jax.Array:
        loss = learn(agent, x, action)
        towards(agent.other, agent.model, share(agent.steps[...]))
        return loss

    return [run(step, agent, *batch) for batch in batches]


def copied_inside(agent: Agent, run: Run, batches: list[Any]) -> list[Any]:
    return averaged(agent, run, batches, lambda steps: jnp.where(steps % EVERY == 0, 1.0, 0.0))


def copied_outside(
    agent: Agent, run: Run, batches: list[Any], state_of: Callable[[Any], Any] = dj.snapshot
) -> list[Any]:
    losses = []
    for i, batch in enumerate(batches):
        if i % EVERY == 0:
            nnx.update(agent.other, state_of(agent.model))
        losses.append(run(learn, agent, *batch))
    return losses


def copied_outside_without_a_snapshot(agent: Agent, run: Run, batches: list[Any]) -> list[Any]:
    """Both models hold the same arrays, which the next step would donate twice."""
    return copied_outside(agent, run, batches, nnx.state)


def best_kept(agent: Agent, run: Run, batches: list[Any]) -> list[Any]:
    """The weights before the smallest loss are restored at the end."""
    losses, best, lowest = [], None, np.inf
    for batch in batches:
        before = dj.snapshot(agent.model)
        losses.append(run(learn, agent, *batch))
        if float(losses[-1]) < lowest:
            best, lowest = before, float(losses[-1])
    nnx.update(agent.model, best)
    return losses


WAYS = [averaged, copied_inside, copied_outside, copied_outside_without_a_snapshot, best_kept]


@functools.cache
def trained(way: Callable[..., list[Any]], strategy: dj.Strategy | None) -> dict[str, Any]:
    """Returns losses and state: under a strategy, or in plain Flax if it is None."""
    if strategy is None:
        agent, plain = Agent(), {}
        run = lambda step, *args: plain.setdefault(step, nnx.jit(step))(*args)  # noqa: E731
        losses = way(agent, run, list(zip(X, ACTIONS, strict=True)))
    else:
        with strategy.scope():
            agent = Agent()
        batches = strategy.distribute_dataset(list(zip(X, ACTIONS, strict=True)))
        losses = way(agent, lambda step, *args: strategy.run(step, args=args), list(batches))
        dj.check_in_sync(agent)
    return {"losses": [float(loss) for loss in losses], "state": nnx.to_pure_dict(nnx.state(agent))}


@functools.cache
def trained_plainly(way: Any) -> dict[str, Any]:
    return trained(way, None)


@pytest.mark.parametrize(
    "way",
    [best_kept, *(long(way) for way in WAYS[:-1])],
    ids=lambda way: way.__name__,
)
def test_it_equals_plain_flax_on_one_device(strategy: dj.Strategy, way: Any):
    """Losses, both models and the optimizer are those of undistributed code."""
    many, one = trained(way, strategy), trained_plainly(way)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), many, one)
    state = many["state"]
    assert not np.allclose(state["model"]["kernel"], state["other"]["kernel"], atol=1e-3)


@pytest.mark.exhaustive
def test_the_reference_programs_differ():
    """The best weights are not the last, and the target changes only at some steps."""
    assert 0 < int(np.argmin(trained_plainly(best_kept)["losses"])) < STEPS - 1
    inside, outside = trained_plainly(copied_inside), trained_plainly(copied_outside)
    np.testing.assert_allclose(inside["losses"], outside["losses"], rtol=1e-5)
    assert not np.allclose(inside["losses"], trained_plainly(averaged)["losses"], rtol=1e-2)


@pytest.mark.exhaustive
def test_a_snapshot_survives_later_steps_and_can_be_used_in_one(s2: dj.MirroredStrategy):
    """It keeps the first values and their sharding, and is not donated when passed to ``run``."""
    agent = new_agent(s2)
    before = np.asarray(agent.model.kernel[...])
    kept = dj.snapshot(agent.model)
    whole = dj.snapshot({"agent": nnx.to_pure_dict(nnx.state(agent)), "note": "first"})
    for batch in batches_of(s2):
        s2.run(learn, args=(agent, *batch))
    assert not np.allclose(agent.model.kernel[...], before)
    assert kept["kernel"][...].sharding == agent.model.kernel[...].sharding
    assert whole["note"] == "first"
    np.testing.assert_array_equal(whole["agent"]["model"]["kernel"], before)
    for _ in range(2):
        total = s2.run(lambda state: state["kernel"][...].sum(), args=(kept,))
        assert float(total) == pytest.approx(before.sum())
    s2.run(lambda model, state: nnx.update(model, state), args=(agent.model, kept))
    np.testing.assert_array_equal(agent.model.kernel[...], before)
    np.testing.assert_array_equal(kept["kernel"][...], before)


# What the user keeps


def new_agent(strategy: dj.Strategy) -> Agent:
    with strategy.scope():
        return Agent()


def batches_of(strategy: dj.Strategy) -> list[Any]:
    return list(strategy.distribute_dataset(list(zip(X[:2], ACTIONS[:2], strict=True))))


KEPT: dict[str, Callable[[nnx.Linear], Any]] = {
    "to_pure_dict": lambda model: nnx.to_pure_dict(nnx.state(model)),
    "tree.map": lambda model: jax.tree.map(lambda array: array, nnx.state(model)),
    "clone": lambda model: nnx.state(nnx.clone(model)),
    "one array": lambda model: model.kernel[...],
}
"""Ways to keep weights without copying them."""


@pytest.mark.parametrize("several", [False, True], ids=["run", "run_steps"])
def test_what_the_user_keeps_stays_as_it_was(strategy: dj.Strategy, several: bool):
    """Steps compute the same whether weights are kept or not, in all ways at once, from call to call."""

    def trained(keep: bool) -> list[float]:
        agent, batches = new_agent(strategy), batches_of(strategy) * 3
        step = functools.partial(learn, agent)
        losses, kept = [], []
        for batch in batches:
            if keep:
                kept += [
                    (way, way(agent.model), dj.snapshot(way(agent.model))) for way in KEPT.values()
                ]
            if several:
                losses += strategy.run_steps(step, iter([batch] * 2), 2).tolist()
            else:
                losses.append(float(strategy.run(step, args=batch)))
        for _, value, copy in kept:
            jax.tree.map(np.testing.assert_array_equal, value, copy)
        return losses

    assert trained(keep=True) == trained(keep=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", KEPT)
def test_only_what_is_kept_is_copied(
    s2: dj.MirroredStrategy, how: str, monkeypatch: pytest.MonkeyPatch
):
    """Nothing else is, also if steps share the state, run several at once, or the loop resets a variable."""
    copies: list[jax.Array] = []
    copied_here = _call.copied_here

    def counted(array: jax.Array) -> jax.Array:
        copies.append(array)
        return copied_here(array)

    monkeypatch.setattr(_call, "copied_here", counted)
    agent, (first, second) = new_agent(s2), batches_of(s2)

    def evaluate(x: jax.Array, action: jax.Array) -> jax.Array:
        return agent.model(x)

    def swapped(x: jax.Array, action: jax.Array) -> jax.Array:
        return learn(agent, x, 1 - action)

    def copied() -> int:
        copies.clear()
        for step in (learn_agent, evaluate, swapped, learn_agent):
            s2.run(step, args=second)
            s2.run_steps(step, iter([first, second]), 2)
            agent.steps[...] = jnp.zeros((), jnp.int32)
        return len(copies)

    learn_agent = functools.partial(learn, agent)
    copied()
    assert copied() == 0
    kept = KEPT[how](agent.model)
    size = len(jax.tree.leaves(kept))
    assert copied() == size
    assert not any(x.is_deleted() for x in jax.tree.leaves(kept))
    assert copied() == 0


DONATED = jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)
"""A jit of the user that donates what it gets."""


def test_donated_arrays_are_refused_with_advice(s2: dj.MirroredStrategy):
    """Whatever uses them next raises our error, which names them and ``dj.snapshot``."""
    agent, (first, second) = new_agent(s2), batches_of(s2)
    s2.run(learn, args=(agent, *first))
    best = dj.snapshot(agent.model)
    DONATED(best)
    array = jax.tree.leaves(best)[0]
    uses: dict[str, Callable[[], Any]] = {
        "as an argument": lambda: s2.run(lambda b: jax.tree.map(jnp.sum, b), args=(best,)),
        "captured": lambda: s2.run(lambda: jax.tree.map(jnp.sum, best)),
        "a snapshot of them": lambda: dj.snapshot(best),
        "compared": lambda: dj.check_in_sync(best),
        "reduced": lambda: s2.reduce("mean", array, axis=None),
        "gathered": lambda: s2.gather(array, axis=0),
    }
    for use in uses.values():
        with pytest.raises(dj.DonatedError, match=r"dj\.snapshot\("):
            use()
    nnx.update(agent.model, best)
    verified = dj.RunOptions(verify="first")
    partial = next(iter(s2.distribute_dataset([(X[0][:5], ACTIONS[0][:5])])))
    for batch, options in ((second, None), (second, verified), (partial, None)):
        with pytest.raises(dj.DonatedError, match=r"agent\.model\.kernel(.|\n)*dj\.snapshot\("):
            s2.run(lambda *args: learn(agent, *args), args=batch, options=options)
    nnx.update(agent.model, jax.tree.map(jnp.zeros_like, nnx.state(agent.other)))
    s2.run(learn, args=(agent, *second))


def test_a_numpy_array_in_a_variable_is_read_at_each_call(s2: dj.MirroredStrategy):
    """Also if the step does not write it, so that it stays the user's array."""
    agent, (first, second) = new_agent(s2), batches_of(s2)
    s2.run(learn, args=(agent, *first))
    array = np.zeros((3, 2), np.float32)
    agent.other.kernel.set_raw_value(array)
    losses = [float(s2.run(learn, args=(agent, *second))) for _ in range(2)]
    assert losses[1] != losses[0]
    assert agent.other.kernel.get_raw_value() is array


def test_donated_state_on_another_device_is_refused(s2: dj.MirroredStrategy):
    """An array that the user donated, in a variable that ``run`` would first have to move."""
    donated = jnp.ones((3, 2))
    jax.jit(lambda a: a + 1, donate_argnums=0)(donated)
    agent = new_agent(s2)
    agent.model.kernel.set_raw_value(donated)
    with pytest.raises(dj.DonatedError, match=r"kernel"):
        s2.run(learn, args=(agent, *batches_of(s2)[0]))


@pytest.mark.parametrize("replicas", [4, long(1)])
def test_state_that_was_donated_to_the_users_jit_is_named(replicas: int):
    """The variable still holds the array of the last step, and no other state is lost."""
    strategy = dj.MirroredStrategy(range(replicas))
    agent, (first, _) = new_agent(strategy), batches_of(strategy)
    strategy.run(learn, args=(agent, *first))
    jax.jit(lambda a: a + 1, donate_argnums=0)(agent.model.bias.get_raw_value())
    with pytest.raises(dj.DonatedError, match=r"model\.bias"):
        strategy.run(learn, args=(agent, *first))
    agent.model.bias.set_raw_value(jnp.zeros(2))
    assert np.isfinite(strategy.run(learn, args=(agent, *first)))


@pytest.mark.exhaustive
def test_a_donated_array_that_the_step_does_not_read_is_not_an_error(s2: dj.MirroredStrategy):
    """An agent may hold donated arrays; only a step that reads them is refused."""
    agent, without, (first, second) = new_agent(s2), new_agent(s2), batches_of(s2)
    agent.stale = nnx.clone(agent.model)
    agent.stale.kernel.set_raw_value(jnp.ones((3, 2)))
    DONATED(agent.stale.kernel.get_raw_value())
    for batch in (second, first):
        for each in (agent, without):
            s2.run(learn, args=(each, *batch))
    assert agent.stale.kernel.get_raw_value().is_deleted()
    np.testing.assert_array_equal(agent.model.kernel[...], without.model.kernel[...])


def test_the_state_of_a_model_is_the_model_and_follows_it(s2: dj.MirroredStrategy):
    """``nnx.state(model)`` holds the variables of the model, with or without a strategy."""
    agent = new_agent(s2)
    alias = nnx.state(agent.model)
    s2.run(learn, args=(agent, *batches_of(s2)[0]))
    assert alias["kernel"] is agent.model.kernel
    np.testing.assert_array_equal(alias["kernel"][...], agent.model.kernel[...])


def test_a_snapshot_copies_arrays_on_the_host_too():
    """A NumPy array that is changed in place later does not change the snapshot."""
    numbers = np.zeros(2)
    kept = dj.snapshot({"n": numbers})
    numbers += 1
    assert kept["n"].tolist() == [0.0, 0.0]
