"""What a model reports: running loss, metrics and the user's logs; errors in the words of ``fit``."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribute_jax import metrics as ours
from distribute_jax._errors import ArgumentError, NotEqualError, PaddingLeakError, UnsupportedError
from distribute_jax._mesh import outside_mesh, put
from distribute_jax._messages import PyTree, leaf_text, listed, promoting
from distribute_jax._values import PerReplica
from distribute_jax.metrics import AUC, Average, Metric, Precision, Recall
from distribute_jax.strategies import Strategy, get_replica_context
from distribute_jax.training._metric_names import named
from distribute_jax.training._objective import Objective, at, named as named_output, weight_at

_OF_STATE = {"auc": AUC, "precision": Precision, "recall": Recall}
"""Names of metrics that are no mean over the examples."""

_BEFORE_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Where a word begins in the name of a class; AUC is one."""


class LossMean(Metric):
    """The mean over the batches of a loss, each batch weighing as much as it has examples."""

    def __init__(self) -> None:
        """Starts with nothing."""
        self.total = nnx.metrics.MetricState(jnp.zeros((), float))
        self.count = nnx.metrics.MetricState(jnp.zeros((), jnp.int32))

    @promoting
    def add(self, part: jax.Array, examples: tuple[Any, Any]) -> None:
        """Adds this replica's part of a loss.

        Args:
            part: summed over the replicas it is the loss of the global batch.
            examples: how many real ones this replica and the global batch have.
        """
        here, everywhere = examples
        self.total[...] += (part * everywhere).astype(self.total[...].dtype)
        self.count[...] += here

    @promoting
    def compute(self) -> jax.Array:
        """Gives the mean; NaN where nothing was added."""
        return self.total[...] / self.count[...]


class FunctionMean(Average):
    """The mean over the examples of what a function of targets and outputs gives for each.

    Args:
        identifier: the function, or its name as in Keras.
        objective: the losses of the model, which ``"accuracy"`` follows.
        key: the output that is measured; None for the only one.
        weighted: whether sample weights count.
    """

    def __init__(self, identifier: Any, objective: Objective, key: Any, weighted: bool) -> None:
        super().__init__()
        self.identifier, self.objective, self.key, self.weighted = (
            identifier, objective, key, weighted,
        )  # fmt: skip

    @promoting
    def update_from(self, y: Any, outputs: Any, weight: Any) -> None:
        """Adds a batch."""
        loss = self.objective.losses.get(self.key)
        _, function = named(self.identifier, loss, y, outputs)
        self.update(values=function(y, outputs), sample_weight=weight if self.weighted else None)


class Tracker(nnx.Module):
    """The running loss and metrics of training, or of an evaluation.

    Args:
        objective: the losses.
        metrics: what ``compile`` got: names, functions or metric objects, in a list, or in a dict by
            output.
        weighted: likewise, those which sample weights count in.
    """

    def __init__(self, objective: Objective, metrics: Any, weighted: Any) -> None:
        self.loss = LossMean()
        self.parts = nnx.Dict({name: LossMean() for name in objective.names().values()})
        found: dict[str, Any] = {}
        self._keys: dict[str, tuple[Any, bool]] = {}
        for given, counts in ((metrics, False), (weighted, True)):
            for key, name, metric in _slots(given, objective, weighted=counts):
                if any(metric is other for other in found.values()):
                    raise ArgumentError(
                        f"compile got one {type(metric).__name__} object twice, which would mix its "
                        "numbers. Make an object for each place."
                    )
                name = _unused(name, found)
                found[name] = metric
                self._keys[name] = (key, counts)
        self.metrics = nnx.Dict(found)
        self._place()

    def _place(self) -> None:
        """Puts metrics that the user made outside of the scope where the others lie."""
        lies = self.loss.total.get_raw_value().sharding
        for _, variable in nnx.iter_graph(self.metrics):
            if isinstance(variable, nnx.Variable):
                variable.set_raw_value(put(variable.get_raw_value(), lies))

    def reset(self) -> None:
        """Forgets everything."""
        for metric in (self.loss, *self.parts.values(), *self.metrics.values()):
            metric.reset()

    def update_loss(self, objective: Objective, total: Any, parts: Any, examples: Any) -> None:
        """Adds the losses of a batch, inside a step."""
        self.loss.add(total, examples)
        for key, name in objective.names().items():
            self.parts[name].add(parts[key], examples)

    def update_metrics(self, y: PyTree, outputs: PyTree, weight: PyTree) -> None:
        """Adds a batch to the metrics, inside a step."""
        for name, metric in self.metrics.items():
            key, weighted = self._keys[name]
            one_y, one_output = _one(y, key, "targets"), _one(outputs, key, "outputs")
            one_weight = weight_at(weight, key)
            if isinstance(metric, FunctionMean):
                metric.update_from(one_y, one_output, one_weight)
            else:
                _update(name, metric, one_y, one_output, one_weight if weighted else None)

    def compute(self) -> dict[str, Any]:
        """Gives loss and metrics by name, the loss first."""
        loss = {} if self.loss.count[...] == 0 else {"loss": self.loss.compute()}
        parts = {name: part.compute() for name, part in self.parts.items()}
        return {**loss, **parts, **_flat(self.metrics)}


