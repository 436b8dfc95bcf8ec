"""Checks of state: ``Variable``, metrics, batch norm and random streams."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax import metrics
from distribute_jax._errors import OutOfSyncError
from distribute_jax.collectives import check_in_sync
from distribute_jax.testing.conformance._core import (
    Fact,
    Subject,
    number,
    on_all,
    on_each,
    refuses,
    same,
    succeeds,
)
from distribute_jax.variables import Variable, VariableAggregation, VariableSynchronization

_NONE, _SUM = VariableAggregation.NONE, VariableAggregation.SUM
_MEAN, _FIRST = VariableAggregation.MEAN, VariableAggregation.ONLY_FIRST_REPLICA
_ON_READ = VariableSynchronization.ON_READ

_METHODS = {"assign": (0, 1), "assign_add": (1, 1), "assign_sub": (1, -1)}
"""How much of the old value stays, and the sign of what is written."""


def _combined(n: int) -> dict[VariableAggregation, float]:
    """What the replicas' 1, 2, …, n become."""
    return {_SUM: n * (n + 1) / 2, _MEAN: (n + 1) / 2, _FIRST: 1.0}


def _made(s: Subject, aggregation: VariableAggregation, value: Any = 10.0) -> dict[str, Variable]:
    return s.made(  # type: ignore[no-any-return]
        lambda: {method: Variable(value, aggregation=aggregation) for method in _METHODS}
    )


def _on_read(s: Subject, aggregation: VariableAggregation, value: Any = 10.0) -> Variable:
    made: Variable = s.made(
        lambda: Variable(value, synchronization=_ON_READ, aggregation=aggregation)
    )
    return made


def variables_on_write(s: Subject) -> Iterator[Fact]:
    """Replica r writes r + 1 to 10: the sum, the mean or the first counts, on every replica."""
    variables = {aggregation: _made(s, aggregation) for aggregation in _combined(s.n)}

    def step() -> Any:
        return {
            aggregation.name: {m: getattr(v, m)(number()) for m, v in named.items()}
            for aggregation, named in variables.items()
        }

    parts = s.seen(step)
    for aggregation, written in _combined(s.n).items():
        for method, (keeps, sign) in _METHODS.items():
            wanted, what = np.float32(10 * keeps + sign * written), f"{aggregation.name}, {method}"
            given = [part[aggregation.name][method] for part in parts]
            yield from on_all(f"what {method} returns under {aggregation.name}", given, wanted)
            copies = [np.asarray(copy) for copy in variables[aggregation][method].values]
            yield from on_all(f"the variable after {what},", copies, wanted)


def variables_on_write_equal(s: Subject) -> Iterator[Fact]:
    """Every replica writes 4: counted for each under SUM, and once otherwise, NONE included."""
    variables = {aggregation: _made(s, aggregation) for aggregation in VariableAggregation}

    def step() -> None:
        for named in variables.values():
            for method, variable in named.items():
                getattr(variable, method)(4.0)

    s.run(step)
    for aggregation, named in variables.items():
        for method, (keeps, sign) in _METHODS.items():
            wanted = 10 * keeps + sign * 4.0 * (s.n if aggregation is _SUM else 1)
            found = float(named[method].numpy())
            yield Fact(f"{method}(4) of every replica under {aggregation.name}", found, wanted)


def variables_on_write_outside(s: Subject) -> Iterator[Fact]:
    """Outside of ``run`` 4 is assigned, added and taken away as with a plain variable, in all copies."""
    homes = len(s.strategy.extended.parameter_devices)
    for aggregation in VariableAggregation:
        for method, variable in _made(s, aggregation).items():
            keeps, sign = _METHODS[method]
            s.made(partial(getattr(variable, method), 4.0))
            copies = [np.asarray(copy) for copy in variable.values]
            wanted = np.float32(10 * keeps + sign * 4.0)
            what = f"{method}(4) outside under {aggregation.name}"
            yield Fact(f"the number of copies after {what}", len(copies), homes)
            yield from on_all(what, copies, wanted)


def variables_drift_refused(s: Subject) -> Iterator[Fact]:
    """With aggregation NONE replicas that write different values are refused, and nothing changes."""
    variable = _made(s, _NONE)["assign"]
    if s.n > 1:
        call = lambda: s.run(lambda: variable.assign(number()))  # noqa: E731
        yield refuses("different values under NONE", call, OutOfSyncError)
        yield Fact("the variable afterwards", float(variable.numpy()), 10.0)


