"""The halves of a step for parameter servers: together they compute the bits of the step on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from leaves import assert_same_bits, numbers, on_host

import distribute_jax as dj
from distribute_jax.servers._device_program import export_program, load_program
from distribute_jax.servers._halves import Halves
from distribute_jax.servers._halves_cache import BoundHalves, HalvesCache

Batch = tuple[np.ndarray, np.ndarray]
STEPS = 5


class Servers:
    """One worker and some servers, in one thread: each step is pulled, computed and applied by hand."""

    def __init__(self, servers: int, *, travels: bool = False) -> None:
        self.strategy = dj.OneDeviceStrategy("cpu:0")
        self.travels = travels
        self.cache = HalvesCache(self.strategy, servers, self, partitioner=None, sparse=None)

    def known(self, _binding: Any) -> dict[Any, Any]:
        """No earlier step has decided which server stores what."""
        return {}

    def load(self, bound: BoundHalves) -> None:
        """Stores the state of a new step on the servers."""
        halves = bound.halves
        leaves = jax.tree.leaves([v.get_raw_value() for v in bound.binding.variables])
        placed = list(enumerate(halves.placement))
        self.stored = [
            {k: leaves[k] for k, at in placed if s in at} for s in range(len(halves.servers))
        ]
        if self.travels:
            servers = tuple(replace(s, apply=sent(s.apply)) for s in halves.servers)
            halves = replace(halves, worker=sent(halves.worker), servers=servers)
        self.halves: Halves = halves

    def run(self, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a step; only values that the halves name pass between worker and servers."""
        bound, arguments = self.cache.bound(step, args)
        halves, stored = self.halves, self.stored
        pulled = [stored[min(halves.placement[k])][k] for k in halves.pulls]
        handed = halves.worker(pulled, halves.data(bound.binding, arguments))
        for server, state in zip(halves.servers, stored, strict=True):
            new = server.apply([state[k] for k in server.reads], [handed[i] for i in server.takes])
            state.update(zip(server.writes, new, strict=True))
        leaves = [stored[min(placement)][k] for k, placement in enumerate(halves.placement)]
        for k, placement in enumerate(halves.placement):
            assert all(np.array_equal(on_host(stored[s][k]), on_host(leaves[k])) for s in placement)
        flow = iter(leaves)
        for variable in bound.binding.variables:
            variable.set_raw_value(jax.tree.map(lambda _: next(flow), variable.get_raw_value()))
        return bound.result(halves.finish([[handed[i] for i in halves.results_at]]))


def sent(part: Any) -> Callable[..., list[Any]]:
    """Serializes and loads a program, which then takes and returns random keys as numbers."""
    loaded = load_program(export_program(part, ["cpu"]))

    def run(*lists: list[Any]) -> list[Any]:
        outs = loaded(*([jnp.asarray(on_host(x)) for x in some] for some in lists))
        assert len(outs) == len(part.returns)
        return [keyed(x, like) for x, like in zip(outs, part.returns, strict=True)]

    return run


def keyed(x: jax.Array, like: Any) -> jax.Array:
    """Returns random keys from their numbers."""
    return jax.random.wrap_key_data(x) if jnp.issubdtype(like.dtype, jax.dtypes.prng_key) else x


class Conv(nnx.Module):
    """A convolution, batch norm and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(4 * 20, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.drop(nnx.relu(self.norm(self.conv(x.reshape(-1, 5, 4, 1)))))
        return self.head(x.reshape(x.shape[0], -1))


class Text(nnx.Module):
    """An embedding and a layer norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(50, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        ids = (jnp.abs(x) * 20).astype(jnp.int32) % 50
        return self.head(self.norm(self.embed(ids)).mean(1))


def mlp(rngs: nnx.Rngs) -> nnx.Module:
    """Two layers."""
    return nnx.Sequential(nnx.Linear(20, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 3, rngs=rngs))


MODELS = {"mlp": mlp, "conv": Conv, "text": Text}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2),
    "clip+adam": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "adagrad": optax.adagrad(0.1),
    "schedule": optax.adam(optax.exponential_decay(1e-2, 10, 0.9)),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
}


