"""Plans have the bytes and collectives of the program that would run, for any number of replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from leaves import sum_on_read

import distribute_jax as dj
from distribute_jax import _context

DIVIDED = {"all-reduce", "all-gather", "reduce-scatter"}
X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)


class Training:
    """A model with batch statistics, a per-replica counter, and the step that trains it."""

    def __init__(self, strategy: dj.Strategy) -> None:
        self.calls = 0
        with strategy.scope():
            rngs = nnx.Rngs(0)
            self.layers = nnx.Sequential(
                nnx.Linear(64, 256, rngs=rngs), nnx.BatchNorm(256, rngs=rngs), nnx.relu,
                nnx.Linear(256, 64, rngs=rngs),
            )  # fmt: skip
            self.optimizer = nnx.Optimizer(self.layers, optax.adam(1e-2), wrt=nnx.Param)
            self.seen = sum_on_read(jnp.zeros(1000))
        self.batch = next(iter(strategy.distribute_dataset([(X, X)])))

    def step(self, x: jax.Array, y: jax.Array) -> jax.Array:
        self.calls += 1
        loss, gradients = nnx.value_and_grad(
            lambda model: dj.compute_average_loss(((model(x) - y) ** 2).mean(axis=-1))
        )(self.layers)
        loss, gradients = dj.get_replica_context().all_reduce("sum", (loss, gradients))
        self.optimizer.update(self.layers, gradients)
        self.seen.assign_add(jnp.ones(1000))
        return loss

    @property
    def arrays(self) -> list[Any]:
        state = nnx.state((self.layers, self.optimizer, self.seen))
        return [
            variable.get_raw_value() for variable in jax.tree.leaves(state, is_leaf=_is_variable)
        ]


def _is_variable(value: Any) -> bool:
    return isinstance(value, nnx.Variable)


STRATEGIES: dict[str, tuple[Callable[[], dj.Strategy], set[str], int]] = {
    "mirrored": (dj.MirroredStrategy, {"all-reduce"}, 0),
    "optimizer": (lambda: dj.MirroredStrategy(shard_optimizer_state=True), DIVIDED, 4),
    "in turn": (lambda: dj.MirroredStrategy(replicas_per_device=2), {"all-reduce"}, 0),
    "fully": (dj.FullyShardedStrategy, DIVIDED, 6),
    "in groups": (lambda: dj.FullyShardedStrategy(shard_over=4), DIVIDED, 6),
}
"""For each strategy: how it is made, its collectives, and how many arrays are divided."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_bytes_of_a_plan_are_those_of_the_program_that_runs(kind: str) -> None:
    """Each kind of bytes equals that of the compiled program, and state has the planned placement."""
    make, sent, divided = STRATEGIES[kind]
    strategy = make()
    training = Training(strategy)
    plan = strategy.plan(training.step, training.batch)
    strategy.run(training.step, training.batch)
    (program,) = strategy._runner.cache.programs.values()
    memory = program.compiled.memory_analysis()
    assert plan.replicas == strategy.num_replicas_in_sync
    assert [plan.argument_bytes, plan.temporary_bytes, plan.output_bytes, plan.alias_bytes] == [
        memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
    ]  # fmt: skip
    held = sum(array.addressable_shards[0].data.nbytes for array in training.arrays)
    assert sum(plan.state_bytes.values()) == held
    assert {collective.kind for collective in plan.collectives} == sent
    assert sum(bool(leaf.spec) for leaf in plan.placements) == divided


