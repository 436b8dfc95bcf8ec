"""The same small programs with the real TensorFlow and Keras, and with this library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distribute_jax as dj

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: dev.py test --sources has it")
keras = tf.keras
# At import, since the first test that computes with TensorFlow fixes its devices.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:The global batch has:UserWarning"),  # for all replicas
    pytest.mark.filterwarnings("ignore::DeprecationWarning:keras"),
]

OPS = ["assign", "assign_add", "assign_sub"]
AGGREGATIONS = ["SUM", "MEAN", "ONLY_FIRST_REPLICA"]
X = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
Y = X @ np.array([[1.0], [-2.0], [0.5]], np.float32) + 0.1
WEIGHTS = np.random.default_rng(1).uniform(size=22).astype(np.float32)
KERNEL, BIAS = np.array([[0.3], [-0.1], [0.2]], np.float32), np.array([0.1], np.float32)


class Ours:
    """The names of this library."""

    distribute: Any = dj
    enums: Any = dj
    callbacks = dj.callbacks
    Variable = dj.Variable

    @staticmethod
    def strategy(replicas: int) -> Any:
        return dj.MirroredStrategy(list(range(replicas)))

    @staticmethod
    def replica_id() -> Any:
        return dj.get_replica_context().replica_id_in_sync_group.astype("float32")

    @staticmethod
    def model(**compiled: Any) -> Any:
        with Ours.strategy(2).scope():
            model = dj.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
        model.module.kernel[...], model.module.bias[...] = jnp.asarray(KERNEL), jnp.asarray(BIAS)
        model.compile(optax.sgd(0.05), "mse", ["mae"], weighted_metrics=["mae"], **compiled)
        return model


class Theirs:
    """The names of TensorFlow; Keras trains on one device, since several are not exact there."""

    distribute = tf.distribute
    enums = tf
    callbacks = keras.callbacks
    Variable = tf.Variable

    @staticmethod
    def strategy(replicas: int) -> Any:
        devices = [f"CPU:{i}" for i in range(replicas)]
        ops = tf.distribute.ReductionToOneDevice()
        return tf.distribute.MirroredStrategy(devices, cross_device_ops=ops)

    @staticmethod
    def replica_id() -> Any:
        return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)

    @staticmethod
    def model(**compiled: Any) -> Any:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.set_weights([KERNEL, BIAS])
        sgd = keras.optimizers.SGD(0.05)
        model.compile(sgd, "mse", metrics=["mae"], weighted_metrics=["mae"], **compiled)
        return model


def plain(value: Any) -> Any:
    """Returns numbers, lists and dicts, the same for both libraries."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return np.asarray(value).tolist()


def assert_agree(program: Callable[[Any], Any]) -> None:
    """The program returns the same numbers with both."""
    ours, theirs = plain(program(Ours)), plain(program(Theirs))
    leaves, structure = zip(*map(flat, (ours, theirs)), strict=True)
    assert structure[0] == structure[1]
    np.testing.assert_allclose(leaves[0], leaves[1], rtol=2e-5, atol=1e-6)


def flat(tree: Any) -> tuple[list[float], Any]:
    """Returns the numbers of a tree, and the tree without them."""
    numbers: list[float] = []

    def strip(one: Any) -> Any:
        if isinstance(one, dict):
            return {key: strip(one[key]) for key in sorted(one)}
        if isinstance(one, list):
            return [strip(part) for part in one]
        return one if isinstance(one, str) else numbers.append(one)

    structure = strip(tree)
    return numbers, structure