def batches() -> Iterator[Batch]:
    """Batches of 16 examples of 3 classes."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        yield rng.normal(size=(16, 20)).astype(np.float32), rng.integers(0, 3, 16).astype(np.int32)


def train(strategy: Any, model_of: Callable[[nnx.Rngs], nnx.Module], tx: Any) -> list[Any]:
    """Trains for some steps; returns losses, and all state in the end."""
    with getattr(strategy, "strategy", strategy).scope():
        model = model_of(nnx.Rngs(0, dropout=1))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        seen = dj.Variable(0, aggregation=dj.VariableAggregation.SUM)

    def step(x: jax.Array, y: jax.Array):
        def loss_fn(model: Any):
            logits = model(x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return dj.compute_average_loss(losses), (logits, losses)

        (loss, (logits, losses)), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        replica = dj.get_replica_context()
        optimizer.update(model, replica.all_reduce("sum", grads))
        metrics.update(logits=logits, labels=y, loss=losses)
        seen.assign_add(y.shape[0])
        return replica.all_reduce("sum", loss), {"logits": logits}

    results = [strategy.run(step, args=batch) for batch in batches()]
    state = nnx.state((model, optimizer, metrics, seen))
    return numbers((results, nnx.to_pure_dict(state)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_a_worker_and_servers_compute_the_bits_of_one_device(
    model: str, optimizer: str, servers: int
):
    """Losses, results, weights, optimizer state, metrics and sums are bitwise equal after each step."""
    wanted = train(dj.OneDeviceStrategy("cpu:0"), MODELS[model], OPTIMIZERS[optimizer])
    got = train(Servers(servers), MODELS[model], OPTIMIZERS[optimizer])
    assert_same_bits(wanted, got)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("tx", "servers"),
    [
        (optax.adam(0.01), 2),
        (optax.apply_if_finite(optax.adam(0.01), 3), 3),
        (optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.1), optax.scale(-0.01)), 2),
    ],
)
def test_updates_that_read_other_state_compute_the_bits_of_one_device(tx: Any, servers: int):
    """Averages are stored with their weights; with a norm of updates all state is on one server."""

    def run(strategy: Any) -> list[Any]:
        with getattr(strategy, "strategy", strategy).scope():
            rngs = nnx.Rngs(0)
            model = nnx.Sequential(
                nnx.Linear(8, 6, rngs=rngs), nnx.relu, nnx.Linear(6, 4, rngs=rngs)
            )
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
            average = nnx.clone(model)

        def step(x: jax.Array):
            loss_of = lambda m: dj.compute_average_loss((m(x) ** 2).sum(1))  # noqa: E731
            loss, grads = nnx.value_and_grad(loss_of)(model)
            optimizer.update(model, dj.get_replica_context().all_reduce("sum", grads))
            mix = lambda old, new: 0.9 * old + 0.1 * new  # noqa: E731
            nnx.update(average, jax.tree.map(mix, nnx.state(average), nnx.state(model)))
            return loss

        for x in np.random.default_rng(0).normal(size=(6, 4, 8)).astype(np.float32):
            strategy.run(step, args=(x,))
        return jax.tree.leaves(nnx.to_pure_dict(nnx.state((model, optimizer, average))))

    of_servers = Servers(servers)
    assert_same_bits(run(dj.OneDeviceStrategy("cpu:0")), run(of_servers))
    where = dict(zip(of_servers.halves.names, map(tuple, of_servers.halves.placement), strict=True))
    averages = [name for name in where if name.startswith("average.")]
    assert [where[name] for name in averages] == [
        where[name.replace("average", "model")] for name in averages
    ]


def linear(strategy: dj.Strategy) -> tuple[nnx.Linear, nnx.Optimizer]:
    """A small model with Adam."""
    with strategy.scope():
        model = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def gradients(model: nnx.Linear, x: jax.Array) -> nnx.State:
    """Returns the gradients of the mean of the outputs, summed over the replicas."""
    grads = nnx.grad(lambda model: dj.compute_average_loss(model(x).mean(1)))(model)
    return dj.get_replica_context().all_reduce("sum", grads)


ONES = np.ones((8, 5), np.float32)


@pytest.mark.exhaustive
def test_a_forgotten_reduction_is_the_error_of_every_strategy():
    """Its text is that of four replicas, except for their number, which servers do not know."""

    def error(run: Callable[..., Any], strategy: dj.Strategy, x: Any) -> str:
        model, optimizer = linear(strategy)

        def step(x: jax.Array):
            optimizer.update(model, nnx.grad(lambda model: model(x).mean())(model))

        with pytest.raises(dj.OutOfSyncError) as caught:
            run(step, args=(x,))
        return str(caught.value)

    mirrored, servers = dj.MirroredStrategy([0, 1, 2, 3]), Servers(2)
    (batch,) = mirrored.distribute_dataset([ONES])
    wanted = error(mirrored.run, mirrored, batch)
    assert error(servers.run, servers.strategy, ONES) == (
        wanted.replace("the 4 replicas", "the N replicas").replace("gradients 4", "gradients N")
    )


def uses_again(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array) -> Any:
    """Returns a loss after the update."""
    optimizer.update(model, gradients(model, x))
    return dj.get_replica_context().all_reduce("sum", model(x).mean())


def returns_norm(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array) -> Any:
    """Returns what is computed from new weights."""
    optimizer.update(model, gradients(model, x))
    return {"norm": jnp.sum(model.kernel[...] ** 2)}


def returns_weights(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array) -> Any:
    """Returns new weights themselves."""
    optimizer.update(model, gradients(model, x))
    return model.kernel[...]


def sums_in_a_condition(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array) -> Any:
    """Sums gradients every second step."""
    sums = lambda: dj.get_replica_context().all_reduce("sum", model(x).sum())  # noqa: E731
    return jax.lax.cond(optimizer.step[...] % 2 == 0, sums, lambda: jnp.zeros(()))


REFUSED = {
    "used again": (uses_again, r"uses the new value of model.kernel at test_halves.py:\d+"),
    "a result": (returns_norm, r"result\['norm'\] is computed from the new value of model.k"),
    "a condition": (sums_in_a_condition, r"under the condition at test_halves.py:\d+ cannot be"),
    "weights": (returns_weights, r"result is computed from the new value of model.kernel at"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_servers_cannot_apply_is_refused_with_its_line(case: str):
    """New weights exist only after the worker has finished."""
    fn, message = REFUSED[case]
    servers = Servers(2)
    model, optimizer = linear(servers.strategy)
    with pytest.raises(dj.LoweringError, match=message):
        servers.run(lambda x: fn(model, optimizer, x), args=(ONES,))


def test_a_step_that_changes_what_servers_store_is_refused_by_name():
    """Variables must exist before the step, and keep their shapes and dtypes."""
    made: list[Any] = []
    model, _ = linear(dj.OneDeviceStrategy("cpu:0"))

    def makes(x: jax.Array) -> None:
        if not made:
            made.append(dj.Variable(jnp.zeros(3), name="late"))
        made[0].assign_add(x.sum(0)[:3])

    def changes(x: jax.Array) -> None:
        model.bias.set_value(model.bias[...].astype(jnp.bfloat16))

    for step, message in (
        (makes, "makes the variables late"),
        (changes, r"dtype of these variables, which servers store:\n  model.bias\n"),
    ):
        with pytest.raises(dj.ArgumentError, match=message):
            Servers(2).run(step, args=(ONES,))


def test_per_replica_variables_are_refused_by_name():
    """Servers store neither ON_READ variables nor gradients accumulated under another strategy."""
    servers = Servers(1)
    with servers.strategy.scope():
        seen = dj.Variable(0.0, synchronization=dj.VariableSynchronization.ON_READ)
        model = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
        optimizer = dj.Optimizer(model, optax.sgd(0.1), gradient_accumulation_steps=2)

    def accumulates(x: jax.Array):
        optimizer.update(model, nnx.grad(lambda model: model(x).mean())(model))

    with pytest.raises(dj.ArgumentError, match=r"seen \(Variable\)"):
        servers.run(lambda x: seen.assign_add(x.sum()), args=(ONES,))
    with pytest.raises(
        dj.ArgumentError, match=r"optimizer.accumulation[\s\S]*under strategy.scope"
    ):
        servers.run(accumulates, args=(ONES,))


@pytest.mark.exhaustive
def test_variables_are_assigned_round_robin_and_optimizer_state_follows_its_weight():
    """Four weights are on servers 0, 1, 0, 1; moments are with their weights, the count on both."""
    servers = Servers(2)
    with servers.strategy.scope():
        layers = nnx.List([nnx.Linear(5, 5, rngs=nnx.Rngs(i)) for i in range(2)])
        optimizer = nnx.Optimizer(layers, OPTIMIZERS["clip+adam"], wrt=nnx.Param)

    def step(x: jax.Array):
        grads = nnx.grad(lambda layers: jnp.mean(layers[1](layers[0](x))))(layers)
        optimizer.update(layers, dj.get_replica_context().all_reduce("sum", grads))

    servers.run(step, args=(ONES,))
    halves = servers.halves
    placement = dict(zip(halves.names, map(tuple, halves.placement), strict=True))
    weights = {name: servers for name, servers in placement.items() if name.startswith("layers")}
    assert list(weights.values()) == [(0,), (1,), (0,), (1,)]
    moments = [(name, servers) for name, servers in placement.items() if name.endswith("']")]
    assert len(moments) == 8
    for name, servers in moments:
        layer, kind = name.replace("'", "").replace("]", "").rsplit("[", 2)[1:]
        assert servers == weights[f"layers[{layer}].{kind}"], name
    assert [servers for servers in placement.values() if len(servers) == 2] == [(0, 1)]
    pulled = {halves.names[k] for k in halves.pulls}
    assert pulled == set(weights) - {
        "layers[1].bias"
    }  # no moments, and no bias that no gradient reads
    assert [len(server.writes) for server in halves.servers] == [8, 7]


@pytest.mark.exhaustive
def test_two_steps_from_the_same_state_both_count():
    """Sums, metrics and random counts are added to the server's newest values, not to those pulled."""
    servers = Servers(1)
    with servers.strategy.scope():
        seen = dj.Variable(5, aggregation=dj.VariableAggregation.SUM)
        metric = nnx.metrics.Average("loss")
        rngs = nnx.Rngs(0)

    def step(x: jax.Array):
        seen.assign_add(2)
        metric.update(loss=x + 0 * rngs.noise.normal(x.shape) * rngs.noise.normal(x.shape))

    servers.run(step, args=(ONES,))
    (server,), halves = servers.halves.servers, servers.halves
    (state,) = servers.stored
    bound, arguments = servers.cache.bound(step, (ONES,))
    data = halves.data(bound.binding, arguments)
    pulled = [state[k] for k in halves.pulls]
    for _ in range(3):
        handed = halves.worker(pulled, data)
        new = server.apply([state[k] for k in server.reads], [handed[i] for i in server.takes])
        state.update(zip(server.writes, new, strict=True))
    ends = {
        name: float(np.sum(on_host(state[k])))
        for k, name in enumerate(halves.names)
        if "key" not in name
    }
    assert sorted(ends.values()) == [8.0, 13.0, 160.0, 160.0], ends


