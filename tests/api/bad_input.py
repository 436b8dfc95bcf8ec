"""Generates calls of the public API with wrong arguments from its signatures, and judges their errors.

Each case passes a wrong value for one parameter of one public function, class or method, and good values for
the others. A new function is called as soon as it is public; ``GOOD`` has good values by the name of the
argument, and ``RECEIVERS`` the objects whose methods are called.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import enum
import functools
import inspect
import io
import linecache
import logging
import os
import random
import re
import signal
import socket
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from public_names import public_objects

import distribute_jax as dj

LIBRARY = str(Path(dj.__file__).parent)
SECONDS = 60
"""A case that takes longer hangs; most take a hundredth of a second, and a machine may be busy."""

ALL_REDUCE_SUMS = [
    f"{n}.all_reduce_sum" for n in dir(dj) if n.endswith(("Reduce", "Ops", "Device"))
]
EXCLUDED = {
    "SidecarEvaluator.start": "waits for checkpoints as long as its process lives",
    **dict.fromkeys(ALL_REDUCE_SUMS, "is written by a user, and called by the library"),
    "LocalCluster.run": "starts processes, for which tests/testing has its own bad functions",
}
MADE_BY_LIBRARY = {
    *("ArrayDataset", "ClusterResolver", "CrossDeviceOps", "DistributedDataset", "FileDataset"),
    *("DistributedIterator", "DistributedValues", "Log", "Metric", "Mirrored", "OptionalElement"),
    *("Partitioner", "PerReplica", "PlanTable", "ProcessResult", "RemoteValue", "ReplicaContext"),
    *("Stats", "StepPlan", "Strategy", "StrategyReport", "TPUSystemMetadata"),
}
"""Classes of which the library makes the objects, or a user a subclass."""

X, Y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)


class UsersError(Exception):
    """Raised by the user's functions."""


class Net(nnx.Module):
    """A model that takes any array."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(()))

    def __call__(self, x: Any) -> Any:
        return jnp.mean(jnp.asarray(x), axis=-1, keepdims=True) * self.weight[...]


class HasDtype:
    """An array-like with an invalid dtype."""

    dtype, shape, ndim = "nope", (2,), 1


class Color(enum.Enum):
    RED = 1


def first(*args: Any, **_: Any) -> Any:
    """Returns its first argument, or 1."""
    return args[0] if args else 1.0


def raises(*_: Any, **__: Any) -> Any:
    raise UsersError("of the user's function")


class World:
    """What good arguments are made of; cases share the strategies, and other objects are made for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.s2 = dj.MirroredStrategy([0, 1])
        self.s4 = dj.MirroredStrategy([0, 1, 2, 3])
        self.per_replica = self.s2.experimental_distribute_values_from_function(
            lambda c: np.float32(c.replica_id_in_sync_group)
        )

    @functools.cached_property
    def servers(self) -> dj.ParameterServerStrategy:
        return dj.ParameterServerStrategy(engine="threads", workers=1)

    def variable(self) -> dj.Variable:
        with self.s2.scope():
            return dj.Variable(np.zeros(3, np.float32))

    def model(self) -> dj.Model:
        with self.s2.scope():
            model = dj.Model(self.s2.create(Net))
        model.compile(optax.sgd(0.1), loss="mse")
        return model

    def dataset(self) -> dj.DistributedDataset:
        return self.s2.distribute_dataset([X, X])

    def log(self) -> Any:
        with dj.testing.record(self.servers) as log:
            pass
        return log


def constant(value: Any) -> Callable[[World], Any]:
    """Returns a factory that returns a constant."""
    return lambda _: value


Factory = Callable[[World], Any]