@pytest.mark.exhaustive
def test_a_plan_is_for_any_number_of_replicas() -> None:
    """Eight devices plan for 1024 replicas; optimizer state is divided by their number if it can be."""
    strategy = dj.MirroredStrategy(shard_optimizer_state=True)
    training = Training(strategy)
    plans = {n: strategy.plan(training.step, training.batch, replicas=n) for n in (1, 64, 1024)}
    moments = {n: plan.state_bytes["optimizer"] for n, plan in plans.items()}
    kernels = 2 * 2 * 64 * 256 * 4
    assert moments[1] - moments[64] == kernels - kernels // 64
    assert moments[1024] == moments[1]
    assert "no dim is a multiple of 1024: 4" in str(plans[1024])
    (scattered,) = (c for c in plans[64].collectives if c.kind == "reduce-scatter")
    assert (scattered.number, scattered.bytes) == (2, kernels // 2 // 64)
    assert {plan.state_bytes["parameters"] for plan in plans.values()} == {
        plans[1].state_bytes["parameters"]
    }


@pytest.mark.exhaustive
def test_a_plan_changes_nothing() -> None:
    """Arrays stay the same objects, side effects in Python are undone, and the program of run is kept."""
    strategy = dj.MirroredStrategy([0, 1], shard_optimizer_state=True)
    training = Training(strategy)
    before = training.arrays
    strategy.plan(training.step, training.batch, replicas=16)
    assert all(new is old for new, old in zip(training.arrays, before, strict=True))
    assert training.calls == 0
    strategy.run(training.step, training.batch)
    strategy.plan(training.step, training.batch, replicas=16)
    strategy.run(training.step, training.batch)
    assert (training.calls, strategy._runner.programs()) == (1, 1)


def test_the_step_sees_the_number_of_replicas_that_is_planned() -> None:
    """In the context and from the strategy, so that shapes that depend on it are right."""
    strategy = dj.MirroredStrategy([0, 1])

    def step(x: jax.Array) -> Any:
        replica = dj.get_replica_context()
        return replica.all_gather(x, 0), jnp.ones(strategy.num_replicas_in_sync) * x.sum()

    (x,) = strategy.distribute_dataset([np.ones((2, 256), np.float32)])
    plan = strategy.plan(step, (x,), replicas=64)
    assert plan.output_bytes == pytest.approx((64 * 256 + 64) * 4, abs=64)
    assert [(c.kind, c.bytes, c.in_loop) for c in plan.collectives] == [
        ("all-gather", 64 * 256 * 4, False)
    ]


def test_collectives_in_a_loop_are_distinguished() -> None:
    """A sum in a scan counts once, and is marked as in a loop."""
    strategy = dj.MirroredStrategy([0, 1])

    def step(x: jax.Array) -> jax.Array:
        inside = jax.lax.scan(lambda c, _: (jax.lax.psum(c, "data") / 2, None), x, length=5)[0]
        return jax.lax.psum(inside.sum(), "data")

    (x,) = strategy.distribute_dataset([np.ones((2, 256), np.float32)])
    plan = strategy.plan(step, (x,))
    assert set(plan.collectives) == {("all-reduce", 1, 4, False), ("all-reduce", 1, 1024, True)}


def test_a_step_that_makes_variables_is_planned(s2: dj.MirroredStrategy) -> None:
    """They are planned as if they existed, and do not exist afterwards."""

    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.total: Any = nnx.data(None)

        def __call__(self) -> None:
            if self.total is None:
                self.total = sum_on_read(jnp.zeros(1000))
            self.total.assign_add(jnp.ones(1000))

    counter = Counter()
    assert s2.plan(counter, replicas=8).state_bytes["other"] == 4000
    assert counter.total is None
    with pytest.raises(dj.ArgumentError, match="each time that it is traced"):
        s2.plan(lambda: setattr(counter, "total", dj.Variable(0.0)))


TEXT = nnx.Variable("text")
SHAPES = nnx.eval_shape(lambda: nnx.Dict(a=nnx.data(jnp.ones(3))))
REFUSED: dict[str, tuple[Callable[[dj.Strategy], Any], str]] = {
    "no number": (lambda s: s.plan(abs, (1.0,), replicas=0), "replicas must be"),
    "a huge number": (lambda s: s.plan(abs, (1.0,), replicas=2**62), "replicas must be .* < 1048576"),
    "a lowering": (
        lambda s: s.plan(abs, (1.0,), options=dj.RunOptions(lowering="pmap")), "compiles only when it runs"
    ),
    "no tuple": (lambda s: s.plan(abs, 1.0), r"strategy.plan\(step, args="),
    "no array": (lambda s: s.plan(lambda: TEXT.get_value()), "TEXT: str 'text'"),
    "a shape": (lambda s: s.run(lambda: 2 * SHAPES.a), r"SHAPES.a: float32\[3\]"),
    "a callback": (
        lambda s: s.plan(lambda: jax.pure_callback(lambda: X, X)), "pure_callback at .* cannot be planned"
    ),
    "no function": (lambda s: s.plan(1, (1.0,)), "step must be a function; got 1"),
    "a strategy in no list": (lambda s: dj.plan(abs, strategies=s), "strategies must be a non-empty list"),
    "a class": (lambda s: dj.plan(abs, strategies=[type(s)]), "'> in strategies is not a strategy"),
    "one number": (lambda s: dj.plan(abs, strategies=[s], replicas=8), "replicas must be a .* got 8"),
    "a text": (lambda s: dj.plan(abs, strategies=[s], device_memory_bytes="8G"), "or an integer; got '8G'"),
    "inside run": (lambda s: s.run(lambda: s.plan(abs, (1.0,))), "strategy.plan was called inside"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_steps_that_cannot_be_planned_are_refused(case: str, s2: dj.MirroredStrategy) -> None:
    """The error has the name of the method that was called."""
    call, text = REFUSED[case]
    with pytest.raises(dj.DistributeError, match=text):
        call(s2)


def test_an_error_in_the_step_is_that_of_run(s2: dj.MirroredStrategy) -> None:
    """A step whose replicas would diverge is refused by plan with the text of run."""
    with s2.scope():
        bias = nnx.Param(jnp.zeros(()))

    def drifting(x: jax.Array) -> None:
        bias[...] += x.sum()

    texts, batches = [], list(s2.distribute_dataset([X]))
    for call in (s2.plan, s2.run):
        with pytest.raises(dj.OutOfSyncError) as error:
            call(drifting, batches)
        texts.append(str(error.value))
    assert texts[0] == texts[1]


@pytest.mark.exhaustive
def test_a_table_says_what_fits(s2: dj.MirroredStrategy) -> None:
    """The batch may be of another strategy, and there may be more replicas than devices."""
    training = Training(s2)
    strategies = [s2, dj.MirroredStrategy([0, 1, 2, 3], shard_optimizer_state=True)]
    table = dj.plan(
        training.step,
        training.batch,
        strategies=strategies,
        replicas=(2, 64),
        device_memory_bytes=400_000,
    )
    fitting = [(plan.strategy, plan.replicas) for plan in table.fitting]
    assert fitting == [("MirroredStrategy(shard_optimizer_state=True)", 64)]
    head, *rows = str(table).splitlines()
    assert head.startswith("strategy ")
    assert [row.split()[-1] for row in rows] == ["no", "no", "no", "yes"]


@pytest.mark.exhaustive
def test_a_table_leaves_out_plans_that_are_refused(s2: dj.MirroredStrategy) -> None:
    """The table has the reasons; if nothing can be planned, the first reason is raised."""
    training = Training(s2)
    strategy = dj.FullyShardedStrategy([0, 1])
    plan = functools.partial(dj.plan, training.step, training.batch, strategies=[strategy])
    table = plan(replicas=(2, 1024))
    assert [plan.replicas for plan in table.plans] == [2]
    assert "no plan: FullyShardedStrategy can divide none" in str(table)
    with pytest.raises(dj.ArgumentError, match="can divide none"):
        plan(replicas=(1024,))


@pytest.mark.exhaustive
def test_a_model_of_shapes_is_planned() -> None:
    """A model that fits no device is made with nnx.eval_shape, without any array."""
    strategy = dj.FullyShardedStrategy()

    class Masked(nnx.Linear):
        def __init__(self) -> None:
            super().__init__(2**16, 2**16, rngs=nnx.Rngs(0))
            self.mask, self.scale = jnp.ones(2**16), nnx.data(jnp.ones(2**16))

        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x * self.mask) * self.scale

    def make() -> tuple[nnx.Module, nnx.Optimizer]:
        model = Masked()
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(make)

    def step(x: jax.Array) -> None:
        gradients = nnx.grad(lambda model: model(x).sum())(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", gradients))

    (x,) = strategy.distribute_dataset([np.ones((8, 2**16), np.float32)])
    state = strategy.plan(step, (x,), replicas=1024).state_bytes
    assert state["parameters"] == 4 * (2**32 + 2**16) // 1024
    assert isinstance(model.kernel.get_raw_value(), jax.ShapeDtypeStruct)


@pytest.mark.exhaustive
def test_shapes_in_args_are_planned_as_the_arrays_that_they_stand_for(
    s4: dj.MirroredStrategy,
) -> None:
    """As a TrainState from jax.eval_shape."""

    def make() -> dict[str, Any]:
        return {"w": jnp.ones((3, 2)), "count": jnp.int32(0)}

    def step(state: dict[str, Any], x: jax.Array) -> dict[str, Any]:
        loss = lambda w: dj.compute_average_loss((x @ w).sum(-1))  # noqa: E731
        grads = dj.get_replica_context().all_reduce("sum", jax.grad(loss)(state["w"]))
        return {"w": state["w"] - grads, "count": state["count"] + 1}

    (x,) = s4.distribute_dataset([np.ones((8, 3), np.float32)])
    shapes, arrays = (
        s4.plan(step, (state, x), replicas=64) for state in (jax.eval_shape(make), make())
    )
    assert replace(shapes, seconds={}) == replace(arrays, seconds={})
    assert shapes.argument_bytes == 4 * (3 * 2 + 1) + 4 * 2 * 3


@pytest.mark.exhaustive
def test_the_first_step_can_be_shown_in_place_of_run(s2: dj.MirroredStrategy) -> None:
    """Only the first step is planned; the next one runs."""
    training, shown = Training(s2), []
    _context.plan_hooks.append(lambda plan: shown.append(plan(64)))
    s2.run(training.step, training.batch)
    s2.run(lambda: None)
    assert [plan.replicas for plan in shown] == [64]
