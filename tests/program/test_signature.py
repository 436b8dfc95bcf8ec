"""Which calls of a step share one compiled program, and which must not."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj

pytestmark = pytest.mark.filterwarnings("ignore:.*was compiled 5 times")


def _described(*values: Any) -> jax.Array:
    """Returns a number that depends on the position, the kind and the numbers of each value."""
    total = jnp.zeros(())
    for place, value in enumerate(values, 1):
        if value is None:
            number: Any = 0.25
        elif isinstance(value, str):
            number = float(len(value))
        elif isinstance(value, bool):
            number = 100.0 if value else 200.0
        elif isinstance(value, nnx.Linear):
            number = value.kernel.sum() + 1000.0
        elif isinstance(value, nnx.Variable):
            number = value[...].sum() + 2000.0
        elif isinstance(value, dict):
            number = value["a"].sum() - value["b"].sum()
        else:
            number = jnp.sum(value) + 3000.0 * jnp.ndim(value)
        total = total + 10.0**place * number
    return total


KINDS = (
    "module", "variable", "array", "numpy array", "number", "int", "bool", "none", "text", "dict",
)  # fmt: skip


def _kinds() -> dict[str, Any]:
    return {
        "module": nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        "variable": nnx.Param(jnp.full((2, 2), 3.0)),
        "array": jnp.arange(3.0),
        "numpy array": np.arange(3.0, dtype=np.float32) + 1,
        "number": 2.5,
        "int": 7,
        "bool": True,
        "none": None,
        "text": "text",
        "dict": {"a": jnp.ones(2), "b": jnp.full(3, 2.0)},
    }


def _batch(strategy: dj.Strategy) -> Any:
    (batch,) = strategy.distribute_dataset([np.full((8, 2), 0.5, np.float32)])
    return batch


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("names", "number"),
    [(("module", "variable", "array", "number", "none"), 2), (KINDS, 2), (KINDS, 3)],
)
def test_arguments_may_change_places_from_call_to_call(s4: dj.Strategy, names: Any, number: int):
    with s4.scope():
        kinds = _kinds()

    def step(*values: Any) -> jax.Array:
        return _described(*values)

    for chosen in itertools.permutations(names, number):
        values = [kinds[name] for name in chosen]
        result = s4.run(step, args=tuple(values))
        np.testing.assert_allclose(result, _described(*values), rtol=1e-5, err_msg=str(chosen))


def test_a_batch_and_a_module_may_change_places(strategy: dj.Strategy):
    with strategy.scope():
        scale = nnx.Param(jnp.full((), 3.0))
    batch = _batch(strategy)

    def step(a: Any, b: Any) -> jax.Array:
        first = jnp.sum(a[...])
        return dj.get_replica_context().all_reduce("sum", first - 10.0 * jnp.sum(b[...]))

    replicas = strategy.num_replicas_in_sync
    assert float(strategy.run(step, args=(batch, scale))) == 8.0 - replicas * 30.0
    assert float(strategy.run(step, args=(scale, batch))) == replicas * 3.0 - 80.0
    assert float(strategy.run(step, args=(batch, scale))) == 8.0 - replicas * 30.0


@pytest.mark.exhaustive
def test_an_argument_may_be_a_module_once_and_left_out_the_next_time(strategy: dj.Strategy):
    with strategy.scope():
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 2))

    def step(x: jax.Array, m: nnx.Linear | None = None) -> jax.Array:
        return jnp.sum(x if m is None else m(x))

    with_model = float(model(x).sum())
    for _ in range(2):
        np.testing.assert_allclose(strategy.run(step, args=(x, model)), with_model, rtol=1e-6)
        assert float(strategy.run(step, args=(x,))) == 2.0
        assert float(strategy.run(step, args=(x, None))) == 2.0
        np.testing.assert_allclose(
            strategy.run(step, args=(x,), kwargs={"m": model}), with_model, rtol=1e-6
        )


def test_a_weakly_typed_array_is_another_call(s4: dj.Strategy):
    """The result has another dtype, as under ``jax.jit``."""
    half = jnp.ones(3, jnp.bfloat16)
    weak, strong = jnp.full(3, 2.0), jnp.full(3, 2.0, jnp.float32)

    def step(x: jax.Array) -> jax.Array:
        return x * half

    for x in (weak, weak, weak, strong, strong, strong, weak):
        assert s4.run(step, args=(x,)).dtype == jax.jit(step)(x).dtype


FLAGS: dict[str, tuple[Any, Any]] = {
    "jax_threefry_partitionable": (True, False),
    "jax_default_prng_impl": ("threefry2x32", "rbg"),
    "jax_random_seed_offset": (0, 5),
    "jax_default_matmul_precision": (None, "bfloat16"),
    "jax_enable_x64": (False, True),
}


def _equal_step(held: list[nnx.Variable[jax.Array]]) -> Any:
    """Returns a function that makes a new step with a new object, equal to those of the step before."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        rate: float

    def step(config: Config, x: float) -> None:
        held[0][...] += config.rate * x

    return lambda: functools.partial(step, Config(0.5))