BAD: tuple[Factory, ...] = (
    *map(constant, [None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 10**400]),
    *map(constant, [0.5, -1.5, 1e30, float("nan"), float("inf"), 1j, np.float32(0.5), np.int64(3)]),
    *map(constant, ["", "x", "cpu:0", "mse", "a\0b", "{epoch", "*", "n" * 300, b"x", b"\xff\0"]),
    *map(constant, [(), (1,), (1, 2), ("a", None), ..., NotImplemented, slice(2), range(3)]),
    *map(constant, [np.dtype("f4"), Color.RED, Path("p"), UsersError("e")]),
    *map(constant, [np.array(5), np.zeros(0), np.ones(3), np.ones((2, 3)), np.array([1j, 2])]),
    *map(
        constant, [np.array(["a"]), np.array([b"x"]), np.array([None, 1]), np.array([True, False])]
    ),
    *map(constant, [np.ones(2, ">f8"), np.array([2**40]), np.array([np.nan, 1.0], np.float32)]),
    *map(constant, [np.ma.array([1, 2], mask=[0, 1]), np.zeros(2, "i4,f4"), np.zeros(2, "M8[s]")]),
    *map(constant, [first, raises, types.SimpleNamespace(a=1), HasDtype(), HasDtype]),
    *map(constant, [jax.ShapeDtypeStruct((2,), jnp.float32), optax.sgd(0.1), optax.adam]),
    lambda _: [],
    lambda _: [1, 2],
    lambda _: ["a"],
    lambda _: ["cpu:0", None],
    lambda _: [[1], [2, 3]],
    lambda _: [np.ones(2), np.ones(3)],
    lambda _: {},
    lambda _: {"a": 1},
    lambda _: {1: 2, "b": 3},
    lambda _: {"a": np.ones((2, 3)), "b": None},
    lambda _: {1, 2},
    lambda _: collections.deque([1]),
    lambda _: object(),
    lambda _: iter([1, 2]),
    lambda _: (i for i in [np.ones(2)]),
    lambda _: io.StringIO("x"),
    lambda _: jnp.ones(4),
    lambda _: jnp.int32(3),
    lambda _: jnp.ones((2, 2), jnp.bfloat16),
    lambda _: jax.random.key(0),
    lambda _: jax.devices()[0],
    lambda _: nnx.Param(jnp.ones(2)),
    lambda _: Net(),
    lambda _: nnx.Rngs(0),
    lambda w: w.s2,
    lambda w: w.s4,
    lambda w: w.per_replica,
    lambda w: w.variable(),
    lambda w: w.model(),
    lambda w: w.dataset(),
    lambda _: dj.losses.MeanSquaredError(),
    lambda _: dj.metrics.Average(),
    lambda _: dj.callbacks.History(),
    lambda _: dj.RunOptions(),
)
WRAPPED: tuple[Callable[[Any], Any], ...] = (
    lambda v: [v],
    lambda v: (v, v),
    lambda v: {"a": v},
    lambda v: lambda *_, **__: v,
)


def values(**constants: Any) -> dict[str, Factory]:
    """Returns factories of constants by name."""
    return {name: constant(value) for name, value in constants.items()}


