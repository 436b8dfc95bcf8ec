"""``FullyShardedStrategy`` over processes: the values of one process, and shards on each device."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import leaves
import numpy as np
import pytest
from cases import long
from flax import nnx
from jax.sharding import PartitionSpec

import distribute_jax as dj
from distribute_jax.testing import LocalCluster

sys.path.insert(0, str(Path(__file__).parents[1] / "strategies"))
from test_fully_sharded import MODELS, batches, made, update

pytestmark = pytest.mark.exhaustive

SIZES = (16, 16, 11)
X = np.random.default_rng(0).normal(size=(44, 32)).astype(np.float32)
Y = (X[:, :8] + X[:, 8:16] > 0).astype(np.float32)


def job_strategy(shard_over=None):
    return dj.FullyShardedStrategy(
        shard_over=shard_over,
        cluster_resolver=dj.cluster_resolver.detect(),
        cluster_options=dj.ClusterOptions(start_seconds=90, step_seconds=60),
    )


def train(strategy, tree, sizes=SIZES, options=None):
    """Returns the losses of some batches, the last of them partial, and the state afterwards."""

    def step(tokens, targets):
        return update(tree["model"], tree["optimizer"], tokens, targets)

    losses = [
        float(strategy.run(step, args=batch, options=options))
        for batch in strategy.distribute_dataset(batches(sizes))
    ]
    return {"losses": losses, "state": numbers(strategy, tree)}


def numbers(strategy, tree):
    """Returns every floating array, complete; a collective call."""
    leaves = jax.tree.leaves(strategy.experimental_local_results(nnx.state(tree))[0])
    return [np.asarray(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def bytes_of(tree):
    """Returns the bytes of optimizer and model on each device of this process, and of complete arrays."""
    kept = {}
    leaves = jax.tree.leaves(nnx.state(tree))
    for shard in (shard for leaf in leaves for shard in leaf.addressable_shards):
        name = str(shard.device)
        kept[name] = kept.get(name, 0) + shard.data.nbytes
    return {"devices": [*kept.values()], "whole": sum(leaf.nbytes for leaf in leaves)}


def tree_of(strategy):
    model, optimizer = made(strategy, MODELS["scan"])
    return {"model": model, "optimizer": optimizer}


def train_in_job(folder):
    """Trains from values that differ, saves, goes on, and loads what one process has saved."""
    strategy, folder = job_strategy(), Path(folder)
    tree = tree_of(strategy)
    embedding = tree["model"].embed.embedding
    embedding[...] = embedding[...] + jax.process_index()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        outcome = {"trained": train(strategy, tree)}
    outcome["warned"] = [str(one.message).partition("\n")[0] for one in seen]
    outcome["bytes"] = bytes_of(tree)
    dj.check_in_sync(tree)
    dj.checkpoint.save(folder / "job", tree)
    outcome["again"] = train(strategy, tree, (16,))
    dj.checkpoint.load(folder / "alone", tree)
    outcome["loaded"] = train(strategy, tree, (16,), dj.RunOptions(verify="first"))
    outcome["repr"] = [repr(strategy), type(strategy.cluster_resolver).__name__]
    outcome["shown"] = str(tree["model"].embed)
    return outcome


def train_and_resume(strategy, folder, saved, loaded):
    """Trains, saves, trains on in another program, and goes on from what a checkpoint holds."""
    tree = tree_of(strategy)
    outcome = {"trained": train(strategy, tree), "bytes": bytes_of(tree), "repr": repr(strategy)}
    dj.check_in_sync(tree)
    dj.checkpoint.save(Path(folder) / saved, tree)
    outcome["again"] = train(strategy, tree, (16,), dj.RunOptions(verify="first"))
    shards = tree["model"].embed.embedding[...].addressable_shards
    outcome["indices"] = sorted(shard.index[1].start or 0 for shard in shards)
    dj.checkpoint.load(Path(folder) / loaded, tree)
    outcome["loaded"] = train(strategy, tree, (16,))
    return outcome


def train_in_groups(folder):
    """The two devices of each process divide the model."""
    return train_and_resume(job_strategy(shard_over=2), folder, "groups", "groups")


def train_with_sharded_update(folder):
    """The devices of all processes divide the state of the optimizer."""
    timeouts = dj.ClusterOptions(start_seconds=90, step_seconds=60)
    strategy = dj.MultiWorkerMirroredStrategy(cluster_options=timeouts, shard_optimizer_state=True)
    return train_and_resume(strategy, folder, "update", "alone")


class Net(nnx.Module):
    """Two layers; the first has 32 * 64 weights."""

    def __init__(self, rngs):
        self.first = nnx.Linear(32, 64, rngs=rngs)
        self.last = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return jax.nn.sigmoid(self.last(jax.nn.relu(self.first(x))))


def fit(strategy, folder):
    """A fit with the callbacks that read weights, and what reads them afterwards."""
    folder, printed = Path(folder), []
    with strategy.scope():
        model = dj.Model(Net(nnx.Rngs(1)))
        average = dj.Variable(np.zeros((32, 64), np.float32))
        # The state of a metric is whole however large it is.
        model.compile("adam", loss="mse", metrics=[dj.metrics.AUC(num_thresholds=2000)])
    callbacks = [
        dj.callbacks.TensorBoard(folder / "logs", update_freq="batch", histogram_freq=1),
        dj.callbacks.ModelCheckpoint(folder / "models" / "{epoch}"),
        dj.callbacks.EarlyStopping("loss", restore_best_weights=True),
        dj.callbacks.TerminateOnNaN(),
    ]
    history = model.fit(
        X, Y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=callbacks
    )
    model.summary(printed.append)
    strategy.run(lambda: average.assign(0.5 * model.module.first.kernel[...]))
    weights = model.get_weights()
    model.set_weights([2 * w for w in weights])
    return {
        "losses": [float(loss) for loss in history.history["loss"]],
        "evaluated": [float(v) for v in model.evaluate(X, Y, batch_size=16, verbose=0)],
        "predicted": model.predict(X, batch_size=16, verbose=0),
        "weights": weights,
        "doubled": model.get_weights(),
        "average": average.numpy(),
        "snapshot": numbers(strategy, dj.snapshot(model.module)),
        "summary": printed,
        "values": average.values[0].shape,
    }


def fit_in_job(folder):
    return fit(job_strategy(), folder)


def write_another_value():
    """Assigns another value to a sharded parameter in process 1."""
    strategy = job_strategy()
    tree = tree_of(strategy)
    step = lambda t, y: update(tree["model"], tree["optimizer"], t, y)  # noqa: E731
    [batch] = strategy.distribute_dataset(batches((16,)))
    strategy.run(step, args=batch)
    value = np.full((96, 64), jax.process_index(), np.float32)
    tree["model"].embed.embedding.set_value(value)
    for _ in range(400):
        strategy.run(step, args=batch)
        time.sleep(0.01)


def train_by_rules(**kwargs):
    """Trains replicas that are each divided over two devices, and by what is left over the replicas."""
    rules = {
        r"up\.kernel": PartitionSpec(None, "model"),
        r"down\.kernel": PartitionSpec("model", None),
        r"embed\.": PartitionSpec("model", None),
    }
    strategy = dj.ModelParallelStrategy(model=2, rules=rules, **kwargs)
    tree = dict(zip(("model", "optimizer"), made(strategy, MODELS["scan"]), strict=True))
    return {"trained": train(strategy, tree), "bytes": bytes_of(tree)}


def train_by_rules_in_job():
    timeouts = dj.ClusterOptions(start_seconds=90, step_seconds=60)
    resolver = dj.cluster_resolver.detect()
    return train_by_rules(cluster_resolver=resolver, cluster_options=timeouts)


def create_in_job():
    """Creates sharded state, and a model that differs between the processes."""
    strategy = job_strategy()
    made = strategy.create(lambda: Net(nnx.Rngs(1)))
    with pytest.raises(dj.ProcessesDifferError, match="make different models"):
        strategy.create(lambda: Net(nnx.Rngs(jax.process_index())))
    kernel = made.first.kernel[...]
    return {
        "shape": kernel.addressable_shards[0].data.shape,
        "array": np.asarray(strategy.experimental_local_results(kernel)[0]),
        "state": numbers(strategy, made),
    }


@pytest.fixture(scope="module", params=[2, long(4)])
def processes(request):
    """Returns the number of processes, of two devices each."""
    return request.param


@pytest.fixture(scope="module")
def alone(processes, tmp_path_factory):
    """Returns losses, checkpoint and resumed training of mirrored state in one process."""
    folder = tmp_path_factory.mktemp("alone")
    strategy = dj.MirroredStrategy(list(range(2 * processes)))
    tree = tree_of(strategy)
    trained = train(strategy, tree)
    dj.checkpoint.save(folder / "alone", tree)
    return folder, trained, train(strategy, tree, (16,))


@pytest.fixture(scope="module")
def outcome(processes, alone):
    """Returns the results of the processes of a job."""
    cluster = LocalCluster(processes, 2, timeout=180)
    return [result.value for result in cluster.run(train_in_job, str(alone[0]))]


def assert_close(got, wanted):
    """Losses and state are equal to rounding: the sums of a job have another order."""
    leaves.assert_close(got, wanted, rtol=2e-4, atol=2e-6)


def test_processes_train_as_one_from_the_values_of_process_0(alone, outcome):
    """Losses and state are those of mirrored state in one process, and other initial values are seen."""
    _, trained, later = alone
    for process in outcome:
        assert_close(process["trained"], trained)
        assert_close(process["again"], later)
        assert process["repr"][0].startswith("FullyShardedStrategy([")
        assert process["repr"][1] == "LaunchedClusterResolver"
        assert "Array(shape=(96, 64)" in process["shown"]
    assert any(
        "embedding. They now have those of process 0" in text for text in outcome[0]["warned"]
    )
    assert not any(process["warned"] for process in outcome[1:])


def test_every_device_keeps_its_share(outcome, processes):
    """A device stores its shards of the state, and complete small arrays only."""
    for process in outcome:
        whole = process["bytes"]["whole"]
        assert len(process["bytes"]["devices"]) == 2
        for kept in process["bytes"]["devices"]:
            assert whole / (2 * processes) < kept < whole / (2 * processes) + 8_000


def test_checkpoints_go_from_a_job_to_one_process_and_back(alone, outcome):
    """What each process saves of its part is loaded mirrored and divided, and the other way round."""
    folder, _, later = alone
    files = sorted(path.name for path in (folder / "job").glob("arrays-*/*"))
    assert len(files) > 1
    for process in outcome:
        assert_close(process["loaded"], later)
    for strategy in (dj.MirroredStrategy([0, 1, 2, 3]), dj.FullyShardedStrategy([0, 1])):
        tree = tree_of(strategy)
        dj.checkpoint.load(folder / "job", tree)
        assert_close(train(strategy, tree, (16,)), later)


def test_each_process_is_a_group(alone, processes):
    """With shard_over=2 each process has the complete model, half on each device; values are those of one."""
    folder, trained, later = alone
    for result in LocalCluster(processes, 2, timeout=180).run(train_in_groups, str(folder)):
        outcome = result.value
        assert_close(outcome["trained"], trained)
        assert_close([outcome["again"], outcome["loaded"]], [later, later])
        assert outcome["indices"] == [0, 32]
        for kept in outcome["bytes"]["devices"]:
            assert outcome["bytes"]["whole"] / 2 < kept < outcome["bytes"]["whole"] / 2 + 8_000


def test_a_sharded_update_has_the_values_of_mirrored_state(alone, processes):
    """Each device has the model and its share of the momentum; checkpoints go to one process and back."""
    folder, trained, later = alone
    for result in LocalCluster(processes, 2, timeout=180).run(
        train_with_sharded_update, str(folder)
    ):
        outcome = result.value
        assert "shard_optimizer_state=True" in outcome["repr"]
        assert_close(outcome["trained"], trained)
        assert_close([outcome["again"], outcome["loaded"]], [later, later])
        model = outcome["bytes"]["whole"] / 2
        for kept in outcome["bytes"]["devices"]:
            assert model < kept < model + model / (2 * processes) + 8_000
    for strategy in (
        dj.MirroredStrategy([0, 1, 2, 3]),
        dj.MirroredStrategy([0, 1], shard_optimizer_state=True),
    ):
        tree = tree_of(strategy)
        dj.checkpoint.load(folder / "update", tree)
        assert_close(train(strategy, tree, (16,)), later)


def test_fit_reads_weights_that_no_process_has(processes, tmp_path):
    """Callbacks, evaluation, prediction, weights, variables and snapshots are those of one process."""
    wanted = fit(dj.MirroredStrategy(list(range(2 * processes))), tmp_path / "alone")
    cluster = LocalCluster(processes, 2, timeout=180)
    for process, result in enumerate(cluster.run(fit_in_job, str(tmp_path / "job"))):
        got = result.value
        printed = got.pop("summary")
        assert len(printed) == (process == 0)
        assert all("over" in text for text in printed)
        assert_close(got, {name: value for name, value in wanted.items() if name != "summary"})


def test_a_sharded_parameter_that_one_process_writes_is_detected():
    """A value that differs between the processes is named although it is sharded afterwards."""
    with pytest.raises(dj.ProcessFailedError, match=r"(?s)embedding.*written between steps"):
        LocalCluster(2, 1, timeout=120).run(write_another_value)


def test_state_is_created_sharded_and_equal_on_all_processes():
    """strategy.create makes the numbers of one process, also read as an array without its variable; other
    seeds are refused, as no copy shows them."""
    wanted = numbers(dj.OneDeviceStrategy(0), net := Net(nnx.Rngs(1)))
    for result in LocalCluster(2, 2, timeout=120).run(create_in_job):
        assert result.value["shape"] == (32, 16)
        assert_close(result.value["state"], wanted)
        assert_close(result.value["array"], net.first.kernel[...])


def test_replicas_of_two_devices_are_divided_over_processes():
    """Rules divide each replica in its process; numbers and bytes are those of one process."""
    wanted = train_by_rules()
    assert max(wanted["bytes"]["devices"]) < wanted["bytes"]["whole"] / 8 + 8_000
    for result in LocalCluster(2, 4, timeout=180).run(train_by_rules_in_job):
        assert_close(result.value["trained"], wanted["trained"])
        assert result.value["bytes"]["devices"] == wanted["bytes"]["devices"][:4]