def test_calls_with_new_equal_objects_do_not_accumulate_entries(s2: dj.Strategy):
    with s2.scope():
        count = nnx.Variable(jnp.zeros(()))
    make = _equal_step([count])
    for _ in range(60):
        s2.run(make(), args=(1.0,))
    runner = s2._runner
    assert float(count[...]) == 30.0
    assert [len(program.owners) for program in runner.cache.programs.values()] == [1]
    assert sum(len(entries) for entries in runner.cache._bound.values()) == 1


@pytest.mark.exhaustive
def test_memory_and_time_of_a_hundred_thousand_such_calls_are_constant(s2: dj.Strategy):
    with s2.scope():
        count = nnx.Variable(jnp.zeros(()))
    make = _equal_step([count])
    seconds, kilobytes = [], []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(10_000):
            s2.run(make(), args=(1.0,))
        seconds.append(time.perf_counter() - start)
        kilobytes.append(_resident_kilobytes())
    assert float(count[...]) == 50_000.0
    assert kilobytes[-1] - kilobytes[1] < 4_000, kilobytes
    assert min(seconds[-3:]) < 2 * max(seconds[:3]), seconds


def _resident_kilobytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_of_jax_that_a_trace_depends_on_is_part_of_the_key(s2: dj.Strategy, flag: str):
    x = np.linspace(0.1, 1.7, 6, dtype=np.float32).reshape(2, 3)

    def step(x: jax.Array) -> jax.Array:
        drawn = jax.random.uniform(jax.random.key(0), (2,)).sum()
        return jnp.sum(x @ x.T) + drawn.astype(jnp.result_type(float))

    before, x = getattr(jax.config, flag), jax.device_put(x)
    results, expected = [], []
    try:
        for value in FLAGS[flag]:
            jax.config.update(flag, value)
            for _ in range(3):  # calls that repeat the last one are not classified
                result = s2.run(step, args=(x,))
            results.append(result)
            expected.append(jax.jit(lambda x: step(x))(x))
    finally:
        jax.config.update(flag, before)
    assert [r.dtype for r in results] == [e.dtype for e in expected]
    np.testing.assert_allclose(results, expected, rtol=1e-6)


def test_the_rule_of_rank_promotion_is_part_of_the_key(s2: dj.Strategy):
    def step(x: jax.Array) -> jax.Array:
        return x + jnp.ones((2, 3))

    for _ in range(3):
        s2.run(step, args=(jnp.ones(3),))
    with jax.numpy_rank_promotion("raise"), pytest.raises(Exception, match="rank_promotion"):
        s2.run(step, args=(jnp.ones(3),))


def test_calls_within_and_outside_of_scope_share_a_program(s2: dj.Strategy):
    traces = []

    def step(x: jax.Array) -> jax.Array:
        traces.append(1)
        return x + 1

    s2.run(step, args=(jnp.ones(3),))
    with s2.scope():
        s2.run(step, args=(jnp.ones(3),))
    assert len(traces) == 1


