"""The running loss and the metrics of ``compile``, and the numbers that a user's step returns."""

from __future__ import annotations

import inspect
import json
from collections.abc import Container, Iterator, Mapping
from copy import copy
from itertools import chain, count, takewhile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax._absent import describe_foreign
from distribute_jax._checks import brief
from distribute_jax._errors import ArgumentError, NotEqualError, PaddingLeakError, UnsupportedError
from distribute_jax._interrupts import interrupts_held_back
from distribute_jax._mesh import outside_mesh, put
from distribute_jax._messages import PyTree, leaf_text, listed, promoting
from distribute_jax._padding import real_mask
from distribute_jax._values import PerReplica
from distribute_jax.metrics import MeanMetricWrapper, Metric
from distribute_jax.metrics._keras import from_name
from distribute_jax.metrics._metric import in_snake_case, keywords, update_with
from distribute_jax.strategies import Strategy, get_replica_context
from distribute_jax.training._objective import (
    Objective,
    output_name,
    select_output,
    select_weight,
    variables,
)


def metric_slots(metrics: Any, objective: Objective) -> Iterator[tuple[Any, str, str, Any]]:
    """Yields output key, name prefix, name and metric object for each metric of ``compile``."""
    keys = list(objective.losses)
    if isinstance(metrics, (list, tuple)) and len(keys) > 1 and keys == [*range(len(metrics))]:
        metrics = dict(enumerate(metrics))
    if isinstance(metrics, dict):
        outputs = [
            (key, f"{output_name(key)}_", identifiers) for key, identifiers in metrics.items()
        ]
    elif metrics and len(keys) > 1:
        raise ArgumentError(
            f"compile got the metrics {brief(metrics)} for the outputs {', '.join(map(str, keys))}. With "
            "several outputs say which metrics each has: "
            f"metrics={{{', '.join(f'{key!r}: […]' for key in keys)}}}."
        )
    else:
        outputs = [(None if objective.is_single else keys[0], "", metrics)]
    for key, prefix, identifiers in outputs:
        if not isinstance(identifiers, (list, tuple)):
            identifiers = [] if identifiers is None else [identifiers]
        for identifier in identifiers:
            yield key, prefix, *find_metric(identifier, objective.losses.get(key))


def find_metric(metric: Any, loss: Any) -> tuple[str, Any]:
    """Returns name and object of a metric that is an object, a function or a name."""
    if isinstance(metric, str):
        return metric, from_name(metric, from_logits=bool(getattr(loss, "from_logits", False)))
    if isinstance(metric, nnx.metrics.Metric):
        name = getattr(metric, "name", None)
        return name if isinstance(name, str) else in_snake_case(type(metric)), metric
    if callable(metric) and not isinstance(metric, type) and not describe_foreign(metric):
        return getattr(metric, "__name__", type(metric).__name__), MeanMetricWrapper(metric)
    raise ArgumentError(
        "metrics must be objects of dj.metrics or nnx, with their parentheses, functions of (y_true, "
        f'y_pred), or names such as "accuracy"; got {brief(metric)}.'
    )


class LossMean(Metric):
    """The mean of a loss over the batches, weighted by their numbers of examples."""

    def __init__(self) -> None:
        self.total = nnx.metrics.MetricState(jnp.zeros((), float))
        self.count = nnx.metrics.MetricState(jnp.zeros((), jnp.int32))

    @promoting
    def add(self, part: jax.Array, examples: tuple[Any, Any]) -> None:
        """Adds this replica's part of a loss; ``examples`` counts this replica and the batch."""
        local, total = examples
        self.total[...] += (part * total).astype(self.total[...].dtype)
        self.count[...] += local

    @promoting
    def compute(self) -> jax.Array:
        return self.total[...] / self.count[...]  # NaN if nothing was added