GOOD: dict[str, Factory] = {
    **values(args=(), axis=0, backup_dir="backup", batch=(X, Y), checkpoint_dir="checkpoints"),
    **values(cluster={"worker": ["a:1", "b:2"]}, cluster_resolver=None),
    **values(cluster_spec=dj.cluster_resolver.ClusterSpec({"worker": ["a:1", "b:2"]})),
    **values(coordinator_address="a:1", data=np.ones(3, np.float32), dataset=[X, X]),
    **values(dataset_fn=lambda context: [X, X], delta=1.0, device=0),
    **values(device_coordinates=(0, 0, 0, 0), directory="manager"),
    **values(distributed_train_function=first, dtype=np.float32, filename="log.csv"),
    **values(filepath="best", fn=first, global_batch_size=8, identifier="mse"),
    **values(image=np.ones((1, 2, 2, 3), np.float32), indices=[0], initial_state=0.0),
    **values(input_fn=lambda context: [X, X], instance_group="g", job_name="worker", kind="kill"),
    **values(labels=np.array([1, 0]), log_dir="logs", logdir="logs", logical_core=0),
    **values(logical_device_id=0, logits=np.array([[0.5, 0.6], [0.1, 0.2]], np.float32)),
    **values(logs={"loss": 0.5}, loss=1.0, make=Net, max_shard_bytes=64, merge_fn=first, name="a"),
    **values(num_shards=2, number=1, numpy_input=X, optimizer=optax.sgd(0.1), params={}),
    **values(partition_dimensions=(1, 1), path="saved", paths=["a.npy"]),
    **values(per_example_loss=np.ones(4, np.float32), phase="step", port=1234),
    **values(predictions=np.array([0.5, 0.6], np.float32), process=0, project="p"),
    **values(read=lambda path: [X, X], reduce_func=first, reduce_op="sum", regularization_loss=1.0),
    **values(replica=0, rules={"weight": None}, schedule=lambda epoch: 0.1, shape=(4, 3), size=4),
    **values(step=1, steps=1, task_id=0, task_index=0, tensor=X, than=0.5, tx=optax.sgd(0.1)),
    **values(updates=[1.0], value_fn=lambda context: 1.0, values=[1.0, 2.0]),
    **values(weights=[np.ones((), np.float32)], worker=0, workers=2, x=X, y=Y),
    **values(y_pred=np.full((4, 3), 0.5, np.float32), y_true=np.ones((4, 3), np.float32), zone="z"),
    "checkpoint_or_checkpoint_manager": lambda w: {"a": w.variable()},
    "destinations": lambda w: w.variable(),
    "devices": lambda _: jax.devices(),
    "iterator": lambda w: iter(w.dataset()),
    "model": lambda w: w.model(),
    "module": lambda w: w.s2.create(Net),
    "strategy": lambda w: w.s2,
    "topology": lambda _: dj.tpu.experimental.initialize_tpu_system(),
    "tree": lambda w: {"a": np.ones(3, np.float32)},
    "value": lambda w: w.per_replica,
    "var": lambda w: w.variable(),
}
"""What an argument of this name is where another one is wrong."""

GOOD_OF: dict[str, Factory] = {
    "ClusterCoordinator.strategy": lambda w: w.servers,
    "DTypePolicy.name": constant("float32"),
    "InputContext.num_input_pipelines": constant(1),
    "LocalCluster.processes": constant(1),
    "LocalCluster.devices_per_process": constant(1),
    "Fault.at_step": constant(1),
    "Fault.process": constant(0),
    "Optimizer.model": lambda w: w.s2.create(Net),
    "Optimizer.update.model": lambda w: w.s2.create(Net),
    "Optimizer.update.grads": lambda w: nnx.state(w.s2.create(Net), nnx.Param),
    "SimpleClusterResolver.cluster_spec": GOOD["cluster_spec"],
    "Strategy.experimental_run.input_iterator": lambda w: w.s2.make_dataset_iterator([X, X]),
    "Variable.scatter.op": constant("add"),
    "check_equals_one_device.batch": constant(X),
    "check_equals_one_device.step": constant(first),
    "image.data": GOOD["image"],
    "kill.strategy": lambda w: w.servers,
    "per_example.value": constant(jnp.ones(4)),
    "plan.step": constant(first),
    "plan.strategies": constant([dj.MirroredStrategy]),
    "record.strategy": lambda w: w.servers,
    "register_aggregation.aggregation": constant(dj.VariableAggregation.MEAN),
    "register_aggregation.variable_type": lambda _: type("Own", (nnx.Variable,), {}),
    "replay.log": lambda w: w.log(),
    "same_on_all_replicas.node": lambda _: nnx.Rngs(0),
    "sparse_categorical_crossentropy.y_true": constant(np.array([0, 1, 2, 0])),
    "SparseCategoricalCrossentropy.__call__.y_true": constant(np.array([0, 1, 2, 0])),
    "text.data": constant("text"),
    "unpack_x_y_sample_weight.batch": constant((X, Y)),
}
"""The same for one function."""

