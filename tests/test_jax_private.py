"""Each entry of ``_jax_private.py`` works as described with the installed JAX and Flax."""

from __future__ import annotations

import importlib
import inspect
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from distribute_jax import _jax_private


@contextmanager
def naming_versions(entry: str, owner: str) -> Iterator[None]:
    """Lets a failure name the version that moved what an entry uses."""
    try:
        yield
    except Exception as error:
        versions = {
            "JAX": jax.__version__,
            "Flax": flax.__version__,
            "Python": platform.python_version(),
        }
        pytest.fail(
            f"{owner} {versions[owner]} moved what _jax_private.{entry} uses (installed: JAX "
            f"{jax.__version__}, Flax {flax.__version__}): {type(error).__name__}: {error}"
        )


def test_a_moved_name_fails_with_the_version_that_moved_it() -> None:
    with (
        pytest.raises(pytest.fail.Exception, match=f"Flax {flax.__version__} moved .*read_raw"),
        naming_versions("read_raw", "Flax"),
    ):
        nnx.Param(jnp.ones(2))._no_such_name  # noqa: B018


def test_every_entry_has_a_test_here() -> None:
    entries = [
        name
        for name, value in vars(_jax_private).items()
        if inspect.isfunction(value)
        and value.__module__ == _jax_private.__name__
        and not name.startswith("_")
    ]
    tested = {name for name in globals() if name.startswith("test_")}
    assert [e for e in entries if not any(t.startswith(f"test_{e}_") for t in tested)] == []


def test_read_metadata_returns_the_dict_that_set_metadata_changes() -> None:
    with naming_versions("read_metadata", "Flax"):
        variable = nnx.Param(jnp.ones(2), rate=1)
        [table] = _jax_private.read_metadata([variable])
        variable.set_metadata(rate=2)
        assert table["rate"] == 2
        variable.set_metadata({"rate": 3})
        assert _jax_private.read_metadata([variable])[0]["rate"] == 3


def test_metadata_entries_counts_what_set_metadata_adds() -> None:
    with naming_versions("metadata_entries", "Flax"):
        variables = [nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2), rate=1)]
        before = _jax_private.metadata_entries(variables)
        variables[0].set_metadata(rate=2)
        assert _jax_private.metadata_entries(variables) == before + 1


class Doubling(nnx.Variable[jax.Array]):
    """A variable with hooks that double the value on reading and on writing."""

    def get_value(self, **_: object) -> jax.Array:
        return super().get_value() * 2

    def set_value(self, value: jax.Array, **_: object) -> None:
        super().set_value(value * 2)


def test_read_raw_returns_the_array_without_hooks() -> None:
    with naming_versions("read_raw", "Flax"):
        plain, doubling = nnx.Param(jnp.ones(2)), Doubling(jnp.ones(2))
        raws = _jax_private.read_raw([plain, doubling])
        assert raws[0] is plain.get_raw_value()
        assert raws[1] is doubling.get_raw_value()
        np.testing.assert_array_equal(raws[1], [1.0, 1.0])


def test_write_raw_stores_the_array_without_hooks() -> None:
    with naming_versions("write_raw", "Flax"):
        plain, doubling = nnx.Param(jnp.zeros(2)), Doubling(jnp.zeros(2))
        new = [jnp.ones(2), jnp.full(2, 3.0)]
        _jax_private.write_raw([plain, doubling], new)
        assert plain.get_raw_value() is new[0]
        assert doubling.get_raw_value() is new[1]
        np.testing.assert_array_equal(plain[...], [1.0, 1.0])


def test_at_top_level_is_false_under_every_transformation() -> None:
    seen: list[bool] = []

    def note(x: jax.Array) -> jax.Array:
        seen.append(_jax_private.at_top_level())
        return x * 1.0

    with naming_versions("at_top_level", "JAX"):
        assert _jax_private.at_top_level()
        jax.jit(note)(1.0)
        jax.grad(note)(1.0)
        jax.vmap(note)(jnp.ones(2))
        jax.lax.scan(lambda carry, _: (note(carry), None), 1.0, None, length=2)
        nnx.jit(note)(jnp.ones(()))
        assert seen
        assert not any(seen)
        assert _jax_private.at_top_level()


class Counter(nnx.Module):
    def __init__(self) -> None:
        self.count = nnx.Variable(jnp.zeros(()))
        self.last = 0

    def add(self) -> None:
        self.count[...] += 1.0
        self.last = 1


