"""Random streams: different numbers on each replica, one stored state, reproducible from the seed."""

from __future__ import annotations

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

SHAPE = (64,)


def parts(strategy: dj.Strategy, value: Any) -> list[np.ndarray]:
    return [np.asarray(part) for part in strategy.experimental_local_results(value)]


def number_of_values(strategy: dj.Strategy, value: Any) -> int:
    """Counts the different values of the replicas."""
    return len({part.tobytes() for part in parts(strategy, value)})


class Block(nnx.Module):
    """A linear layer with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(32, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.linear(x))


def plain(block: Block) -> Callable[[jax.Array], jax.Array]:
    return block


def recomputed(block: Block) -> Callable[[jax.Array], jax.Array]:
    return lambda x: nnx.remat(lambda block, x: block(x))(block, x)


def scanned(block: Block) -> Callable[[jax.Array], jax.Array]:
    """Calls the block three times in a scan that carries it."""

    @nnx.scan(length=3, in_axes=nnx.Carry, out_axes=nnx.Carry)
    def three_times(carry: tuple[Block, jax.Array]) -> tuple[Block, jax.Array]:
        block, x = carry
        return block, block(x)

    return lambda x: three_times((block, x))[1]


WAYS = [plain, recomputed, scanned]


def training(
    strategy: dj.Strategy, *ways: Any, seed: int = 0
) -> dict[Any, tuple[Block, list[Any]]]:
    """Trains three steps with dropout, each way with another model, in one program.

    Returns for each way the model and the results of its steps.
    """
    with strategy.scope():
        blocks = {way: Block(nnx.Rngs(params=0, dropout=seed)) for way in ways}
        optimizers = {
            way: nnx.Optimizer(blocks[way], optax.sgd(1e-3), wrt=nnx.Param) for way in ways
        }

    def trained(way: Any, x: jax.Array) -> jax.Array:
        def loss_fn(block: Block) -> tuple[jax.Array, jax.Array]:
            out = way(block)(x)
            return dj.compute_average_loss(jnp.sum(out**2, axis=-1)), out

        grads, out = nnx.grad(loss_fn, has_aux=True)(blocks[way])
        optimizers[way].update(blocks[way], dj.get_replica_context().all_reduce("sum", grads))
        return out

    rows = np.ones((8, 32), np.float32)
    outs = [
        strategy.run(lambda x: [trained(way, x) for way in ways], args=batch)
        for batch in strategy.distribute_dataset([(rows,)] * 3)
    ]
    return {way: (blocks[way], [out[i] for out in outs]) for i, way in enumerate(ways)}


def test_masks_of_dropout_differ_and_the_stored_state_is_equal_to_the_last_bit(
    strategy: dj.Strategy,
):
    replicas = strategy.num_replicas_in_sync
    for way, (block, outs) in training(strategy, *WAYS).items():
        for out in outs:
            assert number_of_values(strategy, out) == replicas
        assert len({np.asarray(strategy.gather(out, axis=0)).tobytes() for out in outs}) == 3
        dj.check_in_sync(block)
        counter = block.dropout.rngs.count[...]
        assert counter.is_fully_replicated
        assert int(counter) == 3 * (3 if way is scanned else 1)


@pytest.mark.parametrize("way", [plain, *(long(way) for way in WAYS[1:])])
def test_the_same_seed_gives_the_same_run_and_another_seed_another(s4: dj.Strategy, way: Any):
    runs = [training(s4, way, seed=seed)[way] for seed in (7, 7, 8)]
    states = [
        [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(nnx.state(block, nnx.Param))]
        for block, _ in runs
    ]
    assert states[0] == states[1]
    assert states[0] != states[2]
    first, second = (s4.gather(outs[-1], axis=0) for _, outs in runs[:2])
    np.testing.assert_array_equal(first, second)


@pytest.mark.exhaustive
def test_recomputation_draws_the_same_masks(s4: dj.Strategy):
    (straight, _), (again, _) = training(s4, plain, recomputed).values()
    np.testing.assert_allclose(straight.linear.kernel[...], again.linear.kernel[...], rtol=1e-5)


@pytest.mark.exhaustive
def test_rngs_passed_as_an_argument_are_state_and_draw_again_at_each_step(strategy: dj.Strategy):
    with strategy.scope():
        rngs = nnx.Rngs(params=0, noise=1)

    def step(rngs: nnx.Rngs) -> dict[str, jax.Array]:
        return {"params": rngs.params.normal(SHAPE), "noise": rngs.noise.normal(SHAPE)}

    first, second = (strategy.run(step, args=(rngs,)) for _ in range(2))
    for drawn in (first, second):
        assert number_of_values(strategy, drawn["noise"]) == strategy.num_replicas_in_sync
        assert isinstance(drawn["params"], jax.Array)
    assert not np.array_equal(parts(strategy, first["noise"]), parts(strategy, second["noise"]))
    alone = nnx.Rngs(params=0, noise=1)
    np.testing.assert_array_equal(parts(strategy, first["noise"])[0], alone.noise.normal(SHAPE))
    np.testing.assert_array_equal(first["params"], alone.params.normal(SHAPE))


@pytest.mark.exhaustive
@pytest.mark.parametrize("captured", [True, False])
def test_jax_keys_draw_the_same_numbers_unless_the_replica_id_is_folded_in(
    s4: dj.Strategy, captured: bool
):
    with s4.scope():
        key = jax.random.key(5)

    def step(key: jax.Array = key) -> tuple[jax.Array, jax.Array]:
        own = jax.random.fold_in(key, dj.get_replica_context().replica_id_in_sync_group)
        return jax.random.normal(key, SHAPE), jax.random.normal(own, SHAPE)

    same, own = s4.run(step, args=() if captured else (key,))
    assert isinstance(same, jax.Array)
    np.testing.assert_array_equal(same, jax.random.normal(key, SHAPE))
    assert number_of_values(s4, own) == 4


# Streams that are the same on all replicas


@pytest.mark.exhaustive
def test_a_marked_stream_is_the_same_on_all_replicas_and_others_differ(strategy: dj.Strategy):
    with strategy.scope():
        rngs = nnx.Rngs(dropout=0, augment=1)
        assert dj.same_on_all_replicas(rngs.augment) is rngs.augment
    drawn = strategy.run(lambda: (rngs.dropout.normal(SHAPE), rngs.augment.normal(SHAPE)))
    assert number_of_values(strategy, drawn[0]) == strategy.num_replicas_in_sync
    assert isinstance(drawn[1], jax.Array)
    np.testing.assert_array_equal(drawn[1], nnx.Rngs(augment=1).augment.normal(SHAPE))
    assert rngs.augment.tag == "augment"


def marked_before(rngs: nnx.Rngs) -> nnx.Dropout:
    """The layer forks the stream of ``rngs`` when it is built."""
    return nnx.Dropout(0.5, rngs=dj.same_on_all_replicas(rngs))


def marked_stream_before(rngs: nnx.Rngs) -> nnx.Dropout:
    dj.same_on_all_replicas(rngs.dropout)
    return nnx.Dropout(0.5, rngs=rngs)


def marked_after(rngs: nnx.Rngs) -> nnx.Dropout:
    return dj.same_on_all_replicas(nnx.Dropout(0.5, rngs=rngs))


def marked_and_cloned(rngs: nnx.Rngs) -> nnx.Dropout:
    return nnx.clone(marked_after(rngs))


def marked_and_merged(rngs: nnx.Rngs) -> nnx.Dropout:
    return nnx.merge(*nnx.split(marked_after(rngs)))


@pytest.mark.parametrize(
    "build",
    [
        marked_before,
        marked_stream_before,
        marked_after,
        *map(long, (marked_and_cloned, marked_and_merged)),
    ],
)
def test_dropout_with_a_marked_stream_equals_that_of_one_device(
    strategy: dj.Strategy, build: Callable[[nnx.Rngs], nnx.Dropout]
):
    with strategy.scope():
        dropout = build(nnx.Rngs(dropout=3))
    alone = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=3))
    for _ in range(2):
        mask = strategy.run(lambda: dropout(jnp.ones(SHAPE)))
        assert isinstance(mask, jax.Array)
        np.testing.assert_array_equal(mask, alone(jnp.ones(SHAPE)))


def test_a_stream_marked_between_two_runs_is_noticed(s4: dj.Strategy):
    with s4.scope():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=3))
    step = lambda: dropout(jnp.ones(SHAPE))  # noqa: E731
    assert isinstance(s4.run(step), dj.PerReplica)
    kept = dj.snapshot(dropout)
    dj.same_on_all_replicas(dropout)
    first = s4.run(step)
    assert isinstance(first, jax.Array)
    nnx.update(dropout, kept)
    np.testing.assert_array_equal(s4.run(step), first)


@pytest.mark.exhaustive
def test_streams_of_scanned_layers_have_a_key_each_and_can_be_marked(s4: dj.Strategy):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def through(block: Block, x: jax.Array) -> jax.Array:
        return block(x)

    with s4.scope():
        blocks = make(nnx.Rngs(params=0, dropout=1))
    step = lambda: through(blocks, jnp.ones((2, 32)))  # noqa: E731
    assert number_of_values(s4, s4.run(step)) == 4
    dj.check_in_sync(blocks)
    dj.same_on_all_replicas(blocks)
    assert isinstance(s4.run(step), jax.Array)
    assert blocks.dropout.rngs.count[...].tolist() == [2, 2, 2]


@pytest.mark.exhaustive
def test_a_marked_stream_is_not_in_the_notice_about_random_numbers(
    s4: dj.Strategy, caplog: pytest.LogCaptureFixture
):
    with s4.scope():
        same, own = (nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=i)) for i in range(2))
        dj.same_on_all_replicas(same)
        recurrent = nnx.RNN(nnx.GRUCell(2, 2, rngs=nnx.Rngs(0)))  # draws a key and makes zeros
    s4.run(lambda: (same(jnp.ones(4)), own(jnp.ones(4)), recurrent(jnp.ones((1, 1, 2)))))
    [record] = caplog.records
    assert "own.rngs (RngStream)" in record.getMessage()
    assert "dj.same_on_all_replicas(stream)" in record.getMessage()


@pytest.mark.parametrize(
    "make",
    [lambda: nnx.Linear(1, 1, rngs=nnx.Rngs(0)), lambda: jax.random.key(0), lambda: "dropout"],
)
def test_what_holds_no_stream_cannot_be_marked(make: Callable[[], Any]):
    value = make()
    with pytest.raises(ValueError, match=r"no random stream.*dj\.same_on_all_replicas\(rngs"):
        dj.same_on_all_replicas(value)


def test_a_stream_cannot_be_marked_inside_a_step(s2: dj.Strategy):
    with s2.scope():
        rngs = nnx.Rngs(noise=0)
    with pytest.raises(
        RuntimeError, match=r"dj\.same_on_all_replicas was called inside a function"
    ):
        s2.run(lambda: dj.same_on_all_replicas(rngs).noise())


def dropped(rngs: nnx.Rngs) -> jax.Array:
    """Drops units with a layer that the step makes."""
    return nnx.Dropout(0.5, rngs=rngs)(jnp.ones(8))


def seeded(key: jax.Array) -> jax.Array:
    """Draws in nested, scanned and rematerialised code."""
    draw = jax.checkpoint(lambda k: jax.random.normal(k, (2,)))
    return jax.lax.scan(lambda k, _: (jax.random.split(k)[0], jax.jit(draw)(k)), key, None, 2)[1]


@pytest.mark.exhaustive
def test_a_stream_that_the_step_seeds_is_named_once(
    s4: dj.Strategy, caplog: pytest.LogCaptureFixture
):
    """Its numbers are equal on all replicas, which the library cannot change."""
    with s4.scope():
        block = Block(nnx.Rngs(params=0, dropout=1))

    def step() -> Any:
        nnx.reseed(block.dropout, dropout=3)
        return dropped(nnx.Rngs(dropout=7)), seeded(jax.random.key(1)), block(jnp.ones((2, 32)))

    equal, nested, reseeded = s4.run(step)
    assert all(isinstance(value, jax.Array) for value in (equal, nested, reseeded))
    s4.run(step, options=dj.RunOptions(donate_state=False))
    texts = [r.getMessage() for r in caplog.records if "seeds random numbers" in r.getMessage()]
    first = step.__code__.co_firstlineno
    assert [text.split(" and draws")[0].split(":")[-1] for text in texts] == [
        str(first + 1), str(first + 2)
    ]  # fmt: skip
    assert all("before run" in text and "fold_in" in text for text in texts)


@pytest.mark.exhaustive
def test_streams_that_differ_or_come_from_outside_are_not_reported(
    s4: dj.Strategy, caplog: pytest.LogCaptureFixture
):
    """No notice of keys with the replica id folded in, keys in args, marked streams, or unused seeds."""
    with s4.scope():
        same = dj.same_on_all_replicas(nnx.Rngs(noise=0))

    def step(key: jax.Array, x: jax.Array) -> Any:
        own = jax.random.fold_in(
            jax.random.key(7), dj.get_replica_context().replica_id_in_sync_group
        )
        by_data = jax.random.fold_in(jax.random.key(8), x[0].astype(int))
        jax.random.key(9)
        return dropped(nnx.Rngs(dropout=own)), seeded(by_data), seeded(key), same.noise.normal()

    (batch,) = s4.distribute_dataset([np.arange(4.0)])
    s4.run(step, args=(jax.random.key(3), batch))
    assert not [r for r in caplog.records if "seeds random numbers" in r.getMessage()]


def test_a_seeded_predicate_of_a_collective_is_not_a_deadlock(s4: dj.Strategy):
    """All replicas draw the same, so all take the same branch."""

    def step() -> jax.Array:
        heads = jax.random.bernoulli(jax.random.key(1))
        return jax.lax.cond(heads, lambda: jax.lax.psum(1.0, "data"), lambda: 0.0)

    assert float(s4.run(step)) in (0.0, 4.0)


def test_the_key_of_a_stream_cannot_be_stored_again_and_the_message_speaks_of_keys(s4: dj.Strategy):
    """Inside run the key differs per replica; the error says how to draw and how to reseed."""
    with s4.scope():
        rngs = nnx.Rngs(noise=0)

    def step() -> None:
        rngs.noise.key[...] = jax.random.split(rngs.noise.key[...])[0]

    with pytest.raises(dj.OutOfSyncError) as error:
        s4.run(step)
    text = str(error.value)
    assert "rngs.noise.key (RngKey)" in text
    assert "nnx.reseed" in text
    assert "dj.same_on_all_replicas" in text
    assert "gradients" not in text


class DroppingBlocks(nnx.Module):
    """Scanned layers with dropout, each with another stream."""

    def __init__(self, rngs: nnx.Rngs, *, remat: bool) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Module:
            return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

        self.blocks = make(rngs)
        self.remat = remat

    def __call__(self, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, block: Callable[[jax.Array], jax.Array]) -> jax.Array:
            return block(x)

        f = nnx.remat(body) if self.remat else body
        return nnx.scan(f, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


@pytest.mark.exhaustive
def test_dropout_in_a_scanned_rematerialised_block_draws_as_without_remat(strategy: dj.Strategy):
    """The keys of the layers pass through scan and remat unchanged, and so does the stored state."""
    x = np.ones((16, 4), np.float32)
    outcomes = []
    for remat in (False, True):
        with strategy.scope():
            model = DroppingBlocks(nnx.Rngs(0, dropout=1), remat=remat)
        keys = [np.asarray(jax.random.key_data(k)) for k in _keys(model)]

        def step(x: jax.Array, model: DroppingBlocks = model) -> jax.Array:
            total, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).sum())(model)
            return dj.get_replica_context().all_reduce(
                "sum", (total, jax.tree.leaves(gradients)[0])
            )

        batches = strategy.distribute_dataset([x] * 2)
        outcomes.append([strategy.run(step, args=(batch,)) for batch in batches])
        for key, old in zip(_keys(model), keys, strict=True):
            np.testing.assert_array_equal(jax.random.key_data(key), old)
    assert float(outcomes[0][0][0]) > 0
    assert float(outcomes[0][0][0]) != float(outcomes[0][1][0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *outcomes)


def _keys(model: nnx.Module) -> list[jax.Array]:
    return [
        v.get_raw_value()
        for v in jax.tree.leaves(
            nnx.state(model, nnx.RngKey), is_leaf=lambda v: isinstance(v, nnx.Variable)
        )
    ]


def test_a_key_that_the_step_really_changes_is_still_refused(s2: dj.MirroredStrategy):
    """Only a key that passes through unchanged keeps its old value."""
    with s2.scope():
        stream = nnx.RngStream(0, tag="dropout")

    def step() -> None:
        def body(key: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.random.fold_in(key, 1), None

        stream.key[...] = jax.lax.scan(body, stream.key[...], None, 2)[0]

    with pytest.raises(dj.OutOfSyncError, match="random streams"):
        s2.run(step)