RECEIVERS: dict[str, Factory] = {
    "ClusterResolver": lambda w: dj.cluster_resolver.SimpleClusterResolver(GOOD["cluster_spec"](w)),
    "ClusterCoordinator": lambda w: dj.coordinator.ClusterCoordinator(w.servers),
    "DistributedDataset": lambda w: w.dataset(),
    "DistributedIterator": lambda w: iter(w.dataset()),
    "FileDataset": lambda w: dj.data.from_files(["a.npy"], lambda path: [X, X]),
    "ArrayDataset": lambda w: dj.data.from_arrays((X, Y)),
    "Loss": lambda _: dj.losses.MeanSquaredError(),
    "PreemptionCheckpointHandler": lambda w: dj.experimental.PreemptionCheckpointHandler(
        None, {"a": w.variable()}, "checkpoints"
    ),
    "Fault": lambda _: dj.testing.Fault("kill", process=0, at_step=1),
    "Model": lambda w: w.model(),
    "Optimizer": lambda w: dj.Optimizer(w.s2.create(Net), optax.sgd(0.1)),
    "ParameterServerStrategy": lambda w: w.servers,
    "UnionResolver": lambda w: dj.cluster_resolver.UnionResolver(RECEIVERS["ClusterResolver"](w)),
    "Variable": lambda w: w.variable(),
    "ReplicaContext": lambda _: dj.get_replica_context(),
    "Strategy": lambda w: w.s2,
    "TPUStrategy": lambda w: dj.TPUStrategy(),
    "Topology": lambda _: dj.tpu.experimental.initialize_tpu_system(),
    "DeviceAssignment": lambda _: dj.tpu.experimental.DeviceAssignment.build(
        dj.tpu.experimental.initialize_tpu_system()
    ),
}
"""Objects whose class is not called with good arguments to make one."""


def _all_reduce(w: World, options: Any = None) -> None:
    w.s2.run(lambda: dj.get_replica_context().all_reduce("sum", 1.0, options))


def _update(w: World, metric: Any) -> None:
    metric.update(values=np.ones(2), **{n: GOOD[n](w) for n in ("logits", "labels", "predictions")})
    metric.compute()


def _save(w: World, manager: Any) -> None:
    manager.save(1, {"a": np.ones(3)})
    manager.wait()
    manager.restore_latest({"a": np.ones(3)})


def _write(w: World, writer: Any) -> None:
    with writer.as_default():
        dj.summary.scalar("a", 1.0, step=1)
    writer.close()


USE: dict[type, Callable[[World, Any], Any]] = {
    dj.callbacks.Callback: lambda w, value: w.model().fit(
        X, Y, batch_size=4, epochs=2, callbacks=[value], validation_data=(X, Y), verbose=0
    ),
    dj.losses.Loss: lambda w, value: value(GOOD["y_true"](w), GOOD["y_pred"](w)),
    dj.metrics.Metric: _update,
    dj.Strategy: lambda w, value: value.run(first, args=(1.0,)),
    dj.CrossDeviceOps: lambda w, value: use(w, dj.MirroredStrategy([0, 1], cross_device_ops=value)),
    dj.DistributedDataset: lambda w, value: next(iter(value), None),
    dj.data.ArrayDataset: lambda w, value: use(w, w.s2.distribute_dataset(value)),
    dj.data.FileDataset: lambda w, value: use(w, w.s2.distribute_dataset(value)),
    dj.InputOptions: lambda w, value: use(w, w.s2.distribute_dataset([X, X], value)),
    dj.RunOptions: lambda w, value: w.s2.run(first, args=(1.0,), options=value),
    dj.experimental.CommunicationOptions: _all_reduce,
    dj.cluster_resolver.ClusterResolver: lambda w, value: [
        value.master(),
        value.num_accelerators(),
    ],
    dj.CheckpointManager: _save,
    dj.summary.SummaryWriter: _write,
    dj.Model: lambda w, value: value.train_on_batch(X, Y),
    dj.Variable: lambda w, value: value.numpy(),
    dj.experimental.partitioners.Partitioner: lambda w, value: value((4, 3), np.float32),
    contextlib.AbstractContextManager: lambda w, value: contextlib.ExitStack().enter_context(value),
}
"""What is done with objects that were made with a wrong argument, which may only fail in use."""


def use(w: World, value: Any) -> None:
    """Uses an object as its class is meant to be used."""
    for kind, action in USE.items():
        if isinstance(value, kind):
            action(w, value)
            break