class Tracker(nnx.Module):
    """The running loss and metrics of training or evaluation; ``weighted`` metrics use sample weights."""

    def __init__(self, objective: Objective, metrics: Any, weighted: Any) -> None:
        self.loss = LossMean()
        self.spikes: Any = nnx.data(None)
        """The ``LossWindow`` during a ``fit`` with the callback ``LossSpike``."""
        self.parts = nnx.Dict({name: LossMean() for name in objective.names().values()})
        by_name: dict[str, Any] = {}
        self._keys: dict[str, tuple[Any, bool]] = {}
        for argument, is_weighted in ((metrics, False), (weighted, True)):
            for key, prefix, stem, metric in metric_slots(argument, objective):
                if any(metric is other for other in by_name.values()):
                    raise ArgumentError(
                        f"compile got one {type(metric).__name__} object twice, which would mix its "
                        "numbers. Make an object for each place."
                    )
                is_repeated = is_weighted and prefix + stem in by_name
                name = f"{prefix}{'weighted_' * is_repeated}{stem}"
                name = _unique_name(name, [*by_name, *self.parts])
                by_name[name] = metric
                self._keys[name] = (key, is_weighted)
        names = {"loss", *self.parts, *by_name}
        for name in sorted(name for name in names if f"val_{name}" in names):
            raise ArgumentError(
                f"compile got an output or a metric whose number is named {f'val_{name}'!r}, which is the "
                f"validation's {name!r}. Rename it."
            )
        self.metrics = nnx.Dict(by_name)
        sharding = self.loss.total.get_raw_value().sharding
        for variable in variables(self.metrics).values():  # may have been made outside the scope
            variable.set_raw_value(put(variable.get_raw_value(), sharding))

    def reset(self) -> None:
        # An interrupt within an operation that JAX runs by itself can leave JAX believing that it is tracing.
        with interrupts_held_back():
            for metric in (self.loss, *self.parts.values()):
                metric.reset()
            for metric in self.metrics.values():
                _newest(metric, "reset", "reset_state")()

    def update_loss(self, objective: Objective, total: Any, parts: Any, examples: Any) -> None:
        self.loss.add(total, examples)
        for key, name in objective.names().items():
            self.parts[name].add(parts[key], examples)

    def update_metrics(self, y: PyTree, outputs: PyTree, weight: PyTree) -> None:
        for name, metric in self.metrics.items():
            key, weighted = self._keys[name]
            if key is None:
                y_true, y_pred = y, outputs
            else:
                y_true = None if y is None else select_output(y, key, "targets", "metric")
                y_pred = select_output(outputs, key, "outputs", "metric")
            sample_weight = select_weight(weight, key, y) if weighted else None
            _update_by_keyword(name, metric, y_true, y_pred, sample_weight)

    def compute(self) -> dict[str, Any]:
        """Returns loss and metrics by name, the loss first."""
        loss = {} if self.loss.count[...] == 0 else {"loss": self.loss.compute()}
        parts = {name: part.compute() for name, part in self.parts.items()}
        return {**loss, **parts, **_named_values(self.metrics)}


