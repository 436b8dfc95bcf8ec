"""``reduce``, ``gather`` and local results: TensorFlow's values, and exact for unequal shares."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long
from leaves import replica_number

import distribute_jax as dj
from distribute_jax import _errors
from tests.collectives.algorithms import on_replicas as per_replica


@pytest.mark.parametrize("op", ["MAX", "", None, 3])
def test_another_operation_is_refused(s4: dj.MirroredStrategy, op: object):
    rule = "'sum' or 'mean'; a maximum is that of .*all_gather" if op == "MAX" else "one of 'sum'"
    with pytest.raises(ValueError, match=f"reduce_op, the first argument, must be {rule}"):
        s4.reduce(op, s4.run(replica_number), axis=None)


@pytest.mark.parametrize(
    ("parts", "op", "axis", "wanted"),
    [
        ([[1.0, 2.0], [1.0, 2.0]], "sum", 0, 6.0),
        ([[1.0, 2.0], [1.0, 2.0]], "mean", 0, 1.5),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], "sum", None, [4, 6, 8, 10]),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], "mean", None, [2.0, 3.0, 4.0, 5.0]),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], "sum", 0, 28),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], "mean", 0, 3.5),
        ([[1, 2, 4], [4]], "mean", 0, 2.75),
        ([[1, 2, 4], [4]], "sum", 0, 11),
        ([[1, 2, 4], []], "mean", 0, 7 / 3),
        ([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]], "sum", 1, [14.0, 22.0]),
        ([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]], "sum", -1, [14.0, 22.0]),
        ([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]], "mean", (0, 1), 4.5),
        ([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]], "mean", [0], [4.0, 5.0]),
        ([2.0, 4.0], "mean", None, 3.0),
    ],
)
def test_reduce_of_host_made_values(
    s2: dj.MirroredStrategy, parts: list[object], op: str, axis: object, wanted: object
):
    arrays = [np.asarray(p, np.int32 if _is_int(parts) else np.float32) for p in parts]
    result = s2.reduce(op, per_replica(s2, arrays), axis=axis)
    np.testing.assert_allclose(result, wanted, rtol=1e-7)


def _is_int(parts: list[object]) -> bool:
    return all(np.asarray(p).dtype.kind == "i" or np.asarray(p).size == 0 for p in parts)


@pytest.mark.parametrize(
    ("n", "counts"),
    [(8, (2, 2, 2, 2)), (5, (2, 2, 1, 0)), long(6, (2, 2, 2, 0)), long(1, (1, 0, 0, 0))],
)
def test_padding_is_excluded_everywhere(s4: dj.MirroredStrategy, n: int, counts: tuple[int, ...]):
    rows = np.arange(2 * n, dtype=np.float32).reshape(n, 2) + 1
    _, batch = s4.distribute_dataset([np.zeros((8, 2), np.float32), rows])
    assert float(s4.reduce("sum", batch, axis=(0, 1))) == rows.sum()
    np.testing.assert_allclose(s4.reduce("mean", batch, axis=0), rows.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(s4.gather(batch, axis=0), rows)
    assert [len(x) for x in s4.experimental_local_results(batch)] == list(counts)
    result = s4.run(lambda x: x * 2, args=(batch,))
    np.testing.assert_array_equal(s4.gather(result, axis=0), 2 * rows)
    assert float(s4.reduce("sum", result, axis=(0, 1))) == 2 * rows.sum()


@pytest.mark.parametrize(
    ("axis", "cure"),
    [(1, r"axis=\(0, 1\)"), (-1, r"axis=\(0, 1\)"), (None, "axis=0"), ((1,), "axis=")],
)
def test_the_message_says_which_axis_to_pass(s2: dj.MirroredStrategy, axis: object, cure: str):
    value = per_replica(s2, [np.ones((1, 2)), np.ones((2, 2))])
    given = axis[0] if isinstance(axis, tuple) else axis
    with pytest.raises(ValueError, match=rf"reduce\(axis={given}\).*differs too \({cure}"):
        s2.reduce("sum", value, axis=axis)
    other = per_replica(s2, [np.ones((2, 1)), np.ones((2, 2))])
    with pytest.raises(ValueError, match=r"differs too \(axis=1\).*gather\(value, axis=1\)"):
        s2.reduce("sum", other)
    with pytest.raises(ValueError, match="not even as many dims"):
        s2.reduce("sum", per_replica(s2, [np.ones(2), np.ones((2, 2))]))


@pytest.mark.exhaustive
def test_random_keys_are_shown_and_gathered_but_not_reduced(s2: dj.MirroredStrategy):
    def keys():
        replica = dj.get_replica_context().replica_id_in_sync_group
        return jax.random.split(jax.random.fold_in(jax.random.key(0), replica))

    value = s2.run(keys)
    made = s2.experimental_distribute_values_from_function(
        lambda c: jax.random.split(
            jax.random.fold_in(jax.random.key(0), c.replica_id_in_sync_group)
        )
    )
    wanted = [jax.random.split(jax.random.fold_in(jax.random.key(0), i)) for i in range(2)]
    for both in (value, made):
        assert "unreadable" not in repr(both)
        for part, key in zip(s2.experimental_local_results(both), wanted, strict=True):
            assert jnp.array_equal(part, key)
        assert jnp.array_equal(s2.gather(both, axis=0), jnp.concatenate(wanted))
        with pytest.raises(ValueError, match="random keys, which have no sum"):
            s2.reduce("sum", both)
    drawn = s2.run(lambda keys: jax.random.normal(keys[0]), args=(made,))
    local = s2.experimental_local_results(drawn)
    np.testing.assert_allclose(local, [jax.random.normal(keys[0]) for keys in wanted], rtol=1e-6)


@pytest.mark.parametrize("axis", [1, -1, None, 0])
def test_a_result_with_padding_in_another_dim_is_not_reduced(s2: dj.MirroredStrategy, axis: Any):
    (batch,) = s2.distribute_dataset([np.ones((3, 2), np.float32)])
    columns = s2.run(jnp.transpose, args=(batch,))  # axis=1 counted the padding as a fourth example
    with pytest.raises(dj.PerReplicaError, match="not known which rows"):
        s2.reduce("sum", columns, axis=axis)


def test_a_wrong_axis_raises(s2: dj.MirroredStrategy):
    with pytest.raises(ValueError, match="does not have that dim"):
        s2.reduce("sum", s2.run(replica_number), axis=0)
    with pytest.raises(ValueError, match="twice"):
        s2.reduce("sum", per_replica(s2, [np.ones((2, 2))] * 2), axis=(0, -2))
    with pytest.raises(ValueError, match="axis must be None, an int"):
        s2.reduce("sum", s2.run(replica_number), axis="0")


def test_a_host_value_has_a_mean_but_no_sum(s2: dj.MirroredStrategy):
    assert float(s2.reduce("mean", jnp.array(3.0), axis=None)) == 3.0
    for value in (jnp.array(3.0), 3.0, np.float32(3)):
        with pytest.raises(ValueError, match="A non-DistributedValues value"):
            s2.reduce("sum", value, axis=None)
    with s2.scope(), pytest.raises(ValueError, match="A non-DistributedValues value"):
        s2.reduce("sum", jnp.array(3.0), axis=None)


@pytest.mark.parametrize("zero", [0, 0.0, np.int32(0)])
def test_the_sum_of_a_host_zero_is_zero(s2: dj.MirroredStrategy, zero: object):
    assert float(s2.reduce("sum", zero, axis=None)) == 0.0


def test_a_mirrored_result_counts_once_for_each_replica(s4: dj.MirroredStrategy):
    same = s4.run(lambda: jnp.array([1.0, 3.0]))
    assert isinstance(same, jax.Array)
    assert isinstance(same, dj.Mirrored)
    assert s4.reduce("sum", same, axis=None).tolist() == [4.0, 12.0]
    assert s4.reduce("mean", same, axis=None).tolist() == [1.0, 3.0]
    assert float(s4.reduce("sum", same, axis=0)) == 16.0
    assert float(s4.reduce("mean", same, axis=0)) == 2.0
    assert len(s4.experimental_local_results(same)) == 4
    assert s4.gather(same, axis=0).tolist() == [1.0, 3.0] * 4


def test_with_one_replica_reduce_returns_the_value():
    one = dj.OneDeviceStrategy("cpu:0")
    assert float(one.reduce("sum", 3.0, axis=None)) == 3.0
    assert float(one.reduce("sum", jnp.array([1.0, 2.0]), axis=0)) == 3.0
    assert float(one.reduce("mean", jnp.array([1.0, 2.0]), axis=0)) == 1.5
    value = one.run(lambda: jnp.array([1.0, 2.0]))
    assert isinstance(value, jax.Array)
    assert one.gather(value, axis=0).tolist() == [1.0, 2.0]
    assert [v.tolist() for v in one.experimental_local_results(value)] == [[1.0, 2.0]]


def test_gather_joins_in_replica_order(s2: dj.MirroredStrategy):
    value = s2.run(lambda: dj.get_replica_context().replica_id_in_sync_group * jnp.ones((1, 2)))
    assert s2.gather(value, axis=0).tolist() == [[0, 0], [1, 1]]
    assert s2.gather(value, axis=1).tolist() == [[0, 0, 1, 1]]
    assert s2.gather(value, axis=-1).tolist() == [[0, 0, 1, 1]]
    assert s2.gather({"a": value}, axis=0)["a"].tolist() == [[0, 0], [1, 1]]


def test_gather_of_different_lengths_along_the_axis(s2: dj.MirroredStrategy):
    rows = per_replica(s2, [np.ones((2, 2)), np.zeros((1, 2))])
    assert s2.gather(rows, axis=0).tolist() == [[1, 1], [1, 1], [0, 0]]
    columns = per_replica(s2, [np.ones((2, 2)), np.zeros((2, 1))])
    assert s2.gather(columns, axis=1).tolist() == [[1, 1, 0], [1, 1, 0]]
    with pytest.raises(ValueError, match=r"may differ only in dim 1"):
        s2.gather(rows, axis=1)


def test_gather_of_scalars_says_to_add_a_dim(s2: dj.MirroredStrategy):
    with pytest.raises(ValueError, match="has no dims"):
        s2.gather(s2.run(replica_number), axis=0)
    for value in (per_replica(s2, [np.ones(2)] * 2), s2.run(lambda: jnp.ones(2))):
        with pytest.raises(
            ValueError, match=r"value of one replica, float32\[2\], has only 1 dims"
        ):
            s2.gather(value, axis=1)


def test_local_results_of_nests_and_plain_values(s2: dj.MirroredStrategy):
    nest = {"a": per_replica(s2, [0, 1]), "b": 7}
    assert s2.experimental_local_results(nest) == ({"a": 0, "b": 7}, {"a": 1, "b": 7})
    assert s2.experimental_local_results(7) == (7,)
    assert s2.experimental_local_results(jnp.array(1.0)) == (1.0,)


def test_a_value_that_jax_has_moved_keeps_the_part_of_each_replica(s2: dj.MirroredStrategy):
    """``device_get`` and ``device_put`` take all parts to one place; those on the host run as before."""
    (batch,) = s2.distribute_dataset([np.arange(7.0)])
    for value, plus in ((batch, 0.0), (s2.run(lambda x: 2 * x, args=(batch,)), 1.0)):
        wanted = [part.tolist() for part in value.values]
        for moved in (jax.device_get(value), jax.device_put(value, jax.devices()[5])):
            assert [part.tolist() for part in moved.values] == wanted
        result = s2.run(jnp.add, args=(jax.device_get(value), plus))
        assert [(part - plus).tolist() for part in result.values] == wanted


def test_values_from_a_function_of_the_replica(s2: dj.MirroredStrategy):
    counts = s2.experimental_distribute_values_from_function(lambda c: c.num_replicas_in_sync)
    assert [int(v) for v in counts.values] == [2, 2]
    picked = s2.experimental_distribute_values_from_function(
        lambda c: [3.0, 2.0, 1.0][c.replica_id_in_sync_group]
    )
    assert [float(v) for v in picked.values] == [3.0, 2.0]
    assert repr(counts) == "PerReplica:{0: array(2, dtype=int32), 1: array(2, dtype=int32)}"
    buffer = np.zeros(2)  # one array that is filled for each replica
    filled = s2.experimental_distribute_values_from_function(
        lambda c: (np.copyto(buffer, c.replica_id_in_sync_group), buffer)[1]
    )
    assert s2.gather(filled, axis=0).tolist() == [0.0, 0.0, 1.0, 1.0]
    plain = dj.OneDeviceStrategy(0).experimental_distribute_values_from_function(lambda c: 2.0)
    assert isinstance(plain, jax.Array)


def test_values_of_different_lengths_run_with_a_mask(s2: dj.MirroredStrategy):
    value = per_replica(s2, [np.array([1.0, 2.0, 4.0]), np.array([4.0])])

    def step(x: jax.Array):
        return jnp.sum(jnp.where(dj.get_replica_context().batch_mask, x, 0)), x + 1

    sums, rows = s2.run(step, args=(value,))
    assert [float(v) for v in s2.experimental_local_results(sums)] == [7.0, 4.0]
    assert [v.tolist() for v in s2.experimental_local_results(rows)] == [[2.0, 3.0, 5.0], [5.0]]


def test_a_per_replica_value_takes_part_in_no_arithmetic(s2: dj.MirroredStrategy):
    value = s2.run(replica_number)
    for operation in (lambda: value + 1, lambda: 1 - value, lambda: value[0], lambda: -value):
        with pytest.raises(TypeError, match=r"strategy\.reduce"):
            operation()
    for conversion in (np.asarray, jnp.asarray, float, bool, len):
        with pytest.raises(ValueError, match="cannot be turned into one array"):
            conversion(value)


@pytest.mark.parametrize(
    "use", [dj.compute_average_loss, jnp.sum, lambda x: x + 1, lambda x: x.sum()]
)
def test_a_captured_batch_says_to_pass_it_in_args(s2: dj.MirroredStrategy, use: Any):
    (batch,) = s2.distribute_dataset([np.arange(4.0)])
    with pytest.raises((ValueError, TypeError), match=r"(?s)holds one value for.*args=\(value,\)"):
        s2.run(partial(use, batch))


def test_formats_and_attributes_of_arrays_say_how_to_get_one_array(s2: dj.MirroredStrategy):
    value = s2.run(replica_number)
    for use in (lambda value: f"{value:.3f}", lambda value: round(value, 3)):
        with pytest.raises(TypeError, match=r"(?s)holds one value for each.*strategy\.reduce"):
            use(value)
    assert f"{value}" == str(value)
    for name in ("numpy", "item", "mean", "shape"):
        with pytest.raises(
            dj.PerReplicaError, match=rf"2 × float32\[\] has no '{name}'.*\n.*all_reduce"
        ):
            getattr(value, name)
        assert not hasattr(value, name)
    with pytest.raises(AttributeError, match="'PerReplica' object has no attribute 'nothing'"):
        getattr(value, "nothing")  # noqa: B009
    with s2.scope(), pytest.raises(ValueError, match=r"^PerReplica of 2 × float32\[\] holds"):
        jnp.mean(value)


def test_results_mix_with_arrays_on_any_device(s4: dj.MirroredStrategy):
    value = s4.run(replica_number)
    mean = s4.reduce("mean", value)
    others = [jnp.ones(()), s4.run(lambda: jnp.ones(())), *s4.experimental_local_results(value)]
    for other in others:
        assert float(mean + other) == 1.5 + float(other)
        with s4.scope():
            assert float(mean + other) == 1.5 + float(other)
    assert float(mean + jax.device_put(1.0, jax.devices()[3])) == 2.5


def test_reduce_of_a_mirrored_variable(s2: dj.MirroredStrategy):
    from flax import nnx

    with s2.scope():
        variable = nnx.Param(jnp.array(3.0))
    assert float(s2.reduce("mean", variable)) == 3.0
    assert float(s2.reduce("sum", variable)) == 6.0


def test_the_result_is_uncommitted_on_the_first_device(s2: dj.MirroredStrategy):
    result = s2.reduce("sum", s2.run(replica_number))
    assert not result.committed
    assert result.devices() == {jax.devices()[0]}


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_narrow_integers_do_not_overflow(s2: dj.MirroredStrategy, dtype: type):
    (batch,) = s2.distribute_dataset([np.full(300, 1, dtype)])
    assert int(s2.reduce("sum", batch, axis=0)) == 300
    assert float(s2.reduce("mean", batch, axis=0)) == 1.0


def test_a_sum_of_a_reduced_float_is_logged_once(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_errors, "_logged", set())

    def reduced(x: jax.Array) -> Any:
        return dj.get_replica_context().all_reduce("sum", jnp.sum(x)), jnp.int32(len(x)), x[0]

    (batch,) = s4.distribute_dataset([np.ones(8, np.float32)])
    for _ in range(2):
        total, count, own = s4.run(reduced, args=(batch,))
        assert float(s4.reduce("sum", total)) == 4 * 8
    assert (int(s4.reduce("sum", count)), float(s4.reduce("sum", own))) == (8, 4)
    assert float(s4.reduce("mean", total)) == 8
    [record] = caplog.records
    assert "got a result of test_a_sum_of_a_reduced" in record.getMessage()
    assert "4 times the value" in record.getMessage()


def test_a_mean_of_the_parts_of_a_mean_is_logged(
    s4: dj.MirroredStrategy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_errors, "_logged", set())

    def step(x: jax.Array) -> Any:
        return {"loss": dj.compute_average_loss(x), "id": replica_number()}

    for batch in s4.distribute_dataset([np.arange(8.0), np.arange(5.0)]):
        parts = s4.run(step, args=(batch,))
        loss = float(s4.reduce("sum", parts["loss"]))
        s4.reduce("mean", parts["id"])
        assert not caplog.records
        assert float(s4.reduce("mean", parts["loss"])) == loss / 4
        [record] = caplog.records
        caplog.clear()
        monkeypatch.setattr(_errors, "_logged", set())
    assert "Their mean is 4 times too small: write strategy.reduce('sum', loss)" in (
        record.getMessage()
    )