def variables_on_read(s: Subject) -> Iterator[Fact]:
    """Each replica writes and reads its own value; outside it reads as the aggregate."""
    variables = {a.name: _on_read(s, a) for a in VariableAggregation}

    def step() -> Any:
        return {
            name: (v.assign(number()), v.assign_add(1.0), v.read_value())
            for name, v in variables.items()
        }

    numbers = np.arange(1, s.n + 1, dtype=np.float32)
    expected = [dict.fromkeys(sorted(variables), (i, i + 1, i + 1)) for i in numbers]
    yield from on_each("assign, assign_add and read", s.seen(step), expected)
    for name, variable in variables.items():
        own = [np.asarray(value) for value in variable.values]
        yield from on_each(f"the component under {name}", own, list(numbers + 1))
    for aggregation, total in _combined(s.n).items():
        wanted = total + (s.n if aggregation is _SUM else 1)
        found = float(variables[aggregation.name].numpy())
        yield Fact(f"the value outside under {aggregation.name}", found, wanted)
    if s.n > 1:
        yield refuses("reading NONE outside", variables["NONE"].numpy, ValueError)


def variables_on_read_outside(s: Subject) -> Iterator[Fact]:
    """What was given or assigned reads back; 4 is added to a mean or a first value, not to a sum."""
    for aggregation in (_SUM, _MEAN, _FIRST):
        name = aggregation.name
        variable = _on_read(s, aggregation)
        yield Fact(f"the initial value under {name}", float(variable.numpy()), 10.0)
        if aggregation is _SUM and s.n > 1:
            yield refuses(
                "assign_add outside under SUM", partial(variable.assign_add, 4), ValueError
            )
        elif aggregation is not _SUM:
            variable.assign_add(4.0)
            yield Fact(f"assign_add(4) outside under {name}", float(variable.numpy()), 14.0)
            variable.assign_sub(8.0)
            yield Fact(f"assign_sub(8) outside under {name}", float(variable.numpy()), 6.0)
        variable.assign(4.0)
        yield Fact(f"assign(4) outside under {name}", float(variable.numpy()), 4.0)
        shares = sum(float(value) for value in variable.values)
        wanted = 4.0 if aggregation is _SUM else 4.0 * s.n
        yield Fact(f"the sum of the components under {name}", shares, wanted)
    whole = _on_read(s, _SUM, 1)
    whole.assign(5)
    yield from same("an integer 5 assigned under SUM", whole.numpy(), np.asarray(5, "int32"))
    if s.n > 1:
        none = _on_read(s, _NONE)
        yield refuses("assign outside under NONE", lambda: none.assign(4.0), ValueError)


def variables_rows(s: Subject) -> Iterator[Fact]:
    """``scatter_add`` combines the replicas' changes of single rows; ON_READ has none."""
    wanted = {_SUM: float(s.n), _MEAN: 1.0, _FIRST: 1.0}
    variables = {a: _made(s, a, np.zeros(s.n + 1, np.float32))["assign"] for a in wanted}

    def step() -> None:
        rows = jnp.stack([number().astype(int) - 1, jnp.int32(n)])
        for variable in variables.values():
            variable.scatter_add(rows, jnp.ones(2))

    n = s.n
    s.run(step)
    for aggregation, last in wanted.items():
        own = {_SUM: np.ones(n), _MEAN: np.full(n, 1 / n), _FIRST: np.eye(n)[0]}[aggregation]
        expected = np.append(own, last).astype(np.float32)
        what = f"1 added to row r and to the last, under {aggregation.name}"
        yield from same(what, variables[aggregation].numpy(), expected)
    local = _on_read(s, _SUM, np.zeros(3, np.float32))
    call = lambda: local.scatter_add([0], [1.0])  # noqa: E731
    yield refuses("scatter_add of an ON_READ variable", call, NotImplementedError)


CHECKS = (
    variables_on_write,
    variables_on_write_equal,
    variables_on_write_outside,
    variables_drift_refused,
    variables_on_read,
    variables_on_read_outside,
    variables_rows,
)


