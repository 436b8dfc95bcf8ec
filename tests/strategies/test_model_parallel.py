"""``ModelParallelStrategy``: rules divide a replica over several devices, with the numbers of one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_fully_sharded
from cases import long
from flax import nnx
from jax.sharding import PartitionSpec
from leaves import assert_close, assert_same_bits

import distribute_jax as dj

RULES = {
    r"up\.kernel$": PartitionSpec(None, "model"),
    r"up\.bias$": PartitionSpec("model"),
    r"down\.kernel$": PartitionSpec("model", None),
    r"^embed\.embedding": PartitionSpec("model", None),
}


class Block(nnx.Module):
    """Two layers between which a replica is divided."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.down = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(x)))


class Language(nnx.Module):
    """Stacked blocks and a tied embedding."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(96, 64, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=2)(nnx.vmap(Block))(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        one = nnx.remat(lambda x, block: block(x))
        x = nnx.scan(one, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            self.embed(tokens), self.blocks
        )
        return self.embed.attend(x)


def build() -> tuple[Language, nnx.Optimizer[Any]]:
    """A model and its optimizer."""
    model = Language()
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def trained(strategy: dj.Strategy, sizes: tuple[int, ...] = (16, 13)) -> tuple[Any, Any, list[Any]]:
    """The model and its optimizer after some steps, one of them on a partial batch, and the losses."""
    model, optimizer = strategy.create(build)
    losses, _ = test_fully_sharded.trained(strategy, model, optimizer, sizes)
    return model, optimizer, losses


def specs(module: Any) -> dict[str, PartitionSpec]:
    """Returns the PartitionSpec of each array by path."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {
        ".".join(map(str, path)): v.get_raw_value().sharding.spec
        for path, v in flat
        if v.get_raw_value().ndim
    }


@pytest.mark.parametrize(
    ("data", "model", "fully_sharded", "sizes"),
    [
        (4, 2, True, (13, 13)),  # one program on each side
        long(4, 2, True, (16, 13)),
        long(2, 2, False, (16, 13)),
        long(1, 4, True, (16, 13)),
        long(2, 4, True, (16, 13)),
    ],
)
def test_numbers_of_one_device(
    data: int, model: int, fully_sharded: bool, sizes: tuple[int, int]
) -> None:
    """Losses, parameters and momentum are those of one device, and are divided as the rules say."""
    devices = list(range(data * model))
    strategy = dj.ModelParallelStrategy(
        devices, model=model, rules=RULES, fully_sharded=fully_sharded
    )
    assert strategy.num_replicas_in_sync == data
    runs = [trained(each, sizes) for each in (strategy, dj.OneDeviceStrategy(0))]
    states = [nnx.to_pure_dict(nnx.state(run[:2])) for run in runs]
    np.testing.assert_allclose(runs[0][2], runs[1][2], rtol=1e-6)
    assert_close(*states, atol=1e-6)
    of_model, of_optimizer = map(specs, runs[0][:2])
    shares = fully_sharded and data > 1
    if shares:
        step = list(strategy._runner.cache.programs.values())[-1].step
        lowered = jax.jit(step.function).lower(*step.avals).as_text()
        # The embedding once, and the two kernels of the scan forward and backward.
        assert lowered.count("stablehlo.all_gather") == 5
    assert of_model["blocks.up.kernel"] == PartitionSpec(None, "data" if shares else None, "model")
    assert of_model["blocks.up.bias"] == PartitionSpec(None, "model")
    assert of_model["embed.embedding"] == PartitionSpec("model", *["data"] * shares)
    for path, spec in of_model.items():
        [momentum] = [of for name, of in of_optimizer.items() if name.endswith("." + path)]
        assert momentum == spec


