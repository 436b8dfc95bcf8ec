"""Checks of contexts, of the arguments and results of ``run``, and of collectives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import MixedStrategiesError
from distribute_jax._values import DistributedValues, PerReplica
from distribute_jax.collectives import CommunicationOptions
from distribute_jax.strategies import (
    OneDeviceStrategy,
    get_replica_context,
    get_strategy,
    in_cross_replica_context,
)
from distribute_jax.testing._conformance import Subject, power_of_two, replica, replica_number


def _current() -> tuple[Any, bool, bool]:
    """Returns the strategy, ``in_cross_replica_context()``, and True if there is a replica context."""
    return get_strategy(), in_cross_replica_context(), get_replica_context() is not None


def _enter(strategy: Any) -> None:
    with strategy.scope():
        pass


def context_of_scope(s: Subject) -> None:
    """In ``scope``, also a nested or reused one, the strategy is current, and afterwards it is not."""
    before = _current()
    scope = s.strategy.scope()
    for _ in range(2):
        with scope as current, s.strategy.scope():
            s.expect("scope() yields the strategy", current is s.strategy, True)
            s.expect("what is current in scope()", _current(), (s.strategy, True, False))
        s.expect("what is current after scope()", _current(), before)


def context_of_run(s: Subject) -> None:
    """In ``run`` there is a replica context, and in ``merge_call`` there is none."""
    seen: dict[str, Any] = {}

    def merged(strategy: Any) -> None:
        seen["merge_call"] = (_current(), strategy is get_strategy())

    def step() -> None:
        seen["run"] = _current()
        seen["count"] = replica().num_replicas_in_sync
        seen["strategy"] = replica().strategy
        replica().merge_call(merged)

    s.run(step)
    s.expect("what is current in run", seen["run"], (s.strategy, False, True))
    s.expect("num_replicas_in_sync in run", seen["count"], s.n)
    s.expect("the strategy of the replica context", seen["strategy"], s.strategy)
    s.expect("what is current in merge_call", seen["merge_call"], ((s.strategy, True, False), True))


def context_refusals(s: Subject) -> None:
    """Methods of the strategy are refused inside ``run``, and ``run`` under the user's jit."""
    strategy = s.strategy
    calls = {
        "run": lambda: strategy.run(lambda: 1),
        "scope": lambda: _enter(strategy),
        "reduce": lambda: strategy.reduce("sum", jnp.ones(())),
        "gather": lambda: strategy.gather(jnp.ones(1), axis=0),
        "distribute_dataset": lambda: strategy.distribute_dataset([]),
    }
    for name, call in calls.items():
        s.expect_error(f"{name} inside run", lambda call=call: s.run(call), RuntimeError)  # type: ignore[misc]
    s.expect_error("run under jax.jit", jax.jit(lambda: s.run(replica_number)), RuntimeError)


def mixed_strategies_refused(s: Subject) -> None:
    """Another strategy cannot be used in this one's scope, nor this one in another's."""
    other = OneDeviceStrategy(s.devices[0])
    for outer, inner in ((s.strategy, other), (other, s.strategy)):
        names = f"of {type(inner).__name__} in the scope of {type(outer).__name__}"
        with outer.scope():
            for name, call in (
                ("run", lambda inner=inner: inner.run(replica_number)),
                ("scope", lambda inner=inner: _enter(inner)),
                ("reduce", lambda inner=inner: inner.reduce("mean", 1.0)),
            ):
                s.expect_error(f"{name} {names}", call, MixedStrategiesError)


def _as_float(*values: float) -> list[np.ndarray]:
    return [np.asarray(value, np.float32) for value in values]


