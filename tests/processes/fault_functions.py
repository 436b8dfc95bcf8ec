"""Training loops in which a process fails, for the tests of how a job ends."""

from __future__ import annotations

import hashlib
import os
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx

import distribute_jax as dj

STEP_SECONDS = 4.0
START_SECONDS = 30.0


def make_strategy(**options):
    timeouts = {"step_seconds": STEP_SECONDS, "start_seconds": START_SECONDS, "shutdown_seconds": 3}
    return dj.MultiWorkerMirroredStrategy(cluster_options=dj.ClusterOptions(**timeouts | options))


def make_step(strategy, *, width=2, rate=0.1, momentum=None):
    with strategy.scope():
        model = nnx.Linear(4, width, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(rate, momentum), wrt=nnx.Param)

    def step(x):
        loss, gradients = nnx.value_and_grad(
            lambda model: dj.compute_average_loss((model(x) ** 2).mean(-1))
        )(model)
        context = dj.get_replica_context()
        optimizer.update(model, context.all_reduce("sum", gradients))
        return context.all_reduce("sum", loss)

    return step, model


def batch(strategy):
    rows = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
    return next(iter(strategy.distribute_dataset(lambda: iter([rows]))))


def loop(steps):
    """Trains; each process prints when it began a step, so that a test knows how long the end took."""
    strategy = make_strategy()
    step, model = make_step(strategy)
    x = batch(strategy)
    for number in range(steps):
        print(f"step {number} at {time.time():.3f}", flush=True)
        if number == 5 and jax.process_index() == 1 and os.environ.get("BAD_BATCH"):
            sys.excepthook = eval(os.environ["BAD_BATCH"])
            raise ValueError("bad batch")
        if number == 5 and jax.process_index() == 1 and os.environ.get("EARLY"):
            return "left"
        float(strategy.run(step, args=(x,)))
    weights = [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(nnx.state(model))]
    return hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()


def all_reduce_that_one_never_joins():
    """Process 1 does not run the step; the other prints how long it waited, and its error."""
    options = dj.experimental.CommunicationOptions(timeout_seconds=2)
    strategy = dj.MultiWorkerMirroredStrategy(
        communication_options=options, cluster_options=dj.ClusterOptions(step_seconds=60)
    )

    def step():
        return dj.get_replica_context().all_reduce("sum", jax.numpy.ones(()))

    total = float(strategy.run(step))
    if jax.process_index() == 1:
        time.sleep(8)
        return total
    start = time.monotonic()
    try:
        float(strategy.run(step))
    except (dj.DeadlineExceededError, jax.errors.JaxRuntimeError) as error:
        return total, time.monotonic() - start, str(error)
    return "joined"


def late_at_a_barrier():
    """Process 1 is late, and process 0 says so."""
    strategy = make_strategy()
    if jax.process_index() == 1:
        time.sleep(3)
        return "late"
    try:
        strategy.barrier("here", timeout=1)
    except TimeoutError as error:
        return str(error)
    return "all came"


def with_bits_of(process):
    """Returns the decorator under which keys of threefry have other bits on process 1."""
    return jax.threefry_partitionable(process == 0)


def differing():
    """Programs, shapes and values that differ are an error with both values, before anything runs."""
    strategy = make_strategy()
    me = jax.process_index()
    x = batch(strategy)
    rows = np.ones((2 + 2 * me, 4), np.float32)
    mesh = strategy.mesh
    odd = dj.PerReplica(
        jax.make_array_from_process_local_data(
            jax.NamedSharding(mesh, jax.P("data")), np.ones((2, 4), np.float32)
        ),
        mesh,
    )
    outcome = []
    verify = dj.RunOptions(verify="first" if me else "off")
    sharded = dj.MultiWorkerMirroredStrategy(shard_optimizer_state=bool(me))
    run, key = strategy.run, jax.random.key(me)
    for call in (
        lambda: run(make_step(strategy, rate=0.1 * (1 + me))[0], (x,)),
        lambda: run(make_step(strategy, width=2 + me)[0], (x,)),
        lambda: run(lambda x, scale: x * scale, (x, np.float32(1 + me))),
        lambda: run(lambda x, key: x + jax.random.uniform(key), (x, key)),
        lambda: run(lambda x: x * jax.random.uniform(key), (x,)),
        lambda: run(lambda x: x + me, (odd,)),
        lambda: run(lambda x, rows: x.sum() + rows.sum(), (x, rows)),
        lambda: run(lambda x: x + 2, (x,), options=verify),
        lambda: sharded.run(make_step(sharded, width=1 << 16, momentum=0.9)[0], (x,)),
        lambda: with_bits_of(me)(run)(lambda x: x + 3, (x,)),
    ):
        try:
            outcome.append(str(call()))
        except dj.ProcessesDifferError as error:
            outcome.append(str(error))
    # Whoever goes on after such an error finds a strategy that works.
    outcome.append(float(strategy.reduce("sum", strategy.run(lambda: jax.numpy.ones(())))))
    return outcome


def missing():
    """Process 1 never makes its strategy."""
    if os.environ["DISTRIBUTE_JAX_PROCESS_ID"] == "1":
        return "elsewhere"
    make_strategy()
    return "started"


def after_the_backend():
    """A strategy made after something has computed."""
    jax.numpy.ones(2)
    try:
        make_strategy()
    except dj.BackendStartedError as error:
        return str(error)
    return "started"


def fixed_port(address, steps):
    """A job at a port that is given, as from TF_CONFIG."""
    index = int(os.environ["DISTRIBUTE_JAX_PROCESS_ID"])
    spec = dj.cluster_resolver.ClusterSpec({"worker": [address, "127.0.0.1:1"]})
    resolver = dj.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=index)
    strategy = dj.MultiWorkerMirroredStrategy(
        resolver, cluster_options=dj.ClusterOptions(start_seconds=START_SECONDS)
    )
    total = 0.0
    for _ in range(steps):
        total += float(strategy.reduce("sum", strategy.run(lambda: jax.numpy.ones(()))))
        time.sleep(0.1)
    return total