def test_moments_of_two_models_with_equal_paths() -> None:
    """The moments of each are divided as its parameters, of other shapes; without them, an error."""
    strategy = dj.ModelParallelStrategy(
        [0, 1], model=2, rules={"kernel": PartitionSpec(None, "model")}
    )

    def build() -> list[Any]:
        models = [nnx.Linear(64, width, use_bias=False, rngs=nnx.Rngs(0)) for width in (64, 32)]
        return [(m, nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param)) for m in models]

    pairs = build()
    for row in strategy.placement(pairs):
        assert (row.spec == PartitionSpec(None, "model")) == (len(row.shape) == 2), row

    def step(x: jax.Array) -> None:
        for model, optimizer in pairs:
            loss = lambda model: dj.compute_average_loss(model(x).mean(1) ** 2)  # noqa: E731
            grads = dj.get_replica_context().all_reduce("sum", nnx.grad(loss)(model))
            optimizer.update(model, grads)

    [batch] = strategy.distribute_dataset([np.ones((4, 64), np.float32)])
    strategy.run(step, args=(batch,))
    for _, optimizer in pairs:
        moments = [leaf for leaf in jax.tree.leaves(nnx.state(optimizer)) if leaf.ndim == 2]
        assert [leaf.sharding.spec for leaf in moments] == [PartitionSpec(None, "model")] * 2
    with pytest.raises(ValueError, match=r"strategy.placement\(\(model, optimizer\)\)"):
        strategy.placement(pairs[0][1])


@pytest.mark.parametrize("each", [long(2), long("tpu")])
def test_replicas_of_one_row_of_devices(each: Any) -> None:
    """Several replicas run on each row of devices, and a TPU's cores follow rules; numbers of one device."""
    strategy: dj.Strategy
    if each == "tpu":
        topology = dj.initialize_tpu_system(dj.cluster_resolver.TPUClusterResolver("local"))
        assignment = dj.tpu.experimental.DeviceAssignment.build(
            topology, [1, 2, 1, 2], num_replicas=2
        )
        strategy = dj.TPUStrategy(experimental_device_assignment=assignment, rules=RULES)
    else:
        devices = [0, 1, 2, 3]
        strategy = dj.ModelParallelStrategy(devices, model=2, rules=RULES, replicas_per_device=each)
        assert strategy.num_replicas_in_sync == 4
    (model, _, losses), (other, _, expected) = trained(strategy), trained(dj.OneDeviceStrategy(0))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert_close(*map(nnx.state, (model, other)), atol=1e-6)
    assert not model.blocks.up.kernel.get_raw_value().is_fully_replicated