@dataclass(frozen=True)
class Target:
    """A public function, class or method, with the parameters that it takes."""

    name: str
    call: Any
    owner: type | None
    """The class of a method, of which an object is needed."""
    parameters: tuple[inspect.Parameter, ...]


def targets() -> list[Target]:
    """Returns everything public that can be called with an argument, once."""
    found: dict[Any, Target] = {}
    classes: dict[str, type] = {}
    for public in public_objects(dj):
        name = public.name.removeprefix(public.shown_by + ".")
        before, _, last = name.rpartition(".")
        if inspect.isclass(public.value):
            classes[name] = public.value
        owner = classes.get(before)
        call = getattr(owner, last, None) if owner else public.value
        is_hook = last.startswith("on_") or last in ("set_model", "set_params")  # fit calls it
        if name in EXCLUDED or is_hook or not _is_called(owner, last, call):
            continue
        is_method = owner is not None and not isinstance(
            inspect.getattr_static(owner, last), (classmethod, staticmethod)
        )
        taken = call.__init__ if inspect.isclass(call) else call
        parameters = tuple(inspect.signature(taken).parameters.values())
        parameters = parameters[is_method or taken is not call :]
        key = getattr(call, "__func__", call)
        if parameters and not (key in found and owner):
            found[key] = Target(name, call, owner if is_method else None, parameters)
    return sorted(found.values(), key=lambda target: target.name)


def _is_called(owner: type | None, last: str, call: Any) -> bool:
    if inspect.isclass(call):
        of_users = not issubclass(call, (BaseException, enum.Enum)) and last not in MADE_BY_LIBRARY
        return of_users and inspect.isfunction(call.__init__)
    return last != "__init__" and (inspect.isfunction(call) or inspect.ismethod(call))


@dataclass(frozen=True)
class Case:
    """One call with a wrong value for one parameter."""

    number: int
    target: Target
    parameter: inspect.Parameter
    turn: int
    """How often the parameter had its turn; it seeds the values, whatever else is public."""


def cases(count: int) -> Iterator[Case]:
    """Yields this many cases, in which the parameters of all targets take turns."""
    pairs = [(target, p) for target in targets() for p in target.parameters]
    for number in range(count):
        turn, place = divmod(number, len(pairs))
        if not place:
            random.Random(turn).shuffle(pairs)
        yield Case(number, *pairs[place], turn)


def _good(w: World, target: Target, parameter: inspect.Parameter, seeded: random.Random) -> Any:
    name = parameter.name
    factory = GOOD_OF.get(f"{target.name}.{name}") or GOOD.get(name)
    return factory(w) if factory else _bad(w, seeded)


def _bad(w: World, seeded: random.Random) -> Any:
    value = seeded.choice(BAD)(w)
    return seeded.choice(WRAPPED)(value) if seeded.random() < 0.15 else value