def test_owned_by_current_trace_is_needed() -> None:
    counter = Counter()
    with naming_versions("owned_by_current_trace", "Flax"):
        with pytest.raises(flax.errors.TraceContextError):
            jax.make_jaxpr(lambda x: counter.add() or x)(1.0)
        assert counter.last == 0


def test_owned_by_current_trace_lets_a_step_write_and_restores_the_owner() -> None:
    counter = Counter()
    raw = counter.count.get_raw_value()

    def step(x: jax.Array) -> jax.Array:
        with _jax_private.owned_by_current_trace([counter.count], [counter]):
            _jax_private.write_raw([counter.count], [x])
            counter.add()
            new = counter.count[...]
            _jax_private.write_raw([counter.count], [raw])
        return new

    with naming_versions("owned_by_current_trace", "Flax"):
        assert float(jax.jit(step)(2.0)) == 3.0
        assert counter.count.get_raw_value() is raw
        counter.add()
        assert float(counter.count[...]) == 1.0


def test_adopt_lets_code_outside_write_to_variables_of_a_trace() -> None:
    made: list[nnx.Variable[jax.Array]] = []
    jax.make_jaxpr(lambda x: made.append(nnx.Param(x)) or x)(1.0)
    _jax_private.write_raw(made, [jnp.ones(())])
    with naming_versions("adopt", "Flax"):
        with pytest.raises(flax.errors.TraceContextError):
            made[0][...] = jnp.zeros(())
        _jax_private.adopt(made)
        made[0][...] = jnp.full((), 2.0)
        assert float(made[0][...]) == 2.0


def test_hidden_attributes_are_all_that_flax_adds_to_a_module() -> None:
    with naming_versions("HIDDEN_ATTRIBUTES", "Flax"):
        assert set(vars(Counter())) - {"count", "last"} == set(_jax_private.HIDDEN_ATTRIBUTES)


def test_uncommitted_moves_no_data_and_mixes_with_arrays_on_other_devices() -> None:
    there = jax.device_put(jnp.ones(2), jax.devices()[3])
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(jnp.ones(2), jax.sharding.NamedSharding(mesh, jax.P("data")))
    with naming_versions("uncommitted", "JAX"):
        with pytest.raises(ValueError, match="devices"):
            there + spread
        free = _jax_private.uncommitted(there)
        assert free.unsafe_buffer_pointer() == there.unsafe_buffer_pointer()
        np.testing.assert_array_equal(free + spread, [2.0, 2.0])
        np.testing.assert_array_equal(free + jax.device_put(jnp.ones(2), jax.devices()[5]), 2.0)


@pytest.mark.parametrize("devices", [1, 4])
def test_deleted_arrays_crash_is_false_only_if_jax_raises(devices: int) -> None:
    """JAX then refuses the donated array before it takes the other inputs."""
    if _jax_private.deleted_arrays_crash(devices):
        assert devices > 1
        assert jax.__version_info__ < (0, 12), "a version known to raise is asked at every step"
        return
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    first, second = (jax.device_put(np.ones(4), whole) for _ in range(2))
    step = jax.jit(lambda a, b: (a + 1, b * 2), donate_argnums=(0, 1))
    compiled = step.lower(first, second).compile()
    jax.jit(jnp.exp, donate_argnums=0)(second)
    assert second.is_deleted()
    with naming_versions("deleted_arrays_crash", "JAX"), pytest.raises((RuntimeError, ValueError)):
        compiled(first, second)
    assert not first.is_deleted()


AT_EXIT = f"""
import atexit, threading
import concurrent.futures.thread
from collections.abc import Callable
{inspect.getsource(_jax_private.before_exit)}
from concurrent.futures import ThreadPoolExecutor
def work():
    with ThreadPoolExecutor() as pool:
        print(pool.submit(lambda: "worked in another thread").result())
before_exit(work)
"""


def test_before_exit_runs_while_threads_may_start() -> None:
    with naming_versions("before_exit", "Python"):
        done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
        assert done.stdout == "worked in another thread\n", done.stderr


@pytest.mark.exhaustive
def test_backend_is_started_is_true_once_a_device_was_used() -> None:
    jnp.ones(1)
    with naming_versions("backend_is_started", "JAX"):
        assert _jax_private.backend_is_started() is True
        code = "from distribute_jax import _jax_private; print(_jax_private.backend_is_started())"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "False"


