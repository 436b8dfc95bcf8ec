"""``strategy.run``: arguments, results, state, and the cache of programs."""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import itertools
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from leaves import replica_number

import distribute_jax as dj
from distribute_jax.program import _cache


class Linear(nnx.Module):
    """One weight matrix."""

    def __init__(self, rngs: nnx.Rngs, width: int = 3) -> None:
        self.w = nnx.Param(jax.random.normal(rngs.params(), (2, width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


def built(strategy: dj.Strategy) -> Linear:
    with strategy.scope():
        return Linear(nnx.Rngs(0))


def test_results_that_differ_are_per_replica(s2: dj.MirroredStrategy):
    ids = s2.run(replica_number)
    assert isinstance(ids, dj.PerReplica)
    assert isinstance(ids, dj.DistributedValues)
    assert [float(v) for v in s2.experimental_local_results(ids)] == [0.0, 1.0]
    assert repr(ids) == "PerReplica:{0: array(0., dtype=float32), 1: array(1., dtype=float32)}"
    with pytest.raises(TypeError, match=r"^PerReplica of 2 × float32\[\] holds one value"):
        f"{ids:.3f}"
    ids.global_array.delete()
    assert repr(ids).startswith("PerReplica:{unreadable, DonatedError: float32[2] was donated to")
    (batch,) = s2.distribute_dataset([np.zeros((80, 3), np.float32)])
    assert repr(batch) == "PerReplica of 2 × float32[40,3]"


@pytest.mark.parametrize(
    "value", [5, None, "a", np.str_("a"), 1.5, True, (), enum.Enum("E", "A").A]
)
def test_results_that_are_not_arrays_are_returned_unchanged(s2: dj.MirroredStrategy, value: object):
    assert s2.run(lambda: value) is value


def test_a_result_that_no_device_can_hold_is_refused_with_its_path(s2: dj.MirroredStrategy):
    text = r"strategy.run: result\['label'\] of its step must be an array of numbers; got <U1"
    with pytest.raises(dj.ArgumentError, match=text):
        s2.run(lambda: {"label": np.array(["a", "b"])})


def test_a_nest_keeps_its_structure(s2: dj.MirroredStrategy):
    def step():
        return {"a": replica_number(), "b": [1, None, (jnp.ones(()), "c")]}

    result = s2.run(step)
    assert isinstance(result["a"], dj.PerReplica)
    assert result["b"][:2] == [1, None]
    assert isinstance(result["b"][2][0], jax.Array)
    assert result["b"][2][1] == "c"


def test_a_mirrored_result_is_one_array_over_the_whole_mesh(s4: dj.MirroredStrategy):
    def step():
        return dj.get_replica_context().all_reduce("sum", replica_number())

    result = s4.run(step)
    assert isinstance(result, jax.Array)
    assert not isinstance(result, dj.PerReplica)
    assert float(result) == 6.0
    assert result.sharding.is_fully_replicated
    assert len(result.sharding.device_set) == 4


def test_a_bound_object_that_is_returned_is_itself(s2: dj.MirroredStrategy):
    model = built(s2)
    back, weight = s2.run(lambda: (model, model.w))
    assert back is model
    assert weight is model.w


@pytest.mark.parametrize("args", [3, "ab", None, {"x": 1}, jnp.ones(2)])
def test_args_must_be_a_tuple(s2: dj.MirroredStrategy, args: object):
    with pytest.raises(ValueError, match=r"args must be a list or tuple.*for several"):
        s2.run(lambda x: x, args=args)


def test_kwargs_must_be_a_dict(s2: dj.MirroredStrategy):
    with pytest.raises(ValueError, match="kwargs must be a dict"):
        s2.run(lambda x: x, kwargs=[1])
    assert float(s2.run(lambda x: x, kwargs={"x": 2.0})) == 2.0
    assert float(s2.run(lambda x: x, args=[2.0])) == 2.0


def test_exactly_the_per_replica_values_are_split(s2: dj.MirroredStrategy):
    value = s2.run(replica_number)
    assert s2.run(lambda a, b: (a.shape, b.shape), args=(value, jnp.arange(2.0))) == ((), (2,))


def test_numbers_are_data_and_compile_once(s2: dj.MirroredStrategy):
    traces = []

    def step(x: jax.Array, rate: float):
        traces.append(1)
        return x * rate

    for rate in (0.5, 0.25, 2.0):
        assert float(s2.run(step, args=(1.0, rate))) == rate
    assert float(s2.run(step, args=(1.0, np.float32(3)))) == 3.0
    assert len(traces) == 2  # a Python number and a NumPy one are two programs


@pytest.mark.parametrize("number", [3, 0.5])
def test_a_number_that_a_step_returned_has_the_signature_of_a_python_number(
    s2: dj.MirroredStrategy, number: float
):
    """As the counter of a ``TrainState``: one program serves the number and the array."""
    traces = []

    def step(state: dict[str, object], x: jax.Array):
        traces.append(1)
        return {"number": state["number"] + 1}, x * state["number"]

    state, x = {"number": number}, jnp.ones(2, jnp.bfloat16)
    for i in range(3):
        state, scaled = s2.run(step, args=(state, x), options=dj.RunOptions(donate_args=True))
        assert scaled.dtype == jnp.bfloat16
        assert float(scaled[0]) == number + i
        x = jnp.ones(2, jnp.bfloat16)
    assert len(traces) == 1
    _, scaled = s2.run(step, args=({"number": jnp.float32(2)}, x))
    assert scaled.dtype == jnp.float32
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("value", "kind"), [(True, bool), ("mean", str), (None, type(None)), (b"x", bytes)]
)
def test_static_arguments_are_constants(s2: dj.MirroredStrategy, value: object, kind: type):
    def step(flag: object):
        assert type(flag) is kind
        return 1.0 if flag else 0.0

    assert s2.run(step, args=(value,)) == (1.0 if value else 0.0)
    assert s2.run(step, kwargs={"flag": value}) == (1.0 if value else 0.0)


def test_training_true_and_false_are_two_programs(s2: dj.MirroredStrategy):
    def step(x: jax.Array, training: bool):
        return x + 1 if training else x

    assert float(s2.run(step, args=(1.0,), kwargs={"training": True})) == 2.0
    assert float(s2.run(step, args=(1.0,), kwargs={"training": False})) == 1.0
    assert s2._runner.programs() == 2


def test_a_per_replica_value_of_another_strategy_is_refused(
    s2: dj.MirroredStrategy, s4: dj.MirroredStrategy
):
    with pytest.raises(ValueError, match="Distribute the data with the strategy that runs"):
        s4.run(lambda x: x, args=(s2.run(replica_number),))


def test_python_that_needs_a_traced_value_is_explained(s2: dj.MirroredStrategy):
    def branch():
        return 1.0 if dj.get_replica_context().replica_id_in_sync_group == 0 else 2.0

    def size(n: int):
        return jnp.zeros(n)

    def loop(n: int):
        return [jnp.ones(()) for _ in range(n)]

    with pytest.raises(TypeError, match=r"jnp\.where.*jax\.lax\.cond"):
        s2.run(branch)
    for step in (size, loop):
        with pytest.raises(TypeError, match=r"functools\.partial"):
            s2.run(step, args=(3,))
    assert s2.run(functools.partial(size, 3)).shape == (3,)


def binders(strategy: dj.Strategy):
    """Returns the ways in which a step can reach a model and an optimizer."""
    model = built(strategy)
    with strategy.scope():
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    x = jnp.ones((4, 2))

    def update(model: Linear, optimizer: nnx.Optimizer):
        grads = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("mean", grads))

    def closure():
        update(model, optimizer)

    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer = model, optimizer

        def step(self) -> None:
            update(self.model, self.optimizer)

        def __call__(self) -> None:
            self.step()

    @functools.wraps(closure)
    def wrapped():
        return closure()

    pair = (model, optimizer)
    holder = {"m": [model], "o": optimizer}
    trainer = Trainer()
    return model, {
        "args": (update, (model, optimizer)),
        "closure": (closure, ()),
        "partial": (functools.partial(update, model, optimizer), ()),
        "partial keyword": (functools.partial(update, model, optimizer=optimizer), ()),
        "method": (trainer.step, ()),
        "callable object": (trainer, ()),
        "object in a closure": (lambda: trainer.step(), ()),
        "object in args": (lambda t: t.step(), (trainer,)),
        "wraps": (wrapped, ()),
        "jit": (jax.jit(closure), ()),
        "nested function": (lambda: (lambda: update(*pair))(), ()),
        "dict in a closure": (lambda: update(holder["m"][0], holder["o"]), ()),
        "dict in args": (lambda d: update(d["m"][0], d["o"]), (holder,)),
        "default argument": (lambda m=model, o=optimizer: update(m, o), ()),
    }


WAYS = (  # noqa: SIM905
    "args, closure, partial, partial keyword, method, callable object, object in a closure, "
    "object in args, wraps, jit, nested function, dict in a closure, dict in args, default argument"
).split(", ")


@pytest.mark.parametrize(
    ("strategy", "way"),
    [*((4, way) for way in WAYS), *((replicas, "args") for replicas in (1, 2, 8))],
    indirect=["strategy"],
)
def test_state_is_updated_however_the_step_reaches_it(strategy: dj.Strategy, way: str):
    model, ways = binders(strategy)
    fn, args = ways[way]
    expected, x = np.asarray(model.w[...]), np.ones((4, 2))
    for _ in range(3):
        expected = expected - 0.1 * 2 * x.T @ (x @ expected)
        assert strategy.run(fn, args=args) is None
    np.testing.assert_allclose(model.w[...], expected, rtol=1e-4)
    assert isinstance(model.w[...], jax.Array)
    assert len(model.w[...].sharding.device_set) == strategy.num_replicas_in_sync


GLOBAL_COUNT = nnx.Variable(jnp.array(0))
GLOBAL_SCALE = jnp.array(2.0)


def bump_global():
    GLOBAL_COUNT[...] += 1


def test_globals_and_the_globals_of_helpers_are_state(s2: dj.MirroredStrategy):
    GLOBAL_COUNT[...] = jnp.array(0)

    def step():
        bump_global()
        return GLOBAL_COUNT[...]

    with pytest.warns(UserWarning, match=r"outside of strategy\.scope\(\)"):
        assert int(s2.run(step)) == 1
    assert int(s2.run(step)) == 2
    assert int(GLOBAL_COUNT[...]) == 2


def test_captured_arrays_are_read_at_each_call(s2: dj.MirroredStrategy):
    global GLOBAL_SCALE
    traces = []
    local = jnp.array(1.0)
    inside = {"deep": [jnp.array(10.0)], "tuple": (jnp.array(100.0),)}

    def step():
        traces.append(1)
        return GLOBAL_SCALE + local + inside["deep"][0] + inside["tuple"][0]

    assert float(s2.run(step)) == 113.0
    GLOBAL_SCALE = jnp.array(3.0)
    local = jnp.array(2.0)
    assert float(s2.run(step)) == 115.0
    inside["deep"][0] = jnp.array(20.0)
    assert float(s2.run(step)) == 125.0
    inside["tuple"] = (jnp.array(200.0),)
    assert float(s2.run(step)) == 225.0
    assert len(traces) == 1
    GLOBAL_SCALE = jnp.array(2.0)


def test_an_array_in_an_iterator_is_refused(s2: dj.MirroredStrategy):
    hidden = itertools.cycle([jnp.ones(1000)])  # an iterator cannot be walked
    with pytest.raises(ValueError, match=r"Pass the array, or the object that holds it, in args"):
        s2.run(lambda: next(hidden).sum())
    with pytest.raises(ValueError, match=r"float32\[1000\]"):
        s2.run(jax.jit(lambda: jax.jit(lambda x: x + next(hidden))(1.0)))


def test_changes_of_the_model_are_noticed(s2: dj.MirroredStrategy):
    with s2.scope():
        model = nnx.Sequential(
            nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        )
    x = jnp.ones((4, 2))
    step = lambda: model(x)  # noqa: E731
    noisy = s2.run(step)
    model.eval()
    quiet = s2.run(step)
    assert isinstance(noisy, dj.PerReplica)
    assert isinstance(quiet, jax.Array)
    np.testing.assert_allclose(quiet, model(x), rtol=1e-6)
    with s2.scope():
        model.layers[0] = nnx.Linear(2, 5, rngs=nnx.Rngs(3))
    assert s2.run(step).shape == (4, 5)
    np.testing.assert_allclose(s2.run(step), model(x), rtol=1e-6)


def test_a_new_value_from_outside_is_used(s2: dj.MirroredStrategy):
    model = built(s2)
    step = lambda: model(jnp.ones((1, 2)))  # noqa: E731
    s2.run(step)
    model.w[...] = jnp.zeros((2, 3))
    assert float(jnp.sum(s2.run(step))) == 0.0
    model.w.set_value(jax.device_put(jnp.ones((2, 3)), jax.devices()[5]))
    assert float(jnp.sum(s2.run(step))) == 6.0
    model.w.set_value(jnp.ones((2, 4)))
    assert s2.run(step).shape == (1, 4)


def test_tied_weights_and_clones_are_updated_once_each(s2: dj.MirroredStrategy):
    model = built(s2)
    clone = nnx.clone(model)
    target = Linear(nnx.Rngs(1))
    target.w = model.w

    def step():
        model.w[...] += 1
        clone.w[...] += 10

    before = np.asarray(model.w[...])
    with s2.scope():
        s2.run(step)
        clone.w[...] = model.w[...]
        s2.run(step)
    np.testing.assert_allclose(model.w[...], before + 2, rtol=1e-6)
    np.testing.assert_allclose(clone.w[...], before + 11, rtol=1e-6)
    np.testing.assert_allclose(target.w[...], before + 2, rtol=1e-6)


def test_a_value_of_a_variable_that_is_only_read_is_not_donated(s2: dj.MirroredStrategy):
    online, target = built(s2), built(s2)

    def step():
        online.w[...] = online.w[...] + jnp.sum(target.w[...] * 0) + 1
        return jnp.sum(target.w[...])

    first = float(s2.run(step))
    target.w[...] = online.w[...]
    second = float(s2.run(step))
    assert second == pytest.approx(first + 6, rel=1e-5)
    assert float(jnp.sum(target.w[...])) == pytest.approx(second, rel=1e-5)


def test_state_made_outside_the_scope_is_mirrored_with_one_warning(s2: dj.MirroredStrategy):
    model = Linear(nnx.Rngs(0))
    with pytest.warns(UserWarning, match=r"model\.w") as caught:
        s2.run(lambda: model(jnp.ones((1, 2))))
        s2.run(lambda: model(jnp.ones((1, 2))))
    assert len(caught) == 1
    assert len(model.w[...].sharding.device_set) == 2


def test_a_new_lambda_of_the_same_code_hits_the_cache(s2: dj.MirroredStrategy):
    model = built(s2)
    for _ in range(5):
        s2.run(lambda: model(jnp.ones((1, 2))))
    assert s2._runner.programs() == 1


def test_a_step_that_keeps_recompiling_gives_one_warning_that_names_what_changed(
    s2: dj.MirroredStrategy,
):
    with pytest.warns(UserWarning, match=r"scale \(4 then 5\)") as caught:
        for scale in range(1, 9):
            s2.run(lambda: jnp.ones(()) * scale)  # noqa: B023
    assert len(caught) == 1


def test_an_attribute_that_the_step_does_not_use_does_not_recompile(s2: dj.MirroredStrategy):
    class Trainer:
        def __init__(self) -> None:
            self.model = built(s2)
            self.global_step = 0

        def step(self):
            return self.model(jnp.ones((1, 2)))

    trainer = Trainer()
    for _ in range(3):
        s2.run(trainer.step)
        trainer.global_step += 1
    assert s2._runner.programs() == 1


def test_deleting_the_model_frees_its_buffers_and_drops_its_programs(s2: dj.MirroredStrategy):
    holder = [built(s2)]
    s2.run(lambda model: model(jnp.ones((1, 2))), args=(holder[0],))
    array = weakref.ref(holder[0].w[...])
    assert s2._runner.programs() == 1
    holder.clear()
    gc.collect()
    assert array() is None
    assert s2._runner.programs() == 0


@pytest.mark.exhaustive
def test_replaced_parts_are_not_kept_alive(s2: dj.MirroredStrategy):
    with s2.scope():
        model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    step = lambda: model(jnp.ones((1, 2)))  # noqa: E731
    s2.run(step)
    old = weakref.ref(model.layers[0].kernel[...])
    with s2.scope():
        model.layers[0] = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    s2.run(step)
    gc.collect()
    assert old() is None


def test_two_models_of_one_shape_share_a_program_that_keeps_none_alive(s2: dj.MirroredStrategy):
    traces = []

    def step(model: Linear):
        traces.append(1)
        model.w[...] += 1

    first, second = built(s2), built(s2)
    before = np.asarray(first.w[...])
    s2.run(step, args=(first,))
    s2.run(step, args=(second,))
    s2.run(step, args=(first,))
    np.testing.assert_allclose(first.w[...], before + 2, rtol=1e-6)
    np.testing.assert_allclose(second.w[...], before + 1, rtol=1e-6)
    assert len(traces) == 1
    weights = weakref.ref(first.w[...])
    del first
    gc.collect()
    assert weights() is None
    assert s2._runner.programs() == 1


def test_the_number_of_cached_programs_is_limited(
    s2: dj.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
):
    """64 for users; 6 show the same in less time."""
    monkeypatch.setattr(_cache, "_MAX_PROGRAMS", 6)
    with pytest.warns(UserWarning, match="compiled 5 times"):
        for n in range(8):
            s2.run(lambda: n)  # noqa: B023
    assert s2._runner.programs() == 6


def test_the_error_of_a_module_with_keys_that_cannot_be_sorted_is_raised(s2: dj.MirroredStrategy):
    """The hint about its inputs was an error of JAX instead."""

    class Fails(nnx.Module):
        def __call__(self, inputs: dict[object, jax.Array]) -> None:
            raise KeyError(f"no key {len(inputs)}")

    module = Fails()
    with pytest.raises(KeyError, match="no key 2"):
        s2.run(lambda x: module({1: x, "b": x}), args=(1.0,))


def test_an_error_in_a_step_is_raised_and_leaves_state_unchanged(s2: dj.MirroredStrategy):
    """It was not compiled, so that five times bring no warning of that."""
    model = built(s2)
    before = np.asarray(model.w[...])

    def failing():
        model.w[...] += 1
        raise KeyError("at the user's line")

    for _ in range(5):
        with pytest.raises(KeyError, match="at the user's line") as caught:
            s2.run(failing)
        assert caught.traceback[-1].name == "failing"
    np.testing.assert_array_equal(model.w[...], before)
    assert not dj.has_strategy()
    assert not model.w[...].is_deleted()

    def fine():
        model.w[...] += 1

    s2.run(fine)
    np.testing.assert_allclose(model.w[...], before + 1)


def test_run_under_the_users_transformations_raises(s2: dj.MirroredStrategy):
    model = built(s2)
    step = lambda x: model(x).sum()  # noqa: E731
    under = {
        "jit": lambda: jax.jit(lambda x: s2.run(step, args=(x,)))(jnp.ones((1, 2))),
        "nnx.jit": lambda: nnx.jit(lambda m, x: s2.run(lambda: m(x)))(model, jnp.ones((1, 2))),
        "grad": lambda: jax.grad(lambda x: s2.run(step, args=(x,)))(jnp.ones((1, 2))),
        "vmap": lambda: jax.vmap(lambda x: s2.run(step, args=(x,)))(jnp.ones((3, 1, 2))),
        "scan": lambda: jax.lax.scan(
            lambda c, x: (c, s2.run(step, args=(x,))), 0, jnp.ones((3, 1, 2))
        ),
        "reduce": lambda: jax.jit(lambda x: s2.reduce("mean", x))(1.0),
        "gather": lambda: jax.jit(lambda x: s2.gather(x, axis=0))(jnp.ones(2)),
    }
    for name, call in under.items():
        with pytest.raises(RuntimeError, match="remove the jit around it"):
            call()
        assert isinstance(model.w[...], jax.Array), name
        assert not isinstance(model.w[...], jax.core.Tracer), name


def test_donation_updates_in_place_and_can_be_switched_off(s2: dj.MirroredStrategy):
    model = built(s2)

    def step():
        model.w[...] += 1

    def where() -> int:
        return model.w[...].addressable_data(0).unsafe_buffer_pointer()

    s2.run(step)
    before = where()
    s2.run(step)
    assert where() == before
    s2.run(step, options=dj.RunOptions(donate_state=False))
    assert where() != before


@pytest.mark.parametrize("bad", [{"lowering": "xmap"}, {"verify": "never"}])
def test_run_options_are_validated(bad: dict[str, object]):
    with pytest.raises(ValueError, match="must be one of"):
        dj.RunOptions(**bad)


def test_an_object_that_is_data_in_a_dataclass_works(s2: dj.MirroredStrategy):
    @dataclasses.dataclass
    class Config:
        model: Linear
        scale: float

    config = Config(built(s2), 2.0)

    def step(config: Config):
        config.model.w[...] = config.model.w[...] * config.scale

    before = np.asarray(config.model.w[...])
    s2.run(step, args=(config,))
    np.testing.assert_allclose(config.model.w[...], before * 2)
    config.scale = 3.0
    s2.run(step, args=(config,))
    np.testing.assert_allclose(config.model.w[...], before * 6)


def test_every_lowering_gives_the_same_numbers(strategy: dj.Strategy):
    results = []
    for lowering in ("shard_map", "pmap"):
        model = built(strategy)
        (batch,) = strategy.distribute_dataset([np.arange(16.0).reshape(8, 2)])

        def step(x: jax.Array, model: Linear = model):
            grads = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(model)
            grads = dj.get_replica_context().all_reduce("sum", grads)
            model.w[...] -= 0.001 * grads.w[...]
            return model(x), replica_number()

        out = strategy.run(step, args=(batch,), options=dj.RunOptions(lowering=lowering))
        rows = strategy.gather(out[0], axis=0)
        ids = [float(v) for v in strategy.experimental_local_results(out[1])]
        results.append((np.asarray(model.w[...]), np.asarray(rows), ids))
    for weights, rows, ids in results[1:]:
        np.testing.assert_allclose(weights, results[0][0], rtol=1e-6)
        np.testing.assert_allclose(rows, results[0][1], rtol=1e-6)
        assert ids == results[0][2] == list(range(strategy.num_replicas_in_sync))


@pytest.mark.exhaustive
def test_an_unread_loop_of_two_hundred_steps_ends(s2: dj.MirroredStrategy):
    strategy = dj.MirroredStrategy()
    model = built(strategy)

    def step():
        grads = nnx.grad(lambda m: jnp.sum(m(jnp.ones((64, 2))) ** 2))(model)
        grads = dj.get_replica_context().all_reduce("mean", grads)
        model.w[...] -= 1e-3 * grads.w[...]

    for _ in range(200):
        strategy.run(step)
    assert np.isfinite(np.asarray(model.w[...])).all()


@pytest.mark.exhaustive
def test_a_captured_train_state_of_linen_is_read_at_each_call(s2: dj.MirroredStrategy):
    import flax.linen as nn
    from flax.training.train_state import TrainState

    module = nn.Dense(1)
    with s2.scope():
        params = module.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
        state = TrainState.create(apply_fn=module.apply, params=params, tx=optax.sgd(0.1))
    traces = []

    def predict(x: jax.Array):
        traces.append(1)
        return state.apply_fn({"params": state.params}, x)

    x = jnp.ones((1, 2))
    np.testing.assert_allclose(s2.run(predict, args=(x,)), module.apply({"params": params}, x))
    state = state.replace(params={k: jnp.zeros_like(v) for k, v in params.items()})
    assert float(s2.run(predict, args=(x,)).sum()) == 0.0
    assert len(traces) == 1


def test_arrays_of_the_scope_in_tuples_and_optax_states_are_inputs(s2: dj.MirroredStrategy):
    with s2.scope():
        pair = (jnp.ones(3), {"b": jnp.ones(2)})
        adam = optax.adam(0.1).init({"w": jnp.ones(2)})
    original = pair
    total = lambda: pair[0].sum() + pair[1]["b"].sum() + adam[0].mu["w"].sum()  # noqa: E731
    assert float(s2.run(total)) == 5.0
    assert pair is original
    pair = (pair[0] * 2, pair[1])
    assert float(s2.run(total)) == 8.0
    assert s2._runner.programs() == 1


def test_threads_may_run_steps_on_one_model(s2: dj.MirroredStrategy, s4: dj.MirroredStrategy):
    with s2.scope():
        count = nnx.Variable(jnp.zeros(()))

    def step(scale: float):
        count[...] += scale
        return count[...]

    def work(strategy: dj.Strategy):
        for k in range(10):
            strategy.run(step, args=(1.0,), kwargs=None if k % 2 else {})

    threads = [threading.Thread(target=work, args=(s2,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert float(count[...]) == 30.0


def test_a_model_in_another_module_is_state(s2: dj.MirroredStrategy):
    settings = types.ModuleType("settings")
    settings.model = built(s2)
    settings.unused = object()

    def step():
        settings.model.w[...] += 1

    before = np.asarray(settings.model.w[...])
    s2.run(step)
    s2.run(step)
    np.testing.assert_allclose(settings.model.w[...], before + 2, rtol=1e-6)
    assert s2._runner.programs() == 1


async def coroutine() -> int:
    return 1


@pytest.mark.parametrize("fn", [5, None, "step", coroutine])
def test_a_step_must_be_a_plain_function(s2: dj.MirroredStrategy, fn: object):
    with pytest.raises(ValueError, match=r"strategy\.run\(step, args=\(x, y\)\)"):
        s2.run(fn)


def test_assigning_a_captured_array_is_refused(s2: dj.MirroredStrategy):
    total = jnp.zeros(3)

    def step():
        nonlocal total
        total = total + 1

    before = total
    with pytest.raises(ValueError, match=r"assigned total.*nnx\.Variable"):
        s2.run(step)
    assert total is before


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([None])])
def test_numpy_arguments_that_devices_cannot_hold_are_refused(
    s2: dj.MirroredStrategy, value: object
):
    with pytest.raises(ValueError, match=r"strategy\.run got"):
        s2.run(lambda v: v, args=(value,))


@pytest.mark.parametrize("way", ["arguments", "state", "state and argument"])
def test_nothing_is_donated_twice(s2: dj.MirroredStrategy, way: str):
    """JAX 0.10 crashes the process if a buffer is donated twice."""
    same = jax.device_put(jnp.ones(3), NamedSharding(s2.mesh, PartitionSpec()))
    alias = jax.device_put(same, NamedSharding(s2.mesh, PartitionSpec(None)))
    if way == "arguments":
        options = dj.RunOptions(donate_args=True)
        sums = s2.run(lambda a, b: (a + b, a * b), args=(same, same), options=options)
        assert [x.tolist() for x in sums] == [[2.0] * 3, [1.0] * 3]
        return
    with s2.scope():
        first, second = nnx.Variable(same), nnx.Variable(alias)

    def step(more: jax.Array):
        first[...] += 1
        second[...] += more

    more = same if way == "state and argument" else 2 * same
    wanted = 2.0 if way == "state and argument" else 3.0
    s2.run(step, args=(more,))
    assert first[...].tolist() == [2.0] * 3
    assert second[...].tolist() == [wanted] * 3


@pytest.mark.filterwarnings("ignore:2 variables were made outside")
@pytest.mark.parametrize(
    ("kind", "device"),
    [(dj.MirroredStrategy, 0), (dj.MirroredStrategy, 1), (dj.CentralStorageStrategy, 0)],
)
def test_an_array_from_outside_the_scope_is_not_donated(kind: type[dj.Strategy], device: int):
    strategy = kind([0, 1])
    array = jax.device_put(jnp.ones(3), jax.devices()[device])
    first, second = nnx.Variable(array), nnx.Variable(array)

    def step():
        first[...] += 1
        second[...] += 2

    strategy.run(step)
    strategy.run(step)
    assert (first[...].tolist(), second[...].tolist()) == ([3.0] * 3, [5.0] * 3)
    assert array.tolist() == [1.0] * 3
    first.set_value(array)
    second.set_value(jax.device_put(array, NamedSharding(strategy.mesh, PartitionSpec())))
    strategy.run(step)
    assert (first[...].tolist(), second[...].tolist()) == ([2.0] * 3, [3.0] * 3)
    same, options = jnp.ones(3), dj.RunOptions(donate_args=True)
    sums = strategy.run(lambda a, b: (a + b, a * b), args=(same, same), options=options)
    assert [x.tolist() for x in sums] == [[2.0] * 3, [1.0] * 3]


def test_a_model_of_another_strategy_is_refused_until_it_is_moved(
    s2: dj.MirroredStrategy, s4: dj.MirroredStrategy
):
    model = built(s4)
    x = np.ones((1, 2), np.float32)
    for other in (s2, dj.OneDeviceStrategy(0)):
        with pytest.raises(dj.MixedStrategiesError, match=r"model\.w: stored on .*cpu:3") as caught:
            other.run(lambda: model(x))
        assert isinstance(caught.value, RuntimeError)
        assert str(other.mesh.devices.flat[-1]) in str(caught.value)
    moved = jax.device_put(nnx.state(model), NamedSharding(s2.mesh, PartitionSpec()))
    nnx.update(model, moved)
    assert s2.run(lambda: model(x)).shape[0] == 1


def test_a_model_of_an_equal_mesh_is_accepted(s2: dj.MirroredStrategy):
    model = built(dj.MirroredStrategy([0, 1]))
    assert s2.run(lambda: model(np.ones((1, 2), np.float32))).shape[0] == 1


def test_disabled_jit_is_refused(s2: dj.MirroredStrategy):
    value = s2.run(replica_number)
    with jax.disable_jit():
        for call in (lambda: s2.run(replica_number), lambda: s2.gather(value, axis=0)):
            with pytest.raises(RuntimeError, match=r"Remove jax\.disable_jit.*jax\.debug\.print"):
                call()


@pytest.mark.parametrize("lowering", ["shard_map", "pmap"])
def test_ordered_effects_are_refused_on_several_replicas(s2: dj.MirroredStrategy, lowering: str):
    def step(x: jax.Array | None = None):
        jax.debug.print("hello {}", x, ordered=True)

    options = dj.RunOptions(lowering=lowering)
    (x,) = s2.distribute_dataset([np.ones(4, np.float32)])
    for args in ((), (x,)) if lowering == "shard_map" else ((x,),):
        with pytest.raises(ValueError, match=r"step prints or calls back.*\n.*OneDeviceStrategy"):
            s2.run(step, args=args, options=options)
    dj.OneDeviceStrategy(0).run(step)


@pytest.mark.parametrize("donate", [True, False])
def test_debug_nans_names_the_step(s2: dj.MirroredStrategy, donate: bool):
    with s2.scope():
        weight = nnx.Variable(jnp.ones(3))

    def step(x: float):
        weight[...] = jnp.log(x) * weight[...]

    options = dj.RunOptions(donate_state=donate)
    s2.run(step, args=(2.0,), options=options)
    with jax.debug_nans(True):
        s2.run(step, args=(2.0,), options=options)
        with pytest.raises(FloatingPointError, match=r"step computed a nan") as caught:
            s2.run(step, args=(-1.0,), options=options)
    assert "without strategy.run" in str(caught.value)
    if not donate:
        assert "as before the call" in str(caught.value)
        np.testing.assert_allclose(weight[...], np.log(2) ** 2, rtol=1e-5)


def test_masked_arrays_are_refused(s2: dj.MirroredStrategy):
    masked = np.ma.masked_array(np.ones(4, np.float32), mask=[0, 1, 0, 0])
    with pytest.raises(ValueError, match=r"array\.filled\(0\)"):
        s2.run(lambda x: x, args=(masked,))
    with pytest.raises(ValueError, match=r"array\.filled\(0\)"):
        next(iter(s2.distribute_dataset([masked])))


def test_a_metric_that_is_reset_and_updated_in_one_step_is_explained(s2: dj.MirroredStrategy):
    with s2.scope():
        metric = nnx.metrics.Average()

    def step(x: jax.Array, *, reset: bool):
        if reset:
            metric.reset()
        metric.update(values=x)

    (x,) = s2.distribute_dataset([np.arange(4.0)])
    with pytest.raises(
        dj.OutOfSyncError, match=r"metric\.total.*\n.*outside of run, metric\.reset\(\)"
    ) as caught:
        s2.run(step, args=(x,), kwargs={"reset": True})
    assert "gradients" not in str(caught.value)
    s2.run(step, args=(x,), kwargs={"reset": False})
    s2.run(metric.reset)
    s2.run(step, args=(x,), kwargs={"reset": False})
    assert float(metric.compute()) == 1.5


def test_a_merged_module_inside_a_scan_must_be_copied(s2: dj.MirroredStrategy):
    model = built(s2)
    graphdef, state = nnx.split(model)

    def step(x: jax.Array, *, copy: bool):
        def body(total: jax.Array, _: None):
            merged = nnx.merge(graphdef, state, copy=copy)
            grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(merged)
            return total + jnp.sum(jax.tree.leaves(grads)[0]), None

        return jax.lax.scan(body, jnp.zeros(()), None, length=2)[0]

    (x,) = s2.distribute_dataset([np.ones((4, 2), np.float32)])
    with pytest.raises(ValueError, match=r"nnx\.merge\(graphdef, state, copy=True\)"):
        s2.run(step, args=(x,), kwargs={"copy": False})
    assert np.isfinite(float(s2.reduce("sum", s2.run(step, args=(x,), kwargs={"copy": True}))))