@pytest.mark.parametrize("policy", ["OFF", "DATA"])
@pytest.mark.parametrize(
    ("rows", "batch", "replicas"),
    [(9, 2, 2), (11, 5, 2), (10, 8, 4), (7, 3, 4), (13, 6, 3), (3, 1, 2)],
)
def test_batches_are_divided_equally(rows: int, batch: int, replicas: int, policy: str):
    """The examples of each replica, of every batch, by each policy; and those of a dataset function."""

    def program(library: Any) -> Any:
        strategy = library.strategy(replicas)
        options = tf.data.Options()
        policies = tf.data.experimental.AutoShardPolicy
        options.experimental_distribute.auto_shard_policy = getattr(policies, policy)
        data = tf.data.Dataset.range(rows).batch(batch).with_options(options)
        distributed = strategy.experimental_distribute_dataset(data)
        local = strategy.distribute_datasets_from_function(lambda context: data)
        return [list(map(strategy.experimental_local_results, one)) for one in (distributed, local)]

    assert_agree(program)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_writes_of_variables_agree(synchronization: str, aggregation: str, op: str):
    """By replicas; the initial value is 0, since TensorFlow counts that of an ON_READ sum twice."""

    def program(library: Any) -> Any:
        strategy, enums = library.strategy(2), library.enums
        with strategy.scope():
            variable = library.Variable(
                0.0,
                synchronization=getattr(enums.VariableSynchronization, synchronization),
                aggregation=getattr(enums.VariableAggregation, aggregation),
            )

        def step() -> None:
            getattr(variable, op)(library.replica_id() + 1)

        strategy.run(step)
        strategy.run(step)
        written = [variable.numpy(), *map(np.asarray, variable.values), variable.trainable]
        variable.assign(4.0)
        return [*written, variable.numpy()]

    assert_agree(program)


@pytest.mark.parametrize("name", ["sum", "mean"])
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 1)])
def test_reductions_agree(axis: Any, name: str):
    """Values of equal shapes, and integers; with an axis also values of different lengths."""

    def program(library: Any) -> Any:
        strategy = library.strategy(2)
        value = strategy.run(lambda: (library.replica_id() + 1) * np.ones((2, 3), np.float32))
        ragged = strategy.experimental_distribute_values_from_function(
            lambda context: np.arange(1 + 2 * context.replica_id_in_sync_group, dtype=np.int32)
        )
        reduced = [strategy.reduce(name, value, axis=axis), strategy.gather(value, axis=1)]
        return [*reduced, strategy.reduce(name, ragged, axis=0) if axis == 0 else 0]

    assert_agree(program)


FITS: dict[str, dict[str, Any]] = {
    "partial batches": {},
    "weights": {"sample_weight": WEIGHTS},
    "a split": {"validation_split": 0.3, "validation_freq": 2},
    "validation": {"validation_data": (X[:7], -Y[:7], WEIGHTS[:7]), "validation_steps": 1},
    "steps": {"steps_per_epoch": 1, "initial_epoch": 1, "epochs": 6},
}


@pytest.mark.parametrize("case", FITS)
def test_fit_has_the_numbers_of_keras(case: str):
    """The history, its names and the weights after it."""

    def program(library: Any) -> Any:
        model = library.model()
        options = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0} | FITS[case]
        history = model.fit(X, Y, **options)
        left = sorted(np.concatenate([np.ravel(one) for one in model.get_weights()]).tolist())
        return [history.history, history.epoch, left]

    assert_agree(program)


def callbacks_of(library: Any) -> Iterator[Any]:
    """Yields callbacks that look at numbers which grow."""
    yield library.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, cooldown=1)
    yield library.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True)


def test_calls_of_callbacks_agree():
    """The order of the hooks, their numbers and names, with two that change the training."""

    def program(library: Any) -> Any:
        called: list[Any] = []

        class Log(library.callbacks.Callback):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                for hook in ("train_begin", "epoch_begin", "epoch_end", "test_end"):
                    setattr(self, f"on_{hook}", self._logger(hook))
                for hook in ("train_batch_begin", "train_batch_end", "test_batch_end"):
                    setattr(self, f"on_{hook}", self._logger(hook))

            @staticmethod
            def _logger(hook: str) -> Callable[..., None]:
                def log(*arguments: Any, logs: Any = None) -> None:
                    names = [one for one in (*arguments, logs) if isinstance(one, dict)]
                    numbers = [one for one in arguments if isinstance(one, int)]
                    called.append([hook, *numbers, *map(sorted, names)])

                return log

        history = library.model().fit(
            X, Y, 8, 8, 0, [Log(), *callbacks_of(library)],
            shuffle=False, validation_data=(X[:7], -Y[:7]),
        )  # fmt: skip
        return [[str(one) for one in called], history.history]

    assert_agree(program)