def test_coordination_client_is_none_in_a_single_process() -> None:
    _jax = importlib.import_module("jax._src.lib")._jax
    with naming_versions("coordination_client", "JAX"):
        assert _jax_private.coordination_client() is None
        methods = dir(_jax.DistributedRuntimeClient)
    needed = {"key_value_set", "blocking_key_value_get", "key_value_dir_get", "key_value_delete"}
    assert needed <= set(methods)


def test_trace_settings_differ_where_jit_traces_again() -> None:
    with naming_versions("trace_settings", "JAX"):
        usual = _jax_private.trace_settings()
        for context in (
            jax.enable_x64(True),
            jax.numpy_rank_promotion("raise"),
            jax.default_matmul_precision("bfloat16"),
            jax.numpy_dtype_promotion("strict"),
            jax.threefry_partitionable(False),
        ):
            with context:
                assert _jax_private.trace_settings() != usual
        assert _jax_private.trace_settings() == usual


def test_trace_settings_do_not_depend_on_the_mesh() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with naming_versions("trace_settings", "JAX"):
        usual = _jax_private.trace_settings()
        with jax.set_mesh(mesh):
            assert _jax_private.trace_settings() == usual


def test_last_settings_is_one_object_until_a_setting_changes() -> None:
    with naming_versions("last_settings", "JAX"):
        _jax_private.trace_settings()
        before = _jax_private.last_settings()
        _jax_private.trace_settings()
        assert _jax_private.last_settings() is before
        with jax.numpy_rank_promotion("raise"):
            _jax_private.trace_settings()
            assert _jax_private.last_settings() is not before


def test_call_in_c_runs_a_compiled_program_without_python() -> None:
    compiled = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile()
    with naming_versions("call_in_c", "JAX"):
        compiled(jnp.ones(3))
        call = _jax_private.call_in_c(compiled)
        assert call is not None
        frames: list[str] = []
        x = jnp.ones(3)
        call(x)
        sys.setprofile(lambda frame, event, _: frames.append(event))
        result = call(x)
        sys.setprofile(None)
        assert "call" not in frames, frames
        np.testing.assert_array_equal(result, 2.0)


def test_array_is_the_type_of_arrays_but_not_of_tracers_or_keys() -> None:
    with naming_versions("ARRAY", "JAX"):
        assert type(jnp.ones(3)) is _jax_private.ARRAY
        assert type(jax.random.key(0)) is not _jax_private.ARRAY
        jax.jit(lambda x: None if type(x) is not _jax_private.ARRAY else 1 / 0)(1.0)


def test_note_all_notes_on_arrays_and_random_keys() -> None:
    arrays = [jnp.ones(2), jax.random.key(0)]
    with naming_versions("note_all", "JAX"):
        _jax_private.note_all(arrays, "_test_note", "text")
    assert [_jax_private.note_on(array, "_test_note") for array in arrays] == ["text", "text"]


def test_note_on_a_copy_or_a_variable_finds_no_note() -> None:
    array = jnp.ones(2)
    _jax_private.note_all([array], "_test_note", "text")
    for other in (jnp.copy(array), jnp.zeros_like(array), nnx.Variable(array), 2.0):
        assert _jax_private.note_on(other, "_test_note") is _jax_private.UNNOTED


def test_is_high_is_true_of_hi_primitives() -> None:
    numbers = jnp.arange(4.0)
    with naming_versions("is_high", "JAX"):
        assert not _jax_private.is_high(jax.make_jaxpr(jnp.sin)(numbers))
        high = _jax_private.is_high(jax.make_jaxpr(jnp.searchsorted)(numbers, numbers))
        assert high == (jax.__version_info__ >= (0, 12))


def test_without_layout_check_accepts_packed_arrays() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.P("data"))
    host = np.arange(4).astype(jnp.int4)
    array = jax.make_array_from_callback((4,), split, lambda index: np.array(host[index]))
    jitted = jax.jit(lambda x: [x + x], in_shardings=split, out_shardings=[split])
    with naming_versions("without_layout_check", "JAX"):
        compiled = jitted.lower(array).compile()
        (result,) = _jax_private.without_layout_check(compiled, [array])(array)
        np.testing.assert_array_equal(result, host + host)
        assert _jax_private.without_layout_check(compiled, [jnp.ones(3)]) is compiled
