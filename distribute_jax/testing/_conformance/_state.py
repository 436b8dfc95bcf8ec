"""Checks of state: ``Variable``, metrics, batch norm, random streams, and training against one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from distribute_jax import metrics
from distribute_jax._errors import NotEqualError, OutOfSyncError, PaddingLeakError
from distribute_jax.collectives import check_in_sync
from distribute_jax.losses import compute_average_loss
from distribute_jax.program import RunOptions
from distribute_jax.testing._conformance import Subject, replica, replica_number
from distribute_jax.training import Optimizer
from distribute_jax.variables import Variable, VariableAggregation, VariableSynchronization

_NONE, _SUM = VariableAggregation.NONE, VariableAggregation.SUM
_MEAN, _FIRST = VariableAggregation.MEAN, VariableAggregation.ONLY_FIRST_REPLICA
_ON_READ = VariableSynchronization.ON_READ

_METHODS = {"assign": (0, 1), "assign_add": (1, 1), "assign_sub": (1, -1)}
"""The factors of the old value and of the written one in the new value."""


def _aggregates(n: int) -> dict[VariableAggregation, float]:
    """Returns the aggregates of 1, 2, …, n, the values of the replicas."""
    return {_SUM: n * (n + 1) / 2, _MEAN: (n + 1) / 2, _FIRST: 1.0}


def _variable(
    s: Subject, aggregation: VariableAggregation, value: Any = 10.0, **kinds: Any
) -> Variable:
    return s.create(lambda: Variable(value, aggregation=aggregation, **kinds))


def _one_per_method(s: Subject, aggregation: VariableAggregation) -> dict[str, Variable]:
    return {method: _variable(s, aggregation) for method in _METHODS}


def variables_on_write(s: Subject) -> None:
    """Replica r writes r + 1, then all write 4: every replica gets their sum, mean or first."""
    equal = {a: 4.0 * (s.n if a is _SUM else 1) for a in VariableAggregation}
    _written(s, "r + 1", replica_number, _aggregates(s.n))
    _written(s, "4", lambda: 4.0, equal)


def _written(
    s: Subject, what: str, write: Callable[[], Any], expected: dict[VariableAggregation, float]
) -> None:
    variables = {aggregation: _one_per_method(s, aggregation) for aggregation in expected}

    def step() -> Any:
        return {
            aggregation.name: {m: getattr(v, m)(write()) for m, v in named.items()}
            for aggregation, named in variables.items()
        }

    parts = s.run_per_replica(step)
    for aggregation, written in expected.items():
        for method, (keeps, sign) in _METHODS.items():
            value, name = np.float32(10 * keeps + sign * written), f"{method} of {what}"
            returned = [part[aggregation.name][method] for part in parts]
            s.expect_all(f"what {name} returns under {aggregation.name}", returned, value)
            copies = [np.asarray(copy) for copy in variables[aggregation][method].values]
            s.expect_all(f"the variable after {name} under {aggregation.name}", copies, value)


def variables_on_write_outside(s: Subject) -> None:
    """Outside ``run`` assigning, adding and subtracting 4 act on all copies as on a plain variable."""
    count = len(s.strategy.extended.parameter_devices)
    for aggregation in VariableAggregation:
        for method, variable in _one_per_method(s, aggregation).items():
            keeps, sign = _METHODS[method]
            s.create(partial(getattr(variable, method), 4.0))
            copies = [np.asarray(copy) for copy in variable.values]
            expected = np.float32(10 * keeps + sign * 4.0)
            what = f"{method}(4) outside under {aggregation.name}"
            s.expect(f"the number of copies after {what}", len(copies), count)
            s.expect_all(what, copies, expected)


def variables_drift_refused(s: Subject) -> None:
    """With aggregation NONE, writing different values is refused, and nothing changes."""
    variable = _variable(s, _NONE)
    if s.n > 1:
        call = lambda: s.run(lambda: variable.assign(replica_number()))  # noqa: E731
        s.expect_error("different values under NONE", call, OutOfSyncError)
        s.expect("the variable afterwards", float(variable.numpy()), 10.0)


def variables_on_read(s: Subject) -> None:
    """Each replica writes and reads its own value; outside ``run`` the variable is their aggregate."""
    variables = {a.name: _variable(s, a, synchronization=_ON_READ) for a in VariableAggregation}

    def step() -> Any:
        return {
            name: (v.assign(replica_number()), v.assign_add(1.0), v.read_value())
            for name, v in variables.items()
        }

    numbers = np.arange(1, s.n + 1, dtype=np.float32)
    expected = [dict.fromkeys(sorted(variables), (i, i + 1, i + 1)) for i in numbers]
    s.expect_each("assign, assign_add and read", s.run_per_replica(step), expected)
    for name, variable in variables.items():
        components = [np.asarray(value) for value in variable.values]
        s.expect_each(f"the component under {name}", components, list(numbers + 1))
    for aggregation, total in _aggregates(s.n).items():
        aggregate = total + (s.n if aggregation is _SUM else 1)
        value = float(variables[aggregation.name].numpy())
        s.expect(f"the value outside under {aggregation.name}", value, aggregate)
    if s.n > 1:
        s.expect_error("reading NONE outside", variables["NONE"].numpy, ValueError)


def variables_on_read_outside(s: Subject) -> None:
    """Outside ``run`` an initial or assigned value reads back; only a mean or first value can be added to."""
    for aggregation in (_SUM, _MEAN, _FIRST):
        name = aggregation.name
        variable = _variable(s, aggregation, synchronization=_ON_READ)
        s.expect(f"the initial value under {name}", float(variable.numpy()), 10.0)
        if aggregation is _SUM and s.n > 1:
            s.expect_error(
                "assign_add outside under SUM", partial(variable.assign_add, 4), ValueError
            )
        elif aggregation is not _SUM:
            variable.assign_add(4.0)
            s.expect(f"assign_add(4) outside under {name}", float(variable.numpy()), 14.0)
            variable.assign_sub(8.0)
            s.expect(f"assign_sub(8) outside under {name}", float(variable.numpy()), 6.0)
        variable.assign(4.0)
        s.expect(f"assign(4) outside under {name}", float(variable.numpy()), 4.0)
        shares = sum(float(value) for value in variable.values)
        expected = 4.0 if aggregation is _SUM else 4.0 * s.n
        s.expect(f"the sum of the components under {name}", shares, expected)
    integer = _variable(s, _SUM, 1, synchronization=_ON_READ)
    integer.assign(5)
    s.expect("an integer 5 assigned under SUM", integer.numpy(), np.asarray(5, "int32"))
    if s.n > 1:
        none = _variable(s, _NONE, synchronization=_ON_READ)
        s.expect_error("assign outside under NONE", lambda: none.assign(4.0), ValueError)


def variables_rows(s: Subject) -> None:
    """``scatter_add`` aggregates the replicas' changes of single rows; ON_READ variables refuse it."""
    last_row = {_SUM: float(s.n), _MEAN: 1.0, _FIRST: 1.0}
    variables = {a: _variable(s, a, np.zeros(s.n + 1, np.float32)) for a in last_row}

    def step() -> None:
        rows = jnp.stack([replica_number().astype(int) - 1, jnp.int32(n)])
        for variable in variables.values():
            variable.scatter_add(rows, jnp.ones(2))

    n = s.n
    s.run(step)
    for aggregation, last in last_row.items():
        firsts = {_SUM: np.ones(n), _MEAN: np.full(n, 1 / n), _FIRST: np.eye(n)[0]}[aggregation]
        expected = np.append(firsts, last).astype(np.float32)
        what = f"1 added to row r and to the last, under {aggregation.name}"
        s.expect(what, variables[aggregation].numpy(), expected)
    local = _variable(s, _SUM, np.zeros(3, np.float32), synchronization=_ON_READ)
    call = lambda: local.scatter_add([0], [1.0])  # noqa: E731
    s.expect_error("scatter_add of an ON_READ variable", call, NotImplementedError)