ONES = jnp.ones((3, 2))
OTHER_CALLS: dict[str, tuple[Any, Any]] = {
    "another shape": ({"x": jnp.ones((4, 3)), "y": ONES[:1]}, 2.0),
    "another dtype": ({"x": ONES.astype(jnp.int32), "y": ONES}, 2.0),
    "an array of NumPy": ({"x": np.ones((2, 3), np.float32), "y": ONES}, 2.0),
    "a Python number": ({"x": 1.0, "y": ONES}, 2.0),
    "other keys": ({"y": ONES, "z": ONES}, 2.0),
    "one leaf less": ({"y": ONES}, 2.0),
    "a tuple": ((ONES, ONES), 2.0),
    "a bool": ({"x": True, "y": ONES}, 2.0),
    "another array": ({"x": ONES, "y": ONES}, jnp.full((), 3.0)),
}


@pytest.mark.parametrize("change", OTHER_CALLS)
def test_a_call_that_differs_from_the_last_ones_has_the_result_of_its_arguments(
    s2: dj.Strategy, change: str
):
    def step(tree: Any, scale: Any) -> jax.Array:
        pairs = sorted(tree.items()) if isinstance(tree, dict) else [("", x) for x in tree]
        values = [value for pair in pairs for value in pair]
        whole = sum(jnp.issubdtype(jnp.result_type(x), jnp.integer) for x in values[1::2])
        return (_described(*values, scale) + whole) * scale

    first = ({"x": ONES, "y": ONES}, jnp.full((), 2.0))
    for args in (first, first, first, OTHER_CALLS[change], first):
        np.testing.assert_allclose(s2.run(step, args=args), step(*args), rtol=1e-6)


def test_a_full_batch_after_full_batches_is_not_classified_and_a_partial_one_is(s2: dj.Strategy):
    """The padding of the partial batch does not count."""
    batches = list(s2.distribute_dataset([np.ones(4, np.float32)] * 3 + [np.ones(3, np.float32)]))
    entered: list[str] = []
    key = jax.random.key(0)

    def step(x: jax.Array, key: jax.Array) -> jax.Array:
        ones = jnp.where(jax.random.uniform(key) < 2, x, 0)
        return dj.get_replica_context().all_reduce("sum", dj.compute_average_loss(ones))

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    results, classified = [], []
    for batch in [*batches[:3], batches[2], batches[3]]:
        entered.clear()
        sys.setprofile(profile)
        try:
            results.append(float(s2.run(step, args=(batch, key))))
        finally:
            sys.setprofile(None)
        classified.append("flatten_arguments" in entered)
    assert classified == [True, True, False, False, True]
    assert results == [1.0] * 5


def test_a_tracer_that_has_left_its_trace_is_refused_as_an_argument(s2: dj.Strategy):
    """Also by a step whose last calls had an array there, so that only the values differ."""
    kept: list[jax.Array] = []
    jax.jit(kept.append)(jnp.ones(3))
    for _ in range(2):
        s2.run(_described, args=(jnp.ones(3),))
    with pytest.raises(dj.ArgumentError, match=r"float32\[3\] .*Return it from there"):
        s2.run(_described, args=tuple(kept))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_a_batch_of_64_bits_is_refused_once_64_bits_are_off(s2: dj.MirroredStrategy):
    """The error is one of the library, says why, and later calls work."""
    total = lambda x: x.sum()  # noqa: E731
    with jax.enable_x64(True):
        (wide,) = s2.distribute_dataset([np.arange(4.0)])
        s2.run(total, args=(wide,))
    with pytest.raises(dj.ArgumentError, match="64 bits"):
        s2.run(total, args=(wide,))
    (batch,) = s2.distribute_dataset([np.arange(4.0)])
    assert s2.reduce("sum", s2.run(total, args=(batch,))) == 6.0