def _flat(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the values of all metrics; one that gives several is named with each."""
    found: dict[str, Any] = {}
    for name, metric in metrics.items():
        value = metric.compute()
        if hasattr(value, "_asdict"):
            value = value._asdict()
        elif (
            not isinstance(value, dict)
            and not isinstance(value, jax.Array)
            and hasattr(value, "__dataclass_fields__")
        ):
            value = vars(value)
        if isinstance(value, dict):
            found.update({f"{name}_{key}": one for key, one in value.items()})
        else:
            found[name] = value
    return found


def _slots(given: Any, objective: Objective, *, weighted: bool) -> list[tuple[Any, str, Any]]:
    """Gives output, name and metric of each metric that compile got."""
    if given is None:
        return []
    if isinstance(given, dict):
        return [
            (key, f"{named_output(key)}_{name}", metric)
            for key, some in given.items()
            for _, name, metric in _of_output(_listed(some), objective, key, weighted=weighted)
        ]
    key = None if objective.is_single else next(iter(objective.losses))
    return _of_output(_listed(given), objective, key, weighted=weighted)


def _of_output(
    given: list[Any], objective: Objective, key: Any, *, weighted: bool
) -> list[tuple[Any, str, Any]]:
    found = []
    for one in given:
        if isinstance(one, str) and one.lower() in _OF_STATE:
            found.append((key, one, _OF_STATE[one.lower()]()))
        elif isinstance(one, nnx.metrics.Metric):
            found.append((key, _metric_name(one), one))
        elif isinstance(one, str) or callable(one):
            name = one if isinstance(one, str) else getattr(one, "__name__", type(one).__name__)
            found.append((key, name, FunctionMean(one, objective, key, weighted)))
        else:
            raise ArgumentError(
                f"compile got {one!r:.60} among its metrics. A metric is an nnx.Metric (or one of "
                'dj.metrics), a function of (y_true, y_pred), or a name such as "accuracy".'
            )
    return found


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _metric_name(metric: Any) -> str:
    """Names a metric object: by its class, in snake case, as Keras does."""
    own = getattr(metric, "name", None)
    if isinstance(own, str):
        return own
    return _BEFORE_WORD.sub("_", type(metric).__name__).lower()


def _unused(name: str, found: Mapping[str, Any]) -> str:
    if name in {"loss", "val_loss"}:
        raise ArgumentError(f"compile got a metric named {name!r}, which is the loss's own name.")
    number = 1
    chosen = name
    while chosen in found:
        chosen, number = f"{name}_{number}", number + 1
    return chosen


def _one(tree: Any, key: Any, what: str) -> Any:
    return tree if key is None or tree is None else at(tree, key, what, "metric")


def _update(name: str, metric: Any, y: Any, outputs: Any, weight: Any) -> None:
    """Updates a metric object by keywords: Flax's for classifiers, and Keras's."""
    known = inspect.signature(metric.update).parameters
    words = {
        "logits": outputs, "labels": y, "predictions": outputs, "targets": y,
        "y_pred": outputs, "y_true": y,
    }  # fmt: skip
    argname = getattr(metric, "argname", None)
    if isinstance(argname, str) and argname not in words and "labels" not in known:
        raise ArgumentError(
            f"The metric {name} ({type(metric).__name__}) reads {argname}=, and fit gives "
            f'{", ".join(words)}. Make it with one of these, as nnx.metrics.Average("y_pred").'
        )
    more: dict[str, Any] = {}
    if weight is not None:
        if "sample_weight" not in known:
            raise ArgumentError(
                f"The weighted metric {name} ({type(metric).__name__}) has no sample_weight. Use the "
                "metric of dj.metrics, or pass it as metrics=."
            )
        more["sample_weight"] = weight
    replica = get_replica_context()
    if "mask" in known and not isinstance(metric, Metric) and replica.is_padded:
        more["mask"] = _spread(replica.batch_mask, metric, words)
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    given = words if takes_all else {k: v for k, v in words.items() if k in known}
    metric.update(**given, **more)


def _spread(mask: jax.Array, metric: Any, words: Mapping[str, Any]) -> jax.Array:
    """Gives the mask a place for each value, since Flax's metrics match dims from the right."""
    measured = words.get(getattr(metric, "argname", ""), words["labels"])
    if isinstance(metric, nnx.metrics.Accuracy):
        measured = words["labels"]
    if not getattr(measured, "ndim", 0):
        return mask
    return jnp.broadcast_to(mask.reshape(-1, *(1,) * (measured.ndim - 1)), measured.shape)


@jax.jit
def copied(values: list[jax.Array]) -> list[jax.Array]:
    """Copies arrays on the devices, without waiting for them."""
    # The next step is given the state itself and takes its memory.
    return [jnp.copy(value) for value in values]


class Snapshot:
    """Loss and metrics as they were when it was taken; reading waits until that step is done."""

    def __init__(self, tracker: Tracker) -> None:
        """Takes a copy on the devices, which is dispatched and not waited for."""
        self._tracker = tracker
        with outside_mesh():
            self._values = copied([_held_here(v) for v in variables(tracker)])
        self._logs: dict[str, Any] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        return all(value.is_ready() for value in self._values)

    def logs(self) -> dict[str, Any]:
        """Gives the numbers by name."""
        if self._logs is None:
            shown = nnx.clone(self._tracker)
            host = jax.device_get(self._values)
            with outside_mesh():
                for variable, value in zip(variables(shown), host, strict=True):
                    variable.set_raw_value(value)
                self._logs = {name: _plain(value) for name, value in shown.compute().items()}
        return self._logs


def variables(tracker: Tracker) -> list[Any]:
    """Gives every variable of a tracker, in an order that copies keep."""
    return [v for _, v in nnx.iter_graph(tracker) if isinstance(v, nnx.Variable)]


def _held_here(variable: Any) -> Any:
    """Gives the value as this process alone can copy it: perhaps only one of a job takes a report."""
    value = variable.get_raw_value()
    if value.is_fully_addressable:
        return value
    if not value.is_fully_replicated:
        raise UnsupportedError(
            f"A metric of compile holds a {type(variable).__name__}, {leaf_text(value)}, of which each "
            "process has a part. In a job of several processes a metric keeps what is the same on all: sum "
            "it when it is written, in an nnx.metrics.MetricState or in a dj.Variable that is not ON_READ."
        )
    return value.addressable_data(0)


def as_keras(logs: dict[str, Any], return_dict: bool) -> Any:
    """Gives numbers as Keras returns them: a dict, a list, or the only one."""
    if return_dict:
        return logs
    values = list(logs.values())
    return values[0] if len(values) == 1 else values


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array


_MOST = 1000
"""Results that are left on the devices; reading each at once would wait for its step."""


class OwnLogs:
    """The running means of the numbers that an own step returns.

    Args:
        strategy: what ran the step, and sums the parts of the replicas.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self._waiting: list[Any] = []
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, returned: Any) -> None:
        """Takes what a dispatch returned, of one step or several."""
        self._waiting.append(returned)
        if len(self._waiting) == _MOST:
            self._read()

    def means(self) -> dict[str, float]:
        """Gives the mean of each number so far."""
        self._read()
        return {name: total / count for name, (total, count) in self._sums.items()}

    @property
    def text(self) -> str:
        """The state as text, for a backup: the names are known only after the first step."""
        self._read()
        return json.dumps(self._sums)

    @text.setter
    def text(self, text: str) -> None:
        self._waiting = []
        self._sums = {name: (total, count) for name, (total, count) in json.loads(text).items()}

    def _read(self) -> None:
        waiting, self._waiting = self._waiting, []
        for logs in waiting:
            if logs is not None and not isinstance(logs, dict):
                raise ArgumentError(
                    f"train_step returned {type(logs).__name__}. It returns a dict of numbers by "
                    "name, each this replica's part of a value of the global batch, or None."
                )
            for name, value in (logs or {}).items():
                whole = (
                    self._strategy.reduce("sum", value, axis=None)
                    if isinstance(value, PerReplica)
                    else value
                )
                steps = np.ravel(jax.device_get(whole)).astype(np.float64)
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + float(steps.sum()), count + steps.size


_WITHOUT = (
    "pass dj.data.from_arrays((x, y)).batch(n, drop_remainder=True) in place of arrays, or any data by "
    'strategy.distribute_dataset(data, dj.InputOptions(partial="drop")).'
)
_METRICS = """\
These metrics of compile take the padding of a partial batch for examples:
{lines}
Or leave partial batches out: {without} The state is as before the batch."""

_PADDING = f"In fit and evaluate, to leave partial batches out: {_WITHOUT}"

_UNEQUAL = (
    'compile(verify="first") compared the first batch to {what}. A module gives the same on any number of '
    "replicas where its forward pass takes each example by itself: no mean over dim 0, which is this "
    'replica\'s share alone; batch norm with axis_name="data". Dropout differs too: verify a module that '
    "was made with rate=0."
)
_KINDS = {"train": "train on", "test": "evaluate", "predict": "predict"}


@contextmanager
def inequality_explained(kind: str) -> Iterator[None]:
    """Says who asked for the comparison with one device, and what usually makes a difference.

    Args:
        kind: ``"train"``, ``"test"`` or ``"predict"``.
    """
    try:
        yield
    except NotEqualError as error:
        error.add_note(_UNEQUAL.format(what=_KINDS[kind]))
        raise


@contextmanager
def padding_explained(tracker: Tracker) -> Iterator[None]:
    """Names the metrics where it is they that saw the padding, and says how to do without it elsewhere.

    Raises:
        PaddingLeakError: in place of the one that was raised, or the same with a note.
    """
    try:
        yield
    except PaddingLeakError as error:
        found = [
            f"{name}: {_cure(metric)}"
            for name, metric in tracker.metrics.items()
            if f".metrics.{name}." in str(error)
        ]
        if found:
            text = _METRICS.format(lines=listed(found), without=_WITHOUT)
            raise PaddingLeakError(text) from error
        error.add_note(_PADDING)
        raise


def _cure(metric: Any) -> str:
    """Says how a metric leaves the padding out."""
    name = type(metric).__name__
    if isinstance(metric, ours.Metric):
        return (
            f"let {name}.update leave out the rows where dj.get_replica_context().batch_mask is False; "
            "it is None for a full batch"
        )
    if type(metric).__module__.startswith("flax.") and name in ours.__all__:
        return f"use dj.metrics.{name}"
    return f"let {name}.update take mask=None and leave out the rows where it is False"