def metrics_over_replicas(s: Subject) -> None:
    """``dj.metrics`` count every example once, over full and partial batches."""

    def make() -> Any:
        return metrics.MultiMetric(
            accuracy=metrics.Accuracy(threshold=0.5),
            loss=metrics.Average("loss"),
            spread=metrics.Welford("loss"),
        )

    def step(x: jax.Array, labels: jax.Array) -> None:
        metric.update(logits=x, labels=labels, loss=x)

    metric = s.create(make)
    x = (np.arange(14, dtype=np.float32) * 5 % 14) / 8
    labels = np.arange(14, dtype=np.int32) % 2
    data = [(x[a:b], labels[a:b]) for a, b in ((0, 8), (8, 13), (13, 14))]
    for batch in s.batches(data):
        s.run(step, *batch)
    values = metric.compute()
    s.expect("Average", float(values["loss"]), float(x.mean()))
    s.expect("its count", int(metric.loss.count[...]), 14)
    s.expect("Accuracy", float(values["accuracy"]), float(((x >= 0.5) == labels).mean()))
    s.expect("the mean of Welford", float(values["spread"].mean), float(x.mean()))
    deviation = float(values["spread"].standard_deviation)
    s.expect("the deviation of Welford", deviation, float(x.std()))
    s.expect_success("all copies of the metrics are equal", lambda: check_in_sync(metric))