def metrics_over_replicas(s: Subject) -> Iterator[Fact]:
    """``dj.metrics`` count every example once, over full and partial batches."""

    def make() -> Any:
        return metrics.MultiMetric(
            accuracy=metrics.Accuracy(threshold=0.5),
            loss=metrics.Average("loss"),
            spread=metrics.Welford("loss"),
        )

    def step(x: jax.Array, labels: jax.Array) -> None:
        metric.update(logits=x, labels=labels, loss=x)

    metric = s.made(make)
    x = (np.arange(14, dtype=np.float32) * 5 % 14) / 8
    labels = np.arange(14, dtype=np.int32) % 2
    data = [(x[a:b], labels[a:b]) for a, b in ((0, 8), (8, 13), (13, 14))]
    for batch in s.batches(data):
        s.run(step, *batch)
    found = metric.compute()
    yield Fact("Average", float(found["loss"]), float(x.mean()))
    yield Fact("its count", int(metric.loss.count[...]), 14)
    yield Fact("Accuracy", float(found["accuracy"]), float(((x >= 0.5) == labels).mean()))
    yield Fact("the mean of Welford", float(found["spread"].mean), float(x.mean()))
    deviation = float(found["spread"].standard_deviation)
    yield Fact("the deviation of Welford", deviation, float(x.std()))
    yield succeeds("all copies of the metrics are equal", lambda: check_in_sync(metric))


def _normalisation(axis: str | None) -> nnx.BatchNorm:
    return nnx.BatchNorm(1, momentum=0.5, axis_name=axis, rngs=nnx.Rngs(0))


def batch_norm(s: Subject) -> Iterator[Fact]:
    """Running statistics are those of the global batch, or the replicas' own ones averaged."""
    x = np.arange(1.0, 9.0, dtype=np.float32)[:, None]
    (batch,) = s.batches([x])
    own_variance = float(np.mean([part.var() for part in np.split(x, s.n)]))
    for kind, axis, variance in (("synchronised", "data", 5.25), ("local", None, own_variance)):
        norm = s.made(partial(_normalisation, axis))
        out = s.run(norm, batch)
        yield from same(f"the {kind} running mean", norm.mean[...], np.asarray([2.25], np.float32))
        wanted = np.asarray([0.5 + 0.5 * variance], np.float32)
        yield from same(f"the {kind} running variance", norm.var[...], wanted)
        if kind == "synchronised":
            wanted = (x - 4.5) / np.sqrt(np.float32(5.25 + 1e-5))
            joined = s.strategy.gather(out, axis=0)
            yield from same("the normalised batch", joined, wanted, rtol=1e-4)
        yield succeeds(f"the {kind} statistics are equal", partial(check_in_sync, norm))


def random_streams(s: Subject) -> Iterator[Fact]:
    """Replicas draw different numbers, replica 0 those of one device, and the stream stays one."""
    dropout = s.made(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(3)))
    alone = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
    drawn = []
    for call in ("first", "second"):
        parts = s.seen(lambda: dropout(jnp.ones(64)))
        yield from same(f"replica 0's {call} draw", parts[0], np.asarray(alone(jnp.ones(64))))
        drawn += [part.tobytes() for part in parts]
    yield Fact("how many of the replicas' draws differ", len(set(drawn)), 2 * s.n)
    yield Fact("how often the stream was used", int(dropout.rngs.count[...]), 2)
    yield succeeds("all copies of the stream are equal", lambda: check_in_sync(dropout))


def random_parameters(s: Subject) -> Iterator[Fact]:
    """The stream of parameters gives all replicas the same numbers, and keys in arguments too."""
    rngs = s.made(lambda: nnx.Rngs(params=7))
    wanted = np.asarray(jax.random.normal(nnx.Rngs(params=7).params(), (5,)))
    parts = s.seen(lambda: jax.random.normal(rngs.params(), (5,)))
    yield from on_all("the draw of the stream 'params'", parts, wanted)
    key = jax.random.key(5)
    parts = s.seen(lambda key: jax.random.normal(key, (5,)) + 0 * number(), key)
    wanted = np.asarray(jax.random.normal(key, (5,)))
    yield from on_all("the draw of a key that was passed", parts, wanted)


STATE_CHECKS = (metrics_over_replicas, batch_norm, random_streams, random_parameters)