@pytest.mark.parametrize(("devices", "model"), [(4, 2), long(2, 1)])
def test_sums_of_bfloat16(devices: int, model: int) -> None:
    """XLA ends the process in a bfloat16 sum beside a model axis, unless a pass of it is left out."""
    rules = {"kernel": PartitionSpec(None, "model")}
    strategy = dj.ModelParallelStrategy(list(range(devices)), model=model, rules=rules)
    layer = strategy.create(lambda: nnx.Linear(64, 64, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    x = np.ones((8, 64), np.float32)
    [batch] = strategy.distribute_dataset([x])
    before = np.asarray(layer(jnp.asarray(x)), np.float32)

    def step(x: jax.Array) -> None:
        grads = nnx.grad(lambda m: dj.compute_average_loss((m(x) ** 2).mean(1)))(layer)
        grads = dj.get_replica_context().all_reduce("sum", grads)
        nnx.update(layer, jax.tree.map(lambda p, g: p - 0.01 * g, nnx.state(layer), grads))

    strategy.run(step, args=(batch,))
    assert np.square(layer(jnp.asarray(x))).sum() < np.square(before).sum()


def test_logical_axes_of_flax() -> None:
    """A rule that names a logical axis divides the dims that Flax has given this name."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    strategy = dj.ModelParallelStrategy([0, 1], model=2, rules={"mlp": "model", "embed": None})
    layer = strategy.create(lambda: nnx.Linear(64, 32, kernel_init=init, rngs=nnx.Rngs(0)))
    assert layer.kernel.get_raw_value().sharding.spec == PartitionSpec(None, "model")
    [row] = [row for row in strategy.placement(layer) if row.path == "kernel"]
    assert row.why.startswith("rule 'embed', 'mlp'")
    mirrored = dj.MirroredStrategy([0, 1])
    with pytest.raises(ValueError, match="Resource axis") as error, mirrored.scope():
        nnx.Linear(64, 32, kernel_init=init, rngs=nnx.Rngs(0))
    assert "nnx.use_eager_sharding(False)" in error.value.__notes__[-1]
    with mirrored.scope(), nnx.use_eager_sharding(False):
        layer = nnx.Linear(64, 32, kernel_init=init, rngs=nnx.Rngs(0))
    assert layer.kernel.get_raw_value().sharding.is_fully_replicated


def test_a_variable_may_hold_a_tree() -> None:
    """Each of its arrays has a row; those of the optimizer state of such a parameter have its rule."""
    tree = {"a": jnp.ones((64, 32)), "b": (jnp.ones((32,)), jnp.int32(0))}
    other = nnx.Variable({"a": jnp.ones((64, 32)), "b": jnp.int32(0)})
    state = {"weights": nnx.Param(tree), "moments": {"weights": nnx.OptArray(tree)}, "other": other}
    rules = {"^weights": PartitionSpec()}
    strategy = dj.ModelParallelStrategy([0, 1, 2, 3], model=2, rules=rules)
    rows = {row.path: [] for row in strategy.placement(state)}
    for row in strategy.placement(state):
        rows[row.path].append((row.shape, row.spec, row.why))
    assert rows["moments.weights"] == rows["weights"]
    assert [spec for _, spec, _ in rows["other"]] == [PartitionSpec(None, "data"), PartitionSpec()]


@pytest.mark.parametrize(
    ("names", "divided"),
    [
        (["embed", "mlp"], True),
        (jax.NamedSharding(jax.make_mesh((1,), ("mlp",)), PartitionSpec(None, "mlp")), True),
        ([["mlp"], "mlp"], True),
        (5, False),
    ],
)
def test_logical_axes_in_any_form(names: Any, divided: bool) -> None:
    """The sharding metadata of a Flax variable may be a list or a sharding, or have no axes."""
    param = nnx.Param(jnp.ones((64, 32)), out_sharding=names, eager_sharding=False)
    strategy = dj.ModelParallelStrategy([0, 1], model=2, rules={"mlp": "model"})
    [row] = strategy.placement({"weights": param})
    assert (row.spec == PartitionSpec(None, "model")) == divided


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, r"rules must be a non-empty dict"),
        ({"kernel": 3}, r"a rule maps a str to a PartitionSpec, an axis or None; got 'kernel': 3"),
        ({"(": PartitionSpec("model")}, r"'\(' is not a regular expression"),
        (
            {"k{99999999999}": PartitionSpec("model")},
            r"is not a regular expression: the repetition",
        ),
        ({"kernel": PartitionSpec(unreduced={"model"})}, r"must only divide dims"),
        ({"kernel": PartitionSpec("data")}, r"names 'data', the axis of the replicas"),
        ({"kernel": PartitionSpec("tensor")}, r"names the axis 'tensor'; the axes are \['model'\]"),
        ({"kernel": PartitionSpec("model", "model")}, r"uses one axis for two dims"),
        ({"kernel": PartitionSpec(PartitionSpec.UNCONSTRAINED)}, r"None for each dim; got UNCONS"),
    ],
)
def test_rules_that_no_mesh_could_follow(rules: Any, message: str) -> None:
    """A rule that is wrong for every model is refused when the strategy is made."""
    with pytest.raises(ValueError, match=message):
        dj.ModelParallelStrategy([0, 1], model=2, rules=rules)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"dwon.kernel": PartitionSpec("model")},
            r"(?s)decide about no variable.*'; the nearest are .*down\.kernel",
        ),
        (
            {"kernel": PartitionSpec("model"), "s.up.kernel": PartitionSpec(None, "model")},
            r"'s\.up\.kernel'; the rule 'kernel' decides about blocks\.up\.kernel: put this one",
        ),
        (
            {"kernel": PartitionSpec("model"), "embed": "model"},
            r"'embed'; the rule 'kernel' decides about up\.kernel: put this one",
        ),
        (
            {"kernel": PartitionSpec("model"), "bias": None},
            r"'bias'; a logical axis, since its value is None; the nearest are up\.bias",
        ),
        ({"up.bias": PartitionSpec("model", None, None)}, r"has 3 dims, and blocks\.up\.bias has"),
        (
            {"embedding": PartitionSpec("model")},
            r"dim 1 of embed\.embedding, \[96, 66\], among 4 devices",
        ),
        ({"mlp": "model", "embed": "model"}, r"divide the dims \[0, 1\] of up\.kernel"),
    ],
)
def test_rules_that_do_not_fit_the_model(rules: Any, message: str) -> None:
    """A rule that matches nothing, has too many dims, or does not divide is refused with paths and sizes."""

    class Uneven(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
            self.embed = nnx.Embed(96, 66, rngs=rngs)
            self.blocks = nnx.split_rngs(splits=2)(nnx.vmap(Block))(rngs)
            self.up = nnx.Linear(4, 4, kernel_init=init, rngs=rngs)

    strategy = dj.ModelParallelStrategy([0, 1, 2, 3], model=4, rules=rules)
    with pytest.raises(ValueError, match=message):
        strategy.create(Uneven)


@pytest.mark.exhaustive
def test_rules_match_in_some_model() -> None:
    """Until one is made that has all, other models are refused; a step may reach only a part of it."""
    rules = {"up.kernel$": PartitionSpec(None, "model"), "embedding$": PartitionSpec("model")}
    strategy = dj.ModelParallelStrategy([0, 1], model=2, rules=rules)
    with pytest.raises(ValueError, match=r"about no variable of the model(?s:.*)'embedding\$'"):
        strategy.create(lambda: Block(nnx.Rngs(0)))
    language = strategy.create(Language)
    assert strategy.run(lambda: language.embed(jnp.zeros(2, int)).shape) == (2, 64)
    graphdef, state = nnx.split(language)
    assert (
        strategy.run(lambda s: nnx.merge(graphdef, s)(jnp.zeros((1, 4), int)), (state,)).ndim == 3
    )
    beside = strategy.create(lambda: (Block(nnx.Rngs(0)), nnx.Param(jnp.zeros(3)), jnp.zeros(2)))
    assert tuple(beside[0].up.kernel.sharding.spec) == (None, "model")


def test_a_model_of_which_nothing_can_be_divided() -> None:
    """The error names the strategy, and the option that divides by the rules alone."""
    strategy = dj.ModelParallelStrategy(model=2, rules={"bias": PartitionSpec()})
    with pytest.raises(
        ValueError, match=r"^ModelParallelStrategy(?s:.*)kernel(?s:.*)fully_sharded="
    ):
        strategy.create(lambda: nnx.Linear(65, 33, rngs=nnx.Rngs(0)))


def test_arguments() -> None:
    """Numbers of devices that do not fit, and arguments of the wrong kind, are one line each."""
    rules = {"kernel": PartitionSpec(None, "model")}
    with pytest.raises(ValueError, match="the 3 devices of a process are not a multiple"):
        dj.ModelParallelStrategy([0, 1, 2], model=2, rules=rules)
    with pytest.raises(ValueError, match=r"model must be an integer >= 1"):
        dj.ModelParallelStrategy([0, 1], model=0, rules=rules)


STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy([0, 1]),
    "sharded update": lambda: dj.MirroredStrategy([0, 1], shard_optimizer_state=True),
    "central": lambda: dj.CentralStorageStrategy([0, 1]),
    "fully sharded": lambda: dj.FullyShardedStrategy([0, 1, 2, 3]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*list(STRATEGIES)[:3], "fully sharded"])
def test_created_state_is_that_of_the_scope(name: str) -> None:
    """``create`` makes the numbers of ``scope``, each array where the first step would place it."""
    strategy = STRATEGIES[name]()
    created = strategy.create(build)
    with strategy.scope():
        made = build()
    flat = [jax.tree.leaves(nnx.state(nest)) for nest in (created, made)]
    assert_same_bits(*flat)
    places = [leaf.sharding for leaf in flat[0]]
    model, optimizer = created
    strategy.run(lambda: (model(jnp.zeros((1, 4), int)).sum(), optimizer.step.get_value()))
    assert [leaf.sharding for leaf in jax.tree.leaves(nnx.state(created))] == places
    assert made[0].blocks.up.kernel.get_raw_value().is_fully_replicated


def test_create_refuses_what_cannot_be_traced() -> None:
    """A model that reads its numbers while it is made is refused with what to do instead."""

    def reads() -> nnx.Module:
        layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        assert float(layer.kernel.sum()) < 100
        return layer

    with pytest.raises(ValueError, match=r"(?s)one compiled program.*strategy\.scope\(\)"):
        dj.MirroredStrategy([0, 1]).create(reads)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("module", r"make must be a function .*; got Linear"),
        ("number", r"make must be a function .*; got one that returns 3"),
        ("model", r"inside strategy.create. Make them before"),
        ("model of shapes", r"^dj.Model got a module without weights"),
        ("rngs", r"changes an nnx.Rngs or a module that was made before it"),
    ],
)
def test_create_refuses_what_is_not_a_function_that_makes_the_model(
    kind: str, message: str
) -> None:
    """A model, a function that returns none, and random streams from outside are refused."""
    rngs = nnx.Rngs(0)
    make: dict[str, Any] = {
        "number": lambda: 3,
        "model": lambda: dj.Model(Block(nnx.Rngs(0))),
        "model of shapes": lambda: dj.Model(nnx.eval_shape(Language)),
        "rngs": lambda: Block(rngs),
        "module": nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
    }
    with pytest.raises(ValueError, match=message):
        dj.MirroredStrategy([0, 1]).create(make[kind])


def test_create_makes_arrays_that_are_not_variables() -> None:
    """An array attribute of a module is replicated; an array beside modules is divided like a parameter."""

    class Scaled(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
            self.scale = nnx.data(jnp.full((64, 64), 2.0))
            self.mask = jnp.full(2, 2.0)  # which Flax takes for data only where nothing is traced

    module, array = dj.FullyShardedStrategy([0, 1]).create(lambda: (Scaled(), jnp.ones((64, 64))))
    assert float(module.scale.sum() / array.sum()) == float(module.mask.mean()) == 2
    assert module.scale.is_fully_replicated
    assert not array.is_fully_replicated
    assert not module.layer.kernel.get_raw_value().is_fully_replicated


def in_loop(x: Any) -> Any:
    """Rolls along the divided dim, with a trip count that depends on the replica's examples."""
    return jax.lax.while_loop(
        lambda h: jnp.abs(h).max() > 0.1, lambda h: jnp.roll(h, 1, axis=1) * 0.8, x
    )


def in_branch(x: Any) -> Any:
    """Rolls along the divided dim on some replicas, by a predicate on their examples."""
    return jax.lax.cond(x[0, 0] > 0, lambda h: jnp.roll(h, 1, axis=1), jnp.negative, x)


@pytest.mark.parametrize(
    ("moves", "decided"),
    [(in_loop, "the trip count of while"), (in_branch, "the predicate of cond")],
)
def test_an_exchange_that_not_every_replica_reaches_is_refused(moves: Any, decided: str) -> None:
    """All devices must take part in it, or it waits for ever; a replicated value needs none."""
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    x[:, 0] = -1, -1, 1, 1  # the replicas decide differently

    def outputs(strategy: dj.Strategy, *, whole: bool) -> Any:
        with strategy.scope():
            layer = nnx.Linear(8, 8, kernel_init=lambda *_: jnp.eye(8), rngs=nnx.Rngs(0))

            def step(x: Any) -> Any:
                h = layer(x)
                if whole:
                    h = jax.lax.with_sharding_constraint(h, PartitionSpec())
                return moves(h)

            [batch] = strategy.distribute_dataset([x])
            return np.asarray(strategy.gather(strategy.run(step, args=(batch,)), axis=0))

    rules = {"kernel": PartitionSpec(None, "model")}
    strategy = dj.ModelParallelStrategy([0, 1, 2, 3], model=2, rules=rules)
    with pytest.raises(dj.DeadlockError, match=f"{decided} at test_model_parallel.py"):
        outputs(strategy, whole=False)
    expected = outputs(dj.MirroredStrategy([0, 1]), whole=False)
    np.testing.assert_allclose(outputs(strategy, whole=True), expected, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "rule", "only"),
    [
        (2, ("", PartitionSpec()), None),
        (
            3,
            ("kernel", PartitionSpec("model", None)),
            ["training", "training_with_dj_optimizer", "run_steps", "donation"],
        ),
    ],
)
def test_it_conforms(model: int, rule: tuple[str, PartitionSpec], only: list[str] | None) -> None:
    """The library's suite for strategies, also where the kernels of its models, [3, 1], are divided."""

    def factory(found: list[jax.Device]) -> dj.Strategy:
        others = iter([device for device in jax.devices() if device not in found])
        rows = [[first, *(next(others) for _ in range(model - 1))] for first in found]
        devices = [device for row in rows for device in row]
        return dj.ModelParallelStrategy(devices, model=model, rules=dict([rule]))

    assert not dj.testing.check_strategy(factory, [2], only=only).refused