@pytest.mark.exhaustive
def test_serialized_programs_compute_the_same_bits():
    """Serialized and loaded, with random keys and batch norm."""
    wanted = train(dj.OneDeviceStrategy("cpu:0"), Conv, OPTIMIZERS["clip+adam"])
    got = train(Servers(2, travels=True), Conv, OPTIMIZERS["clip+adam"])
    assert_same_bits(wanted, got)


def test_a_step_that_calls_python_cannot_be_serialized():
    """It is refused with its line, and runs in one process."""
    servers = Servers(1, travels=True)
    model, _ = linear(servers.strategy)

    def step(x: jax.Array):
        jax.debug.print("{}", x.sum())
        model.bias[...] += dj.get_replica_context().all_reduce("sum", x.sum())

    with pytest.raises(dj.LoweringError, match=r"at test_halves.py:\d+ calls Python"):
        servers.run(step, args=(ONES,))


def test_programs_that_cannot_run_here_are_refused():
    """Another version of JAX and another platform have an error each."""
    servers = Servers(1)
    model, optimizer = linear(servers.strategy)

    def step(x: jax.Array):
        optimizer.update(model, gradients(model, x))

    servers.run(step, args=(ONES,))
    data = export_program(servers.halves.worker, ["cpu"])
    ours = jax.__version__.encode()
    with pytest.raises(
        dj.ClusterError, match=rf"with JAX 0\.1\.2, and this process has JAX {jax.__version__}"
    ):
        load_program(data.replace(ours, b"0.1.2", 1))
    with pytest.raises(dj.ClusterError, match="compiled for tpu, and this process computes on cpu"):
        load_program(data.replace(b'["cpu"]', b'["tpu"]', 1))