def replica_order(s: Subject) -> None:
    """Replica i has id i, is on device i (or devices have several replicas each), and gets value i."""
    mesh = s.strategy.mesh
    firsts = list(mesh.devices.flat[:: mesh.size // mesh.shape["data"]])
    expected = s.devices[: len(firsts)]
    s.expect("the devices of strategy.mesh", firsts, [*expected])
    ids = s.run(lambda: replica().replica_id_in_sync_group + 0)
    s.expect_each("replica_id_in_sync_group", s.parts(ids), list(np.arange(s.n, dtype="int32")))
    if isinstance(ids, PerReplica):
        devices = [str(*part.devices()) for part in ids.values]
        each = s.n // len(firsts)
        s.expect(
            "the devices of a result's parts",
            devices,
            [str(d) for d in expected for _ in range(each)],
        )
    numbers = s.per_replica(_as_float(*range(s.n)))
    difference = s.run_per_replica(lambda x: x - (replica_number() - 1), numbers)
    s.expect_all("a value from a function, less the replica's id", difference, np.float32(0))


def arguments(s: Subject) -> None:
    """Each replica gets its part of per-replica values, and all of other arguments; also by keyword."""
    powers = s.per_replica(_powers(s))
    mirrored = jnp.arange(3.0)

    def step(mine: Any, nest: Any, *, scale: Any, flag: bool) -> Any:
        return (mine * scale + nest["mirrored"]) if flag else None

    options, kwargs = s.options, {"scale": powers, "flag": True}
    result = s.strategy.run(
        step, args=(powers, {"mirrored": mirrored}), kwargs=kwargs, options=options
    )
    expected = [np.arange(3, dtype=np.float32) + np.float32(4.0**i) for i in range(s.n)]
    s.expect_each("own value squared + [0, 1, 2]", s.parts(result), expected)


def results(s: Subject) -> None:
    """Equal arrays are returned as one array, others as ``PerReplica``; other objects unchanged."""
    mirrored, each, text, nothing = s.run(
        lambda: (replica().all_reduce("sum", 1.0), {"each": power_of_two()}, "a", None)
    )
    s.expect("the equal result is one jax.Array", isinstance(mirrored, jax.Array), True)
    s.expect("the equal result", float(mirrored), float(s.n))
    s.expect("a text and None", (text, nothing), ("a", None))
    if s.n > 1:
        kind = isinstance(each["each"], PerReplica)
        s.expect("results that differ are a PerReplica", kind, True)
        s.expect_error("float() of a PerReplica", lambda: float(each["each"]), ValueError)
        s.expect_error("a PerReplica + 1", lambda: each["each"] + 1, TypeError)
    s.expect_each("own results", s.parts(each), [{"each": x} for x in _powers(s)])
    s.expect_each("copies of the equal result", s.parts(mirrored), _as_float(*[s.n] * s.n))


def _powers(s: Subject) -> list[np.ndarray]:
    return _as_float(*(2.0**i for i in range(s.n)))


def reduce(s: Subject) -> None:
    """SUM adds; MEAN divides by the number of replicas or, with an axis, of elements."""
    rows = np.arange(3, dtype=np.float32)
    mine, numbers = s.run(lambda: (power_of_two() * jnp.arange(3.0), jnp.int32(power_of_two())))
    total = 2**s.n - 1
    equal = s.run(lambda: replica().all_reduce("sum", 1.0))
    s.expect("sum", s.strategy.reduce("sum", mine), total * rows)
    s.expect("MEAN", s.strategy.reduce("MEAN", mine, axis=None), total / s.n * rows)
    s.expect("sum over axis 0", s.strategy.reduce("sum", mine, 0), np.float32(3 * total))
    mean = np.float32(total / s.n)
    s.expect("mean over axis 0", s.strategy.reduce("mean", mine, axis=0), mean)
    s.expect("sum of integers", s.strategy.reduce("sum", numbers), np.int32(total))
    s.expect("mean of integers", s.strategy.reduce("mean", numbers), mean)
    s.expect("sum of an equal result", s.strategy.reduce("sum", equal), np.float32(s.n**2))
    uneven = s.per_replica([np.full(i, 2.0**i, np.float32) for i in range(1, s.n + 1)])
    mean = np.float32(np.mean([2.0**i for i in range(1, s.n + 1) for _ in range(i)]))
    s.expect("mean of uneven parts", s.strategy.reduce("mean", uneven, axis=0), mean)
    s.expect_error("reduce_op 'max'", lambda: s.strategy.reduce("max", mine), ValueError)


def gather(s: Subject) -> None:
    """The replicas' arrays, of any lengths, are joined in replica order along any dim."""
    mine = s.run(lambda: replica_number() * jnp.ones((2, 3)))
    parts = [np.full((2, 3), i, np.float32) for i in range(1, s.n + 1)]
    for axis in (0, 1, -1):
        joined = s.strategy.gather(mine, axis=axis)
        s.expect(f"gather along {axis}", joined, np.concatenate(parts, axis))
    uneven = [np.full(i, i, np.float32) for i in range(1, s.n + 1)]
    joined = s.strategy.gather(s.per_replica(uneven), axis=0)
    s.expect("gather of uneven parts", joined, np.concatenate(uneven))
    scalar = s.run(replica_number)
    s.expect_error("gather of scalars", lambda: s.strategy.gather(scalar, axis=0), ValueError)


def dataset(s: Subject) -> None:
    """A global batch is divided into consecutive shares; a partial one keeps all its examples."""
    rows, rest = np.arange(8, dtype=np.float32), np.arange(5, dtype=np.float32)
    full, partial = s.batches([rows, rest])
    s.expect_each("the share", s.parts(full), np.split(rows, s.n))
    s.expect("all shares", s.strategy.gather(full, axis=0), rows)
    s.expect("all shares of a partial batch", s.strategy.gather(partial, axis=0), rest)
    mean = s.strategy.reduce("mean", partial, axis=0)
    s.expect("the mean of a partial batch", mean, np.float32(2))


def _nest(factor: Any) -> dict[str, Any]:
    """Returns arrays of several dtypes, of lengths that no number of replicas divides."""
    return {
        "scalar": jnp.asarray(factor, jnp.float32),
        "vector": factor * jnp.arange(1.0, 38.0),
        "matrix": factor * jnp.arange(15.0).reshape(3, 5),
        "int32": jnp.asarray(factor * jnp.arange(4.0), jnp.int32),
        "bfloat16": jnp.asarray(factor, jnp.bfloat16),
        "float16": jnp.asarray(factor * jnp.ones(3), jnp.float16),
        "empty": jnp.zeros((0, 3)),
    }


def _on_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def all_reduce_sum(s: Subject) -> None:
    """Powers of two are added, so that a replica left out or counted twice changes the sum."""

    def nest(factor: Any) -> dict[str, Any]:
        # Times 15, the sum of four replicas, it is not a number of float32.
        return {**_nest(factor), "large int32": jnp.int32(factor) * jnp.int32(2**22 + 1)}

    parts = s.run_per_replica(lambda: replica().all_reduce("sum", nest(power_of_two())))
    s.expect_all("the sum of 1, 2, 4, … over the replicas", parts, _on_host(nest(2**s.n - 1)))


def all_reduce_mean(s: Subject) -> None:
    """The sum is divided by the number of replicas, in every dtype; integers give floats."""
    parts = s.run_per_replica(lambda: replica().all_reduce("mean", _nest(power_of_two())))
    expected = _nest((2**s.n - 1) / s.n)
    expected["int32"] = (2**s.n - 1) / s.n * jnp.arange(4.0)
    s.expect_all("the mean of 1, 2, 4, … over the replicas", parts, _on_host(expected))


def all_reduce_copies(s: Subject) -> None:
    """Every replica gets the same bits, also if the order of the sum matters."""

    def step() -> Any:
        vector = jnp.sin(replica_number() * jnp.arange(1.0, 38.0)) * 10.0 ** replica_number()
        return replica().all_reduce("sum", {"vector": vector, "scalar": vector[3]})

    parts = s.run_per_replica(step)
    s.expect_all("the sum, compared with that of replica 0,", parts, parts[0], rtol=0)


def all_reduce_options(s: Subject) -> None:
    """The ``options`` of a call are accepted, and packing changes no sum."""
    options = CommunicationOptions(bytes_per_pack=8)
    parts = s.run_per_replica(lambda: replica().all_reduce("sum", _nest(power_of_two()), options))
    s.expect_all("the sum in packs of 8 bytes", parts, _on_host(_nest(2**s.n - 1)))


def all_reduce_gradient(s: Subject) -> None:
    """The derivative is the same reduction, of cotangents and of tangents."""

    def derivatives(op: str) -> tuple[jax.Array, jax.Array]:
        def reduced(x: jax.Array) -> jax.Array:
            return jnp.asarray(replica().all_reduce(op, x))

        upstream, x = power_of_two() * jnp.arange(1.0, 6.0), jnp.ones(5)
        gradient = jax.grad(lambda x: jnp.sum(reduced(x) * upstream))(x)
        return gradient, jax.jvp(reduced, (x,), (upstream,))[1]

    parts = s.run_per_replica(lambda: {"sum": derivatives("sum"), "mean": derivatives("mean")})
    total = np.float32(2**s.n - 1) * np.arange(1, 6, dtype=np.float32)
    expected = {"sum": (total, total), "mean": (total / np.float32(s.n), total / np.float32(s.n))}
    s.expect_all("gradient and tangent", parts, expected)


def all_reduce_transformed(s: Subject) -> None:
    """It works under jit, vmap, scan and checkpoint in the step."""

    def reduced(x: jax.Array) -> jax.Array:
        return jnp.asarray(replica().all_reduce("sum", x))

    def step() -> Any:
        matrix = power_of_two() * jnp.arange(6.0).reshape(2, 3)
        return {
            "jit": jax.jit(reduced)(matrix),
            "vmap": jax.vmap(reduced)(matrix),
            "vmap over dim 1": jax.vmap(reduced, in_axes=1, out_axes=1)(matrix),
            "scan": jax.lax.scan(lambda c, x: (c, reduced(x)), 0, matrix)[1],
            "checkpoint": jax.grad(lambda x: jnp.sum(jax.checkpoint(reduced)(x) * matrix))(matrix),
        }

    total = np.float32(2**s.n - 1) * np.arange(6, dtype=np.float32).reshape(2, 3)
    names = ("jit", "vmap", "vmap over dim 1", "scan", "checkpoint")
    s.expect_all("the sum under", s.run_per_replica(step), dict.fromkeys(names, total))


def all_reduce_is_proved(s: Subject) -> None:
    """The sum is known to be equal on all replicas, so a step may change state with it."""
    state = s.create(lambda: jax.numpy.zeros(3))
    results: list[Any] = []

    def call() -> None:
        results.append(s.run(lambda x: x + replica().all_reduce("sum", power_of_two()), state))

    s.expect_success("returning a mirrored argument plus a sum", call)
    for array in results:
        s.expect("it comes back as one jax.Array", isinstance(array, jax.Array), True)
        for shard in array.addressable_shards if isinstance(array, jax.Array) else ():
            copy = np.asarray(shard.data)
            expected = np.full(3, 2**s.n - 1, np.float32)
            s.expect(f"its copy on {shard.device}", copy, expected)


def all_gather(s: Subject) -> None:
    """All replicas get all arrays in replica order; the gradient is the replica's slice of the sum."""

    def step() -> Any:
        block = replica_number() * jnp.ones((2, 3))
        width, n = jnp.arange(2.0 * s_n), s_n

        def loss(x: jax.Array) -> jax.Array:
            return jnp.sum(replica().all_gather(x, axis=0)[:, 0] * width * power_of_two() * n)

        nest = {"0": block, "bool": block > 2}
        return {
            **replica().all_gather(nest, axis=0),
            "-1": replica().all_gather(block, axis=-1),
            "gradient": jax.grad(loss)(block)[:, 0],
        }

    s_n = s.n
    blocks = [np.full((2, 3), i, np.float32) for i in range(1, s.n + 1)]
    joined = np.concatenate(blocks)
    total = s.n * (2**s.n - 1) * np.arange(2 * s.n, dtype=np.float32).reshape(s.n, 2)
    expected = [
        {"0": joined, "bool": joined > 2, "-1": np.concatenate(blocks, 1), "gradient": row}
        for row in total
    ]
    s.expect_each("what all_gather gives", s.run_per_replica(step), expected)


def merge_call(s: Subject) -> None:
    """A function gets all replicas' values at once; each replica gets its part, or the common result."""

    def merged(strategy: Any, value: Any, *, factor: float) -> Any:
        parts = strategy.experimental_local_results(value)
        kinds.append(isinstance(value, DistributedValues))
        return value, factor * strategy.reduce("sum", value, axis=None), sum(parts)

    kinds: list[bool] = []
    parts = s.run_per_replica(
        lambda: replica().merge_call(merged, args=(power_of_two(),), kwargs={"factor": 2.0})
    )
    total = np.float32(2**s.n - 1)
    expected = [(np.float32(2.0**i), 2 * total, total) for i in range(s.n)]
    s.expect_each("own part, twice the sum, and the sum by hand", parts, expected)
    s.expect("each argument is a DistributedValues", kinds, [True])
