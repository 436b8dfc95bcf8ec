"""Checks of contexts, and of what goes into ``run`` and comes out of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import MixedStrategiesError
from distribute_jax._values import PerReplica
from distribute_jax.strategies import (
    OneDeviceStrategy,
    get_replica_context,
    get_strategy,
    in_cross_replica_context,
)
from distribute_jax.testing.conformance._core import (
    Fact,
    Subject,
    number,
    on_all,
    on_each,
    power,
    refuses,
    replica,
    same,
)


def _current() -> tuple[Any, bool, bool]:
    """Returns the strategy, in_cross_replica_context, and whether there is a replica context."""
    return get_strategy(), in_cross_replica_context(), get_replica_context() is not None


def _enter(strategy: Any) -> None:
    with strategy.scope():
        pass


def context_of_scope(s: Subject) -> Iterator[Fact]:
    """In ``scope`` the strategy is current, also nested and again, and afterwards it is not."""
    before = _current()
    scope = s.strategy.scope()
    for _ in range(2):
        with scope as given, s.strategy.scope():
            yield Fact("scope() yields the strategy", given is s.strategy, True)
            yield Fact("what is current in scope()", _current(), (s.strategy, True, False))
        yield Fact("what is current after scope()", _current(), before)


def context_of_run(s: Subject) -> Iterator[Fact]:
    """In ``run`` there is a replica context, and in ``merge_call`` there is none."""
    found: dict[str, Any] = {}

    def merged(strategy: Any) -> None:
        found["merge_call"] = (_current(), strategy is get_strategy())

    def step() -> None:
        found["run"] = _current()
        found["count"] = replica().num_replicas_in_sync
        found["strategy"] = replica().strategy
        replica().merge_call(merged)

    s.run(step)
    yield Fact("what is current in run", found["run"], (s.strategy, False, True))
    yield Fact("num_replicas_in_sync in run", found["count"], s.n)
    yield Fact("the strategy of the replica context", found["strategy"], s.strategy)
    yield Fact(
        "what is current in merge_call", found["merge_call"], ((s.strategy, True, False), True)
    )


def context_refusals(s: Subject) -> Iterator[Fact]:
    """Methods of the strategy are refused inside ``run`` and under the user's own jit."""
    strategy = s.strategy
    calls = {
        "run": lambda: strategy.run(lambda: 1),
        "scope": lambda: _enter(strategy),
        "reduce": lambda: strategy.reduce("sum", jnp.ones(())),
        "gather": lambda: strategy.gather(jnp.ones(1), axis=0),
        "distribute_dataset": lambda: strategy.distribute_dataset([]),
    }
    for name, call in calls.items():
        yield refuses(f"{name} inside run", lambda call=call: s.run(call), RuntimeError)  # type: ignore[misc]
    yield refuses("run under jax.jit", jax.jit(lambda: s.run(number)), RuntimeError)


def mixed_strategies_refused(s: Subject) -> Iterator[Fact]:
    """Another strategy cannot be used inside this one's scope, nor this one inside another's."""
    other = OneDeviceStrategy(s.devices[0])
    for outer, inner in ((s.strategy, other), (other, s.strategy)):
        names = f"of {type(inner).__name__} in the scope of {type(outer).__name__}"
        with outer.scope():
            for name, call in (
                ("run", lambda inner=inner: inner.run(number)),
                ("scope", lambda inner=inner: _enter(inner)),
                ("reduce", lambda inner=inner: inner.reduce("mean", 1.0)),
            ):
                yield refuses(f"{name} {names}", call, MixedStrategiesError)


CONTEXT_CHECKS = (context_of_scope, context_of_run, context_refusals, mixed_strategies_refused)


def _as_float(*values: float) -> list[np.ndarray]:
    return [np.asarray(value, np.float32) for value in values]