def batch_norm(s: Subject) -> None:
    """Running statistics are those of the global batch, or the mean of those of the replicas' shares."""
    x = np.arange(1.0, 9.0, dtype=np.float32)[:, None]
    (batch,) = s.batches([x])
    local_variance = float(np.mean([part.var() for part in np.split(x, s.n)]))
    for kind, axis, variance in (("synchronised", "data", 5.25), ("local", None, local_variance)):
        norm = s.create(partial(nnx.BatchNorm, 1, momentum=0.5, axis_name=axis, rngs=nnx.Rngs(0)))
        out = s.run(norm, batch)
        s.expect(f"the {kind} running mean", norm.mean[...], np.asarray([2.25], np.float32))
        expected = np.asarray([0.5 + 0.5 * variance], np.float32)
        s.expect(f"the {kind} running variance", norm.var[...], expected)
        if kind == "synchronised":
            expected = (x - 4.5) / np.sqrt(np.float32(5.25 + 1e-5))
            joined = s.strategy.gather(out, axis=0)
            s.expect("the normalised batch", joined, expected, rtol=1e-4)
        s.expect_success(f"the {kind} statistics are equal", partial(check_in_sync, norm))


def random_streams(s: Subject) -> None:
    """Replicas draw different numbers, replica 0 those of one device, and the stream stays in sync."""
    dropout = s.create(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(3)))
    alone = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
    drawn = []
    for call in ("first", "second"):
        parts = s.run_per_replica(lambda: dropout(jnp.ones(64)))
        s.expect(f"replica 0's {call} draw", parts[0], np.asarray(alone(jnp.ones(64))))
        drawn += [part.tobytes() for part in parts]
    s.expect("how many of the replicas' draws differ", len(set(drawn)), 2 * s.n)
    s.expect("how often the stream was used", int(dropout.rngs.count[...]), 2)
    s.expect_success("all copies of the stream are equal", lambda: check_in_sync(dropout))


def random_parameters(s: Subject) -> None:
    """The stream ``params`` gives all replicas the same numbers, and so do keys in arguments."""
    rngs = s.create(lambda: nnx.Rngs(params=7))
    expected = np.asarray(jax.random.normal(nnx.Rngs(params=7).params(), (5,)))
    parts = s.run_per_replica(lambda: jax.random.normal(rngs.params(), (5,)))
    s.expect_all("the draw of the stream 'params'", parts, expected)
    key = jax.random.key(5)
    parts = s.run_per_replica(lambda key: jax.random.normal(key, (5,)) + 0 * replica_number(), key)
    expected = np.asarray(jax.random.normal(key, (5,)))
    s.expect_all("the draw of a key that was passed", parts, expected)


_TOLERANCE = 1e-4
"""The rounding error of float32 after a few steps is smaller."""
_RATE, _MOMENTUM, _NORM = 0.2, 0.9, 1.0