def _named_values(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of all metrics; one with several values has several entries."""
    values: dict[str, Any] = {}
    for name, metric in metrics.items():
        value = _newest(metric, "compute", "result")()
        if hasattr(value, "__dataclass_fields__") and not isinstance(value, jax.Array):
            value = vars(value)
        is_dict = isinstance(value, dict)
        values |= {f"{name}_{key}": v for key, v in value.items()} if is_dict else {name: value}
    return values


def _unique_name(name: str, names: Container[str]) -> str:
    if name == "loss":
        raise ArgumentError(f"compile got a metric named {name!r}, which is the name of the loss.")
    numbered = (f"{name}_{number}" for number in count(1))
    return next(candidate for candidate in chain([name], numbered) if candidate not in names)


def _newest(metric: Any, *names: str) -> Any:
    """Returns Flax's or Keras's method, whichever the class overrides last; Flax's where it has both."""
    defining = ((cls, name) for cls in type(metric).__mro__ for name in names if name in vars(cls))
    return getattr(metric, next(name for _, name in defining))


def _update_by_keyword(name: str, metric: Any, y: Any, outputs: Any, weight: Any) -> None:
    """Updates a metric object with the keywords that its ``update`` takes, Flax's or Keras's."""
    if _newest(metric, "update", "update_state") != metric.update:
        metric.update_state(y, outputs, **({} if weight is None else {"sample_weight": weight}))
        return
    known = inspect.signature(metric.update).parameters
    inputs = keywords(y, outputs)
    argname = getattr(metric, "argname", None)
    if isinstance(argname, str) and argname not in inputs and "labels" not in known:
        raise ArgumentError(
            f"The metric {name} reads {argname}=, and fit passes {', '.join(inputs)}. Make it with one of "
            'these, as nnx.metrics.Average("y_pred").'
        )
    options: dict[str, Any] = {}
    if weight is not None:
        if "sample_weight" not in known:
            raise ArgumentError(
                f"The weighted metric {name} ({type(metric).__name__}) has no sample_weight. Use the "
                "metric of dj.metrics, or pass it as metrics=."
            )
        options["sample_weight"] = weight
    replica = get_replica_context()
    if "mask" in known and not isinstance(metric, Metric) and replica.is_padded:
        options["mask"] = _mask_of_values(name, metric, inputs, replica)
    update_with(metric, inputs, **options)


def _mask_of_values(name: str, metric: Any, inputs: Mapping[str, Any], replica: Any) -> jax.Array:
    """Returns a mask of the values' shape, since Flax's metrics broadcast from the last dim."""
    values = inputs["labels"]
    if not isinstance(metric, nnx.metrics.Accuracy):
        values = inputs.get(getattr(metric, "argname", ""), values)
    shape = getattr(values, "shape", ())
    mask = real_mask(f"The metric {name}", "values", shape, replica)
    return replica.batch_mask if mask is None else jnp.broadcast_to(mask, shape)


@jax.jit
def copy_arrays(values: list[jax.Array]) -> list[jax.Array]:
    """Copies arrays on the devices, without waiting, since the next step is donated the originals."""
    return [jnp.copy(value) for value in values]


class Snapshot:
    """A copy of loss and metrics on the devices; reading it waits for the steps before.

    ``returned`` are the numbers of a user's step, which may not update loss and metrics.
    """

    def __init__(self, tracker: Tracker, returned: StepLogs | None = None) -> None:
        self._tracker, self._returned = tracker, returned
        with outside_mesh():
            self._values = copy_arrays([_local_copy(v) for v in variables(tracker).values()])
        self._logs: dict[str, Any] | None = None

    @property
    def is_ready(self) -> bool:
        returned = [] if self._returned is None else self._returned.pending
        return all(map(_is_computed, [*self._values, *returned]))

    def logs(self) -> dict[str, Any]:
        if self._logs is None:
            tracker = nnx.clone(self._tracker)
            host = jax.device_get(self._values)
            with outside_mesh():
                for variable, value in zip(variables(tracker).values(), host, strict=True):
                    variable.set_raw_value(value)
                is_empty = self._returned is not None and not tracker.loss.count[...]
                with np.errstate(divide="ignore", invalid="ignore"):  # NaN, as on devices
                    computed = {} if is_empty else tracker.compute()
                arrays = {name: np.asarray(value) for name, value in computed.items()}
                self._logs = {name: a if a.ndim else a.item() for name, a in arrays.items()}
            self._logs |= {} if self._returned is None else self._returned.means()
        return self._logs


def _is_computed(tree: PyTree) -> bool:
    return all(leaf.is_ready() for leaf in jax.tree.leaves(tree) if hasattr(leaf, "is_ready"))


def _local_copy(variable: Any) -> Any:
    """Returns a value that this process can copy alone, since only the chief may take a snapshot."""
    value = variable.get_raw_value()
    if value.is_fully_addressable:
        return value
    if not value.is_fully_replicated:
        raise UnsupportedError(
            f"A metric of compile holds a {type(variable).__name__}, {leaf_text(value)}, of which each "
            "process has a part. In a job of several processes its state must be the same on all: sum it "
            "when it is written, in an nnx.metrics.MetricState or in a dj.Variable that is not ON_READ."
        )
    return value.addressable_data(0)


def as_keras(logs: dict[str, Any], return_dict: bool) -> Any:
    if return_dict:
        return logs
    values = list(logs.values())
    return values[0] if len(values) == 1 else values


_MAX_UNREAD = 1000
"""How many results may stay on the devices; reading one at once would wait for its step."""


class StepLogs:
    """Running means of the numbers that a user's step returns, summed over the replicas."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.reset()

    def reset(self) -> None:
        self.pending: list[Any] = []
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, returned: Any, num_steps: int) -> None:
        """Adds the results of a dispatch."""
        self.pending.append((returned, num_steps))
        if len(self.pending) == _MAX_UNREAD:
            self._read_all()

    def copy(self) -> StepLogs:
        ready = list(takewhile(_is_computed, self.pending))
        self._read(ready)
        self.pending = self.pending[len(ready) :]
        new = copy(self)
        new.pending, new._sums = list(self.pending), dict(self._sums)
        return new

    def means(self) -> dict[str, float]:
        self._read_all()
        return {name: total / count for name, (total, count) in self._sums.items()}

    @property
    def text(self) -> str:
        """The state for a checkpoint, as text, because its names are unknown before the first step."""
        self._read_all()
        return json.dumps(self._sums)

    @text.setter
    def text(self, text: str) -> None:
        self.pending = []
        self._sums = {name: (total, count) for name, (total, count) in json.loads(text).items()}

    def _read_all(self) -> None:
        pending, self.pending = self.pending, []
        self._read(pending)

    def _read(self, pending: list[Any]) -> None:
        for returned, num_steps in pending:
            for name, value in (self.strategy._fetch(returned) or {}).items():
                if isinstance(value, PerReplica):
                    value = self.strategy.reduce("sum", value, axis=None)
                # A number of Python is that of all steps.
                steps = np.broadcast_to(np.ravel(jax.device_get(value)), num_steps)
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + float(steps.sum(dtype=float)), count + num_steps


_DROP_PARTIAL = (
    "pass dj.data.from_arrays((x, y)).batch(n, drop_remainder=True) in place of arrays, or any data by "
    'strategy.distribute_dataset(data, dj.InputOptions(partial="drop")).'
)
_NOT_EQUAL = (
    'compile(verify="first") compared the first batch to {verb}. A module gives the same on any number of '
    "replicas if its forward pass treats each example separately: no mean over dim 0, which is only this "
    'replica\'s share; batch norm with axis_name="data".'
)
_LEAKING_METRICS = """\
These metrics of compile treat padding as examples:
{names}
Use that of dj.metrics if there is one, or let its update leave out the rows where \
dj.get_replica_context().batch_mask is False; it is None for a full batch.
"""
_VERBS = {"train": "train on", "test": "evaluate", "predict": "predict"}


def failure_hint(kind: str, tracker: Tracker, is_requested: bool, error: Exception) -> str:
    """Returns what to do about a step that differs from one device or depends on the padding."""
    if isinstance(error, NotEqualError):
        if is_requested:
            return _NOT_EQUAL.format(verb=_VERBS[kind])
        return f'In fit, for a {kind}_step that is meant to differ: compile(..., verify="off").'
    if not isinstance(error, PaddingLeakError):
        return ""
    names = [name for name in tracker.metrics if f".metrics.{name}." in str(error)]
    hint = _LEAKING_METRICS.format(names=listed(names)) if names else ""
    return f"{hint}In fit and evaluate, to leave partial batches out: {_DROP_PARTIAL}"