def replica_order(s: Subject) -> Iterator[Fact]:
    """Replica i is called i, has its first core on the i-th device, and gets the i-th of everything."""
    mesh = s.strategy.mesh
    firsts = list(mesh.devices.flat[:: mesh.size // mesh.shape["data"]])
    yield Fact("the devices of strategy.mesh", firsts, [*s.devices])
    ids = s.run(lambda: replica().replica_id_in_sync_group + 0)
    yield from on_each(
        "replica_id_in_sync_group", s.parts(ids), list(np.arange(s.n, dtype="int32"))
    )
    if isinstance(ids, PerReplica):
        devices = [str(*part.devices()) for part in ids.values]
        yield Fact("the devices of a result's parts", devices, [str(d) for d in s.devices])
    given = s.own(_as_float(*range(s.n)))
    difference = s.seen(lambda x: x - (number() - 1), given)
    yield from on_all("a value from a function, less the replica's id", difference, np.float32(0))


def arguments(s: Subject) -> Iterator[Fact]:
    """Per-replica values are divided; arrays and numbers go whole to each; also as keywords."""
    own = s.own(_as_float(*(2.0**i for i in range(s.n))))
    whole = jnp.arange(3.0)

    def step(mine: Any, nest: Any, *, scale: Any, flag: bool) -> Any:
        return (mine * scale + nest["whole"]) if flag else None

    options, kwargs = s.options, {"scale": own, "flag": True}
    result = s.strategy.run(step, args=(own, {"whole": whole}), kwargs=kwargs, options=options)
    expected = [np.arange(3, dtype=np.float32) + np.float32(4.0**i) for i in range(s.n)]
    yield from on_each("own value squared + [0, 1, 2]", s.parts(result), expected)


def results(s: Subject) -> Iterator[Fact]:
    """Equal arrays come back as one array, others per replica; other objects as themselves."""
    mirrored, own, text, nothing = s.run(
        lambda: (replica().all_reduce("sum", 1.0), {"own": power()}, "a", None)
    )
    yield Fact("the equal result is one jax.Array", isinstance(mirrored, jax.Array), True)
    yield Fact("the equal result", float(mirrored), float(s.n))
    yield Fact("a text and None", (text, nothing), ("a", None))
    if s.n > 1:
        kind = isinstance(own["own"], PerReplica)
        yield Fact("results that differ are a PerReplica", kind, True)
        yield refuses("float() of a PerReplica", lambda: float(own["own"]), ValueError)
        yield refuses("a PerReplica + 1", lambda: own["own"] + 1, TypeError)
    yield from on_each("own results", s.parts(own), [{"own": x} for x in _powers(s)])
    yield from on_each("copies of the equal result", s.parts(mirrored), _as_float(*[s.n] * s.n))


def _powers(s: Subject) -> list[np.ndarray]:
    return _as_float(*(2.0**i for i in range(s.n)))


def reduce(s: Subject) -> Iterator[Fact]:
    """SUM adds, MEAN divides by the replicas; with an axis, by the number of elements."""
    rows = np.arange(3, dtype=np.float32)
    mine, numbers = s.run(lambda: (power() * jnp.arange(3.0), jnp.int32(power())))
    total = 2**s.n - 1
    equal = s.run(lambda: replica().all_reduce("sum", 1.0))
    yield from same("sum", s.strategy.reduce("sum", mine), total * rows)
    yield from same("MEAN", s.strategy.reduce("MEAN", mine, axis=None), total / s.n * rows)
    yield from same("sum over axis 0", s.strategy.reduce("sum", mine, 0), np.float32(3 * total))
    mean = np.float32(total / s.n)
    yield from same("mean over axis 0", s.strategy.reduce("mean", mine, axis=0), mean)
    yield from same("sum of integers", s.strategy.reduce("sum", numbers), np.int32(total))
    yield from same("mean of integers", s.strategy.reduce("mean", numbers), mean)
    yield from same("sum of an equal result", s.strategy.reduce("sum", equal), np.float32(s.n**2))
    uneven = s.own([np.full(i, 2.0**i, np.float32) for i in range(1, s.n + 1)])
    elements = [2.0**i for i in range(1, s.n + 1) for _ in range(i)]
    mean = np.float32(np.mean(elements))
    yield from same("mean of uneven parts", s.strategy.reduce("mean", uneven, axis=0), mean)
    yield refuses("reduce_op 'max'", lambda: s.strategy.reduce("max", mine), ValueError)


def gather(s: Subject) -> Iterator[Fact]:
    """The replicas' arrays are joined in replica order, along any dim, of any lengths."""
    mine = s.run(lambda: number() * jnp.ones((2, 3)))
    parts = [np.full((2, 3), i, np.float32) for i in range(1, s.n + 1)]
    for axis in (0, 1, -1):
        joined = s.strategy.gather(mine, axis=axis)
        yield from same(f"gather along {axis}", joined, np.concatenate(parts, axis))
    uneven = [np.full(i, i, np.float32) for i in range(1, s.n + 1)]
    joined = s.strategy.gather(s.own(uneven), axis=0)
    yield from same("gather of uneven parts", joined, np.concatenate(uneven))
    scalar = s.run(number)
    yield refuses("gather of scalars", lambda: s.strategy.gather(scalar, axis=0), ValueError)


def dataset(s: Subject) -> Iterator[Fact]:
    """A global batch is cut into consecutive shares; a partial one is padded, and none is lost."""
    whole, rest = np.arange(8, dtype=np.float32), np.arange(5, dtype=np.float32)
    full, partial = s.batches([whole, rest])
    yield from on_each("the share", s.parts(full), np.split(whole, s.n))
    yield from same("all shares", s.strategy.gather(full, axis=0), whole)
    yield from same("all shares of a partial batch", s.strategy.gather(partial, axis=0), rest)
    found = s.strategy.reduce("mean", partial, axis=0)
    yield from same("the mean of a partial batch", found, np.float32(2))


CHECKS = (replica_order, arguments, results, reduce, gather, dataset)