def _transformation() -> Any:
    """Returns clipping, which needs the gradient of the global batch, and momentum, which is state."""
    return optax.chain(optax.clip_by_global_norm(_NORM), optax.sgd(_RATE, momentum=_MOMENTUM))


def _data(sizes: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns global batches of inputs and targets."""
    rng = np.random.default_rng(0)
    draw = [(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in sizes]
    return [(x.astype(np.float32), y.astype(np.float32)) for x, y in draw]


def _arrays(node: Any) -> list[np.ndarray]:
    leaves = map(np.asarray, jax.tree.leaves(nnx.state(node)))
    return [leaf for leaf in leaves if leaf.ndim]


def _by_hand(model: Any, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Trains on global batches in NumPy, with the analytic gradients."""
    b, w = (leaf.astype(np.float64) for leaf in _arrays(model))
    momenta, losses = [np.zeros_like(b), np.zeros_like(w)], []
    for x, y in _data(sizes):
        error = x @ w + b - y[:, None]
        losses.append((error**2).mean())
        gradients = [2 * error.mean(0), 2 * x.T @ error / len(x)]
        scale = min(1.0, _NORM / np.sqrt(sum((g**2).sum() for g in gradients)))
        momenta = [_MOMENTUM * m + scale * g for m, g in zip(momenta, gradients, strict=True)]
        b, w = b - _RATE * momenta[0], w - _RATE * momenta[1]
    trained = {"losses": np.asarray(losses), "parameters": [b, w], "momenta": momenta}
    return jax.tree.map(np.float32, trained)


def _equals_by_hand(
    s: Subject, losses: Any, model: Any, optimizer: Any, expected: dict[str, Any]
) -> None:
    losses = np.asarray(losses, np.float32)
    trained = {"losses": losses, "parameters": _arrays(model), "momenta": _arrays(optimizer)}
    s.expect("the training", trained, expected, rtol=_TOLERANCE)


def _flax_optimizer(model: Any) -> Any:
    return nnx.Optimizer(model, _transformation(), wrt=nnx.Param)


def _model_and_optimizer(
    s: Subject, make_optimizer: Callable[[Any], Any] = _flax_optimizer
) -> tuple[Any, Any]:
    model = s.create(lambda: nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    return model, s.create(lambda: make_optimizer(model))


def _gradients(model: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
    def loss(model: Any) -> jax.Array:
        return compute_average_loss(jnp.square(model(x)[:, 0] - y))

    return nnx.value_and_grad(loss)(model)


def _step(model: Any, optimizer: Any) -> Callable[..., Any]:
    """Returns a step that sums the gradients explicitly, or leaves that to ``dj.Optimizer``."""

    def step(x: jax.Array, y: jax.Array) -> Any:
        loss, gradients = _gradients(model, x, y)
        if not isinstance(optimizer, Optimizer):
            gradients = replica().all_reduce("sum", gradients)
        optimizer.update(model, gradients)
        return replica().all_reduce("sum", loss)

    return step


def _equal_training(s: Subject, make_optimizer: Callable[[Any], Any]) -> None:
    sizes = (8, 8, 5, 1)
    model, optimizer = _model_and_optimizer(s, make_optimizer)
    expected, step = _by_hand(model, sizes), _step(model, optimizer)
    losses = [float(s.run(step, *batch)) for batch in s.batches(_data(sizes))]
    _equals_by_hand(s, losses, model, optimizer, expected)
    s.expect_success("all copies of the state are equal", lambda: check_in_sync((model, optimizer)))


def training(s: Subject) -> None:
    """``nnx.Optimizer`` on summed gradients: four steps, two of them on partial batches."""
    _equal_training(s, _flax_optimizer)


def training_with_dj_optimizer(s: Subject) -> None:
    """``dj.Optimizer`` sums the gradients itself, before they are clipped."""
    _equal_training(s, lambda model: Optimizer(model, _transformation()))


def run_steps(s: Subject) -> None:
    """Batches scanned in one program, and a partial remainder, train like single steps."""
    sizes = (8, 8, 8, 5)
    model, optimizer = _model_and_optimizer(s)
    expected = _by_hand(model, sizes)
    step, iterator = _step(model, optimizer), iter(s.strategy.distribute_dataset(_data(sizes)))
    take = partial(s.strategy.run_steps, step, iterator, 3, s.options)
    losses = [np.asarray(take()), np.asarray(take())]
    s.expect("how many steps ran in each call", [len(part) for part in losses], [3, 1])
    _equals_by_hand(s, np.concatenate(losses), model, optimizer, expected)
    s.expect_error("run_steps at the end", take, StopIteration)


def donation(s: Subject) -> None:
    """State is updated in place; with ``donate_state=False``, and under pmap, the old arrays stay."""
    model, optimizer = _model_and_optimizer(s)
    step, (batch,) = _step(model, optimizer), s.batches(_data((8,)))
    for donate in (False, True):
        options = RunOptions(lowering=s.options.lowering, donate_state=donate)
        # A reference to the whole array would keep it from being donated.
        old = model.kernel.get_raw_value().addressable_data(0)
        s.strategy.run(step, args=batch, options=options)
        is_expected = donate and s.options.lowering != "pmap"
        what = f"the old array is deleted with donate_state={donate}"
        s.expect(what, bool(old.is_deleted()), is_expected)


def partial_batches(s: Subject) -> None:
    """Sums, means, masks and results of 5 examples leave out the padding, and leaks are detected."""

    def step(x: jax.Array) -> Any:
        total = replica().all_reduce("sum", jax.numpy.sum(x * replica().batch_mask))
        mean = replica().all_reduce("sum", compute_average_loss(x**2))
        return total, mean, replica().all_reduce("sum", replica().batch_mask.sum()), 2 * x

    rows, rest = np.arange(8, dtype=np.float32) + 1, np.arange(5, dtype=np.float32) + 1
    full, partial = s.batches([rows, rest])
    for batch, x in ((full, rows), (partial, rest)):
        total, mean, count, doubled = s.run(step, batch)
        name = f"{len(x)} examples"
        s.expect(f"their number, of {name}", int(count), len(x))
        s.expect(f"the sum of {name}", float(total), float(x.sum()))
        s.expect(f"the mean square of {name}", float(mean), float((x**2).mean()))
        s.expect(f"twice {name}", s.strategy.gather(doubled, axis=0), 2 * x)
    call = lambda: s.run(lambda x: replica().all_reduce("sum", x.sum()), partial)  # noqa: E731
    s.expect_error("a sum without the mask", call, PaddingLeakError)


def unreduced_gradients_refused(s: Subject) -> None:
    """Gradients that were not summed, and those that were summed twice, are refused."""
    (batch,) = s.batches(_data((8,)))
    model, optimizer = _model_and_optimizer(s)

    def forgets(x: jax.Array, y: jax.Array) -> None:
        optimizer.update(model, _gradients(model, x, y)[1])

    summing = s.create(lambda: Optimizer(model, _transformation()))

    def twice(x: jax.Array, y: jax.Array) -> None:
        summing.update(model, replica().all_reduce("sum", _gradients(model, x, y)[1]))

    if s.n > 1:
        s.expect_error(
            "gradients that were not summed", lambda: s.run(forgets, *batch), OutOfSyncError
        )
        s.expect_error("gradients summed twice", lambda: s.run(twice, *batch), OutOfSyncError)


def verify_option(s: Subject) -> None:
    """``RunOptions(verify=…)`` passes a correct step and refuses a sum of means."""
    (batch,) = s.batches([_data((8,))[0][0]])
    options = RunOptions(lowering=s.options.lowering, verify="always")

    def run(step: Callable[..., Any]) -> Any:
        return s.strategy.run(step, args=(batch,), options=options)

    right = lambda x: replica().all_reduce("mean", x.mean(0))  # noqa: E731
    wrong = lambda x: replica().all_reduce("sum", x.mean(0))  # noqa: E731
    s.expect_success("the mean of means", lambda: run(right))
    if s.n > 1:
        s.expect_error("the sum of means", lambda: run(wrong), NotEqualError)