def arguments(w: World, case: Case) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of a case."""
    seeded = random.Random(f"{case.target.name} {case.parameter.name} {case.turn}")
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in case.target.parameters:
        is_wrong = parameter is case.parameter or seeded.random() < 0.05
        required = parameter.default is parameter.empty
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += [_bad(w, seeded)] if is_wrong else []
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs |= (
                {seeded.choice(["bogus", "mask", "name"]): _bad(w, seeded)} if is_wrong else {}
            )
        elif is_wrong or required:
            good = functools.partial(_good, target=case.target, parameter=parameter)
            value = (_bad if is_wrong else good)(w, seeded=seeded)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                args.append(value)
            else:
                kwargs[parameter.name] = value
    if case.parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        before = [p.name for p in case.target.parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        args = [kwargs.pop(name) for name in before if name in kwargs] + args
    return args, kwargs


def receiver(w: World, target: Target) -> Any:
    """Returns the object whose method a case calls."""
    assert target.owner is not None
    for cls in target.owner.__mro__:
        if cls.__name__ in RECEIVERS:
            made_before = RECEIVERS[cls.__name__](w)
            function = getattr(type(made_before), target.call.__name__, None)
            if function is target.call or isinstance(made_before, target.owner):
                return made_before
    taken = list(inspect.signature(target.owner.__init__).parameters.values())[1:]
    of_class = Target(target.owner.__name__, target.owner, None, tuple(taken))
    needed = [
        p for p in taken if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return target.owner(**{p.name: _good(w, of_class, p, random.Random(0)) for p in needed})


class HangError(BaseException):
    """A case did not end in time."""


def _raise_hang(*_: Any) -> None:
    raise HangError


def fault(w: World, case: Case) -> str | None:
    """Runs a case, and returns what is wrong with its error; None if it succeeds or is refused properly."""
    return contextvars.copy_context().run(_fault, w, case)  # a default writer ends with its case


def _fault(w: World, case: Case) -> str | None:
    with _quiet():
        args, kwargs = arguments(w, case)
        call = case.target.call
        old = signal.signal(signal.SIGALRM, _raise_hang)
        signal.alarm(SECONDS)
        try:
            if case.target.owner is not None:
                args = [receiver(w, case.target), *args]
            value = call(*args, **kwargs)
            use(w, args[0] if case.target.name == "Model.compile" else value)
        except SystemExit:
            return None  # of a handler that was told that its process ends
        except HangError:
            return f"{_text(case, args, kwargs)} did not end"
        except Exception as error:
            reason = raw(error)
            return reason and f"{_text(case, args, kwargs)}: {reason}"
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, old)
            with contextlib.suppress(dj.DistributeError):
                dj.experimental_set_strategy(None)
    return None


def _text(case: Case, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    texts = [f"{value!r:.60}" for value in args] + [f"{k}={v!r:.60}" for k, v in kwargs.items()]
    texts = [" ".join(text.split()) for text in texts]
    return f"case {case.number}, {case.target.name}({', '.join(texts)})"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses output, and refuses connections to other machines."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionRefusedError("no connections in a test")

    connect, socket.socket.connect = socket.socket.connect, refuse
    look_up, socket.getaddrinfo = socket.getaddrinfo, refuse
    logging.disable(logging.CRITICAL)
    os.environ["DISTRIBUTE_JAX_FULL_TRACEBACK"] = "1"  # otherwise the library's frames are left out
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        del os.environ["DISTRIBUTE_JAX_FULL_TRACEBACK"]
        socket.socket.connect, socket.getaddrinfo = connect, look_up


_ARITY = re.compile(
    r"\(\) (missing \d+ required|takes (no|\d+|from \d+ to \d+) |got multiple values)"
    r"|got an unexpected keyword|too many positional"
)


def raw(error: BaseException) -> str | None:
    """Returns what is wrong with an error; None for the library's errors and those of user functions."""
    frames = list(traceback.walk_tb(error.__traceback__))
    files = [frame.f_code.co_filename for frame, _ in frames]
    first_of_library = next((i for i, f in enumerate(files) if f.startswith(LIBRARY)), len(files))
    if __file__ in files[first_of_library:]:
        return None
    text = str(error)
    if first_of_library == len(files) or (isinstance(error, TypeError) and _ARITY.search(text)):
        return None  # of Flax, whose class a public one is; or Python's own words, which name the function
    if isinstance(error, dj.DistributeError):
        return None if text.strip() else f"a {type(error).__name__} without a text"
    inner = [(f, line) for f, (_, line) in zip(files, frames, strict=True)][-1]
    ours = inner[0].startswith(LIBRARY) and linecache.getline(*inner).strip().startswith("raise ")
    if ours and isinstance(error, (ValueError, TypeError, NotImplementedError, StopIteration)):
        return None
    in_library = [
        (f, line) for f, (_, line) in zip(files, frames, strict=True) if f.startswith(LIBRARY)
    ]
    where = "{}:{}".format(*in_library[-1]).removeprefix(LIBRARY + "/") if in_library else "outside"
    name, lines = type(error).__name__, text.strip().splitlines() or ["without a text"]
    return f"{name} from {where}: {lines[0]:.120}"
