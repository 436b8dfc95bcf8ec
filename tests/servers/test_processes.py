"""Workers and servers that are processes: the numbers of one device, whoever is killed."""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from leaves import assert_same_bits, numbers

import distribute_jax as dj
from distribute_jax.coordinator import ClusterCoordinator
from distribute_jax.servers import _child, _engines
from distribute_jax.servers._coordinator import Coordinator
from distribute_jax.servers._engines import WorkerLostError
from distribute_jax.servers._wire import Connection, Message, WireError

SECONDS = 120

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc to see processes")


def build(strategy: dj.Strategy) -> tuple[Any, Callable[[Any], Any]]:
    """A model with dropout, its optimizer and a counter; a step that trains it."""
    with strategy.scope():
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(nnx.Linear(8, 6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
        optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
        count = dj.Variable(0, aggregation=dj.VariableAggregation.SUM)

    def step(x: Any) -> Any:
        loss, grads = nnx.value_and_grad(
            lambda model: dj.compute_average_loss((model(x) ** 2).sum(1))
        )(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("sum", grads))
        count.assign_add(1)
        return loss

    return (model, optimizer, count), step


class Killer:
    """Kills processes of a strategy, and waits after each until it goes on."""

    def __init__(self, coordinator: ClusterCoordinator, seed: int, engine: str) -> None:
        self.coordinator, self.random, self.engine = coordinator, random.Random(seed), engine
        self.seconds: list[float] = []

    def kill(self, role: str) -> None:
        """Kills one of its workers or servers."""
        while not (pids := children(role, self.engine)):  # the last of them is being replaced
            time.sleep(0.005)
        before = self.coordinator.stats.version
        os.kill(self.random.choice(pids), signal.SIGKILL)
        start = time.monotonic()
        # It goes back at most to the last join, so that it has gone on when there are more than before. With
        # a few more the function that was under way is among them: one that loses three workers in a row
        # would be given up.
        while self.coordinator.stats.version < before + 20 and not self.coordinator.done():
            assert time.monotonic() < start + SECONDS
            time.sleep(0.005)
        self.seconds.append(time.monotonic() - start)


def children(role: str, engine: str = "processes") -> list[int]:
    """The processes of a role that were started by one that this process has started."""
    name = f"ray::_{role.capitalize()}" if engine == "ray" else f"dj {role}"
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = state_and_parent(folder.name)
            comm = (folder / "comm").read_text().strip()
            is_ours = comm.startswith(name) and state_and_parent(parent)[1] == str(os.getpid())
        except (OSError, ValueError):
            continue  # it has ended
        if is_ours and state not in "ZX":  # which have been killed already
            found.append(int(folder.name))
    return found


def state_and_parent(pid: str) -> list[str]:
    """The letter of a process's state, and the process that has started it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]


@pytest.fixture
def one_device() -> dj.Strategy:
    """One device."""
    return dj.OneDeviceStrategy(jax.devices()[0])


def batches(number: int) -> Any:
    """Inputs of steps."""
    return np.random.default_rng(0).normal(size=(number, 4, 8)).astype(np.float32)


def trained(one: dj.Strategy, inputs: Any) -> tuple[Any, list[float]]:
    """The state and the losses of one device."""
    state, step = build(one)
    losses = [float(one.run(step, args=(x,))) for x in inputs]
    return leaves(state), losses


def leaves(state: Any) -> list[Any]:
    """The numbers of the model, of the optimizer and of the counter."""
    model, optimizer, count = state
    return numbers((nnx.state(model), nnx.state(optimizer), count[...]))


EACH = 40


def run_with_kills(
    kills: list[str], seed: int, *, engine: str, servers: int, staleness: float = 0, lost: float = 0
) -> tuple[Any, Any, Killer]:
    """Trains while processes are killed and messages lost; the state and losses, and the killer."""
    strategy = dj.ParameterServerStrategy(
        workers=2, servers=servers, max_staleness=staleness, engine=engine
    )
    coordinator = ClusterCoordinator(strategy)
    state, step = build(strategy)
    inputs = iter(batches(EACH * (1 + len(kills))))
    losses = [coordinator.schedule(step, args=(next(inputs),)) for _ in range(EACH)]
    coordinator.join(SECONDS)
    killer = Killer(coordinator, seed, engine)
    with dj.testing.disturb_messages(strategy, lost=lost):
        for role in kills:
            losses += [coordinator.schedule(step, args=(next(inputs),)) for _ in range(EACH)]
            killer.kill(role)
        coordinator.join(SECONDS)
    assert coordinator.stats.version == len(losses)
    assert max(coordinator.stats.staleness) <= staleness
    return leaves(state), [float(x) for x in coordinator.fetch(losses)], killer


NEEDS_RAY = pytest.mark.skipif(
    not find_spec("ray"), reason="needs Ray: dev.py test --sources has it"
)
RAY = pytest.param("ray", marks=NEEDS_RAY)
ENGINES = pytest.mark.parametrize("engine", ["processes", RAY])
LOOPBACK = r": (0100007F|0000000000000000FFFF00000100007F):|/ray/session"
"""Of a line of /proc: an address, or a file."""


@ENGINES
def test_kills_do_not_change_any_bit(one_device: dj.Strategy, engine: str) -> None:
    """A worker and a server are killed: weights, state of the optimizer, dropout and losses are equal."""
    state, losses, _ = run_with_kills(["worker", "server"], seed=1, engine=engine, servers=1)
    expected, of_one = trained(one_device, batches(len(losses)))
    assert losses == of_one
    assert_same_bits(state, expected)


@pytest.mark.exhaustive
@ENGINES
@pytest.mark.parametrize("staleness", [0, 4])
def test_many_kills(one_device: dj.Strategy, staleness: int, engine: str) -> None:
    """10 workers and 3 servers are killed, and messages lost: each closure is applied exactly once."""
    kills = ["worker"] * 10 + ["server"] * 3
    seed = random.randrange(1000)
    random.Random(seed).shuffle(kills)
    print("seed", seed)
    state, losses, killer = run_with_kills(
        kills, seed, engine=engine, servers=2, staleness=staleness, lost=0.25
    )
    print("back after", sorted(round(s, 2) for s in killer.seconds))
    assert state[-1] == len(losses) >= 500
    assert np.mean(losses[-200:]) < 1e-3 * np.mean(losses[:5])  # on one device 2e-6
    if staleness == 0:
        expected, of_one = trained(one_device, batches(len(losses)))
        assert losses == of_one
        assert_same_bits(state, expected)
    assert max(killer.seconds) < 30


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ["threads", "processes", pytest.param("ray", marks=NEEDS_RAY)])
def test_lost_duplicated_or_late_messages_do_not_change_any_bit(
    one_device: dj.Strategy, engine: str
) -> None:
    """Runs are repeated, and weights, state of the optimizer, dropout and losses are those of one device."""
    strategy = dj.ParameterServerStrategy(workers=2, servers=2, max_staleness=0, engine=engine)
    coordinator, (state, step) = ClusterCoordinator(strategy), build(strategy)
    disturbed = dj.testing.disturb_messages(
        strategy, lost=0.1, duplicated=0.5, delayed=0.1, seconds=0.001
    )
    with disturbed:
        losses = [coordinator.schedule(step, args=(x,)) for x in batches(EACH)]
        coordinator.join(SECONDS)
    assert strategy._coordinator._log.attempts > EACH
    expected, of_one = trained(one_device, batches(EACH))
    assert [float(x) for x in coordinator.fetch(losses)] == of_one
    assert_same_bits(leaves(state), expected)
    before = strategy._coordinator._log.attempts
    run_one(coordinator, step)
    assert strategy._coordinator._log.attempts == before + 1, "after the block nothing is lost"


SOME_CUTS = [["commit", "restore"], ["run"]]
CUTS = [*SOME_CUTS, ["run", "link"], ["prepare", "server"], ["run", "load"], ["pull"], ["assign"]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("cuts", [SOME_CUTS, CUTS], ids=len)
def test_connections_that_break_within_a_message_do_not_change_any_bit(
    one_device: dj.Strategy, monkeypatch: pytest.MonkeyPatch, cuts: list[list[str]]
) -> None:
    """Half of some messages of the coordinator arrives, and the bits are those of one device."""
    send, left, choosing = Connection.send, list[str](), threading.Lock()
    strategy = dj.ParameterServerStrategy(workers=2, servers=2, max_staleness=0, engine="processes")
    coordinator, (state, step) = ClusterCoordinator(strategy), build(strategy)
    inputs = iter(batches(5 * (1 + len(cuts))))

    def cut(connection: Connection, message: Message) -> None:
        with choosing:  # among several threads that send
            if is_chosen := message.name in left and connection._socket.fileno() >= 0:
                left.remove(message.name)
        if is_chosen:
            data = b"".join(message.packed())
            connection._socket.sendall(data[: len(data) // 2])
            connection._socket.shutdown(socket.SHUT_RDWR)
        send(connection, message)

    monkeypatch.setattr(Connection, "send", cut)
    losses = []
    for names in [[], *cuts]:
        left.extend(names)
        if "assign" in names:
            state[-1][...] = state[-1][...] + 0
        losses += [coordinator.schedule(step, args=(next(inputs),)) for _ in range(5)]
        coordinator.join(SECONDS)
        assert not left, "each was sent"
    expected, of_one = trained(one_device, batches(len(losses)))
    assert [float(x) for x in coordinator.fetch(losses)] == of_one
    assert_same_bits(leaves(state), expected)


def run_one(coordinator: ClusterCoordinator, step: Any) -> None:
    coordinator.schedule(step, args=(batches(1)[0],))
    coordinator.join(SECONDS)


def running(workers: int = 1, engine: str = "processes", **options: Any) -> Any:
    """A strategy that has run one closure, its coordinator, the counter and the step."""
    strategy = dj.ParameterServerStrategy(
        workers=workers, max_staleness=0, engine=engine, **options
    )
    coordinator, ((_, _, count), step) = ClusterCoordinator(strategy), build(strategy)
    run_one(coordinator, step)
    return strategy, coordinator, count, step


def sockets_that_listen(pids: list[int]) -> Iterator[str]:
    """The lines of /proc of the listening sockets of some processes."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    for table in ("tcp", "tcp6", "unix"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            is_tcp = table != "unix"
            inode, listens = (
                (words[9], words[3] == "0A") if is_tcp else (words[6], words[3] == "00010000")
            )
            if listens and inode in inodes:
                yield line


@pytest.mark.exhaustive
@ENGINES
def test_nobody_listens_and_workers_join_and_leave(engine: str) -> None:
    """No other machine reaches a socket; with one worker more and one fewer each closure is applied once."""
    strategy, coordinator, _, step = running(engine=engine)
    lines = sockets_that_listen(children("worker", engine) + children("server", engine))
    if engine == "ray":
        lines = (line for line in lines if not re.search(LOOPBACK, line))
    assert list(lines) == []
    strategy.add_workers(1)
    for x in batches(50):
        coordinator.schedule(step, args=(x,))
    strategy.remove_workers(1)
    coordinator.join(SECONDS)
    assert (coordinator.stats.version, strategy.workers) == (51, 1)
    pids = children("worker", engine) + children("server", engine)
    assert pids
    left, ids = strategy._coordinator, {*strategy._coordinator.state.variables}
    del strategy, coordinator, step
    gc.collect()
    limit = time.monotonic() + SECONDS
    while any(Path(f"/proc/{pid}").is_dir() for pid in pids):
        assert time.monotonic() < limit, "processes end with their strategy"
        time.sleep(0.01)
    # As a save of its variables does, while it is not collected yet.
    saving = threading.Thread(target=left.write_back, args=(ids,), daemon=True)
    saving.start()
    saving.join(SECONDS)
    assert not saving.is_alive()


@pytest.mark.exhaustive
def test_a_worker_that_takes_too_long_is_replaced() -> None:
    """A stopped worker is ended after ``step_seconds``, and another one runs its closure."""
    _, coordinator, count, step = running(options=dj.ServerOptions(step_seconds=20.0))
    os.kill(children("worker")[0], signal.SIGSTOP)
    run_one(coordinator, step)
    assert int(count[...]) == 2


@pytest.mark.exhaustive
def test_processes_unload_programs_of_deleted_models() -> None:
    """At the next join; workers at the run after it."""
    strategy = dj.ParameterServerStrategy(workers=1, max_staleness=0, engine="processes")
    coordinator = ClusterCoordinator(strategy)

    def train() -> None:
        (_, _, count), step = build(strategy)
        for n in (1, 2):
            run_one(coordinator, step)
            assert int(count[...]) == n

    for _ in range(3):
        train()
        gc.collect()
    engine: Any = strategy._engine
    assert [len(store._loads) for store in engine._stores] == [1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("role", ["worker", "server"])
def test_a_stopped_process_is_named(
    role: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and nothing is lost when it goes on."""
    monkeypatch.setattr(_engines, "_STOPPED_POLL_SECONDS", 0.1)
    others = children(role)  # of a strategy that was not collected yet
    _, coordinator, count, step = running()
    (pid,) = {*children(role)}.difference(others)
    os.kill(pid, signal.SIGSTOP)
    coordinator.schedule(step, args=(batches(1)[0],))
    with pytest.raises(dj.DeadlineExceededError):
        coordinator.join(1.0)
    os.kill(pid, signal.SIGCONT)
    coordinator.join(SECONDS)
    assert int(count[...]) == 2
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"Waiting for {role} 0: process {pid} is stopped.")


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 1 << 22])
def test_join_keeps_its_limit_although_a_server_does_nothing(size: int) -> None:
    """Neither what the server has nor what the user has written is waited for longer; later it is there."""
    strategy = dj.ParameterServerStrategy(workers=1, max_staleness=0, engine="processes")
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        weight = dj.Variable(jnp.zeros(size), aggregation=dj.VariableAggregation.SUM)
    coordinator.schedule(lambda: weight.assign_add(jnp.ones(size)))
    coordinator.join(SECONDS)
    server = strategy._coordinator.stores[0].child
    os.kill(server._pid, signal.SIGSTOP)
    weight.assign(jnp.full(size, 5.0))
    raised = list[BaseException]()

    def join() -> None:
        for _ in range(2):
            try:
                coordinator.join(0.5)
            except dj.DeadlineExceededError as error:
                raised.append(error)

    joining = threading.Thread(target=join, daemon=True)
    joining.start()
    joining.join(SECONDS / 4)
    was_late = joining.is_alive()
    os.kill(server._pid, signal.SIGCONT)
    assert not was_late
    assert all("the servers have not answered after 0.5 seconds" in str(x) for x in raised)
    assert len(raised) == 2
    coordinator.schedule(lambda: weight.assign_add(jnp.ones(size)))
    coordinator.join(SECONDS)
    assert (weight[...] == 6).all()


@pytest.mark.exhaustive
def test_schedule_refuses_a_step_that_calls_python() -> None:
    """It could not run in a process that has none of the program's code."""
    strategy = dj.ParameterServerStrategy(workers=1, max_staleness=0, engine="processes")

    def step(x: Any) -> None:
        jax.debug.print("{}", x)

    with pytest.raises(dj.LoweringError, match="calls Python"):
        ClusterCoordinator(strategy).schedule(step, args=(1.0,))


@pytest.mark.exhaustive
def test_a_start_that_is_interrupted_leaves_no_process_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process that the others are forked from ends, and the next closure starts another one."""
    strategy = dj.ParameterServerStrategy(workers=1, servers=2, max_staleness=0, engine="processes")
    coordinator, ((_, _, count), step) = ClusterCoordinator(strategy), build(strategy)
    child, started = _engines._ForkServer.child, list[Any]()

    def interrupted(fork_server: Any, kind: str, number: int) -> Any:
        if started:
            raise KeyboardInterrupt
        started.append(child(fork_server, kind, number))
        return started[0]

    monkeypatch.setattr(_engines._ForkServer, "child", interrupted)
    with pytest.raises(KeyboardInterrupt):
        coordinator.schedule(step, args=(batches(1)[0],))
    monkeypatch.undo()
    ended = threading.Thread(target=started[0].wait, daemon=True)
    ended.start()
    ended.join(SECONDS / 10)
    assert not ended.is_alive(), "the process ends, for its end of the connection is closed"
    run_one(coordinator, step)
    assert int(count[...]) == 1


def test_a_start_that_fails_is_an_error_and_join_waits_for_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process that workers are forked from ends at each start; the variables are as they were."""
    strategy = dj.ParameterServerStrategy(workers=1, engine="processes")
    coordinator, ((_, _, count), step) = ClusterCoordinator(strategy), build(strategy)
    monkeypatch.setattr(_engines.sys, "executable", shutil.which("false"))
    with pytest.raises(dj.StepFailedError, match=r"ended twice .* exit code 1"):
        coordinator.schedule(step, args=(batches(1)[0],))
    coordinator.join(SECONDS)
    assert (coordinator.done(), int(count[...])) == (True, 0)
    monkeypatch.undo()
    run_one(coordinator, step)
    assert int(count[...]) == 1


def test_a_run_whose_worker_ends_is_lost() -> None:
    """Also where the step returns nothing, so that its last message could be taken for the results."""
    here, there = socket.socketpair()
    worker = _engines._Worker(_engines._Child(SimpleNamespace(kill=id), 0, here), [], None)  # type: ignore[arg-type]
    halves = SimpleNamespace(worker=SimpleNamespace(values=[], returns=[]), results_at=[])
    program = SimpleNamespace(name="step", bound=SimpleNamespace(halves=halves))
    worker._loaded["step"] = lambda: program  # type: ignore[assignment]
    with here, there:
        Connection(there).send(Message("ended", ["MemoryError: no room"]))
        with pytest.raises(WorkerLostError, match="no room"):
            worker(program, (), [])  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_a_step_is_not_blamed_for_workers_that_ended_while_idle() -> None:
    """Three of them are replaced, and the function that each would have run is not given up."""
    strategy, coordinator, count, step = running(workers=3)
    workers: Any = strategy._engine._workers
    while len(workers) < 3:
        time.sleep(0.005)
    for worker in list(workers.values()):
        os.kill(worker._pid, signal.SIGKILL)
        worker.wait()
    run_one(coordinator, step)
    assert int(count[...]) == 2


def test_no_process_starts_after_the_strategy_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is delayed until all are ended starts no process, which nobody would end, and ends."""
    controls = []

    def started(_: Any) -> Connection:
        assert not controls, "a process was started"
        controls.append(socket.socketpair())
        return Connection(controls[-1][0])

    monkeypatch.setattr(_engines._ForkServer, "_started", started)
    fork_server = _engines._ForkServer("cpu")
    fork_server.close()
    with pytest.raises(WireError):
        fork_server.child("worker", 0)
    controls[0][1].close()
    here, there = socket.socketpair()
    with there:
        child = _engines._Child(fork_server, 0, here)
        child.end()
        child.wait()
    coordinator = Coordinator(1, [], 0.0, jax.devices()[0])
    coordinator.stop()
    coordinator.fail_for_good(WireError())  # of the thread that wanted a process
    assert coordinator.is_done()


def test_where_the_parent_ignores_sigchld_a_lost_process_is_replaced() -> None:
    """Linux then reaps it, and the process that the others are forked from must not end with an error."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        fork_server = _engines._ForkServer("cpu")
    finally:
        signal.signal(signal.SIGCHLD, before)
    first = fork_server._process
    lost = fork_server.child("server", 0)
    lost.kill()
    lost.wait()
    lost.close()
    for _ in range(2):
        fork_server.child("server", 0).end()
    assert fork_server._process is first
    fork_server.close()


def test_a_program_is_loaded_while_a_server_is_replaced() -> None:
    """The new process gets those of before and that one."""
    store, sent = _engines.RemoteStore(jax.devices()[0]), list[str]()

    def put(request: Any) -> None:
        sent.append(request[-1].name)
        store._loads.setdefault("new", Message("new"))

    store._requests = SimpleNamespace(put=put)  # type: ignore[assignment]
    store._loads["old"] = Message("old")
    store.child = SimpleNamespace()
    store.attach(store.child)
    assert sent == ["old"]


def test_a_server_that_misses_a_request_is_killed() -> None:
    """Else it would do what comes after a message for which there was no memory."""
    store, ended = _engines.RemoteStore(jax.devices()[0]), threading.Event()

    def send(_: Message) -> None:
        raise MemoryError

    store.attach(SimpleNamespace(send=send, kill=ended.set))
    store.forget([1])
    assert ended.wait(SECONDS)


def test_a_server_that_cannot_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its worker would ask it again for ever."""
    codes = list[int]()
    monkeypatch.setattr(os, "_exit", codes.append)
    server = SimpleNamespace(store=_child.Store())
    worker = SimpleNamespace(receive=lambda: Message("fetch", ["what no worker sends"]))
    _child.Server._serve(server, worker)  # type: ignore[arg-type]
    assert codes == [1]


def test_join_raises_if_servers_cannot_go_back() -> None:
    """The thread that replaces a server fails, as where memory is short, and nobody waits for it."""
    coordinator = Coordinator(1, [], 0.0, jax.devices()[0])

    def fail() -> None:
        raise MemoryError("no room for what was kept")

    coordinator.go_back = fail  # type: ignore[method-assign]
    processes = SimpleNamespace(_coordinator=coordinator, _start_server=lambda *_: None)
    child = SimpleNamespace(wait=str, close=lambda: None)
    _engines.Processes._watch(processes, 0, child, threading.Event())  # type: ignore[arg-type]
    with pytest.raises(dj.StepFailedError, match="no room for what was kept"):
        coordinator.join(SECONDS)


def test_a_server_that_has_ended_three_times_is_not_started_again() -> None:
    """Else processes would start and end for ever, after the error that ends the training."""
    coordinator, starts = Coordinator(1, [], 0.0, jax.devices()[0]), list[Any]()
    processes = SimpleNamespace(
        _coordinator=coordinator, _start_server=lambda *of: starts.append(of)
    )
    child = SimpleNamespace(wait=str, close=lambda: None)
    for _ in range(3):
        _engines.Processes._watch(processes, 0, child, threading.Event())  # type: ignore[arg-type]
    assert len(starts) == 2
    with pytest.raises(dj.StepFailedError, match="server 0 has ended 3 times"):
        coordinator.join(SECONDS)


@pytest.mark.exhaustive
def test_four_bit_numbers_are_sent() -> None:
    """To a server, which changes them, to a worker, and back."""
    strategy = dj.ParameterServerStrategy(workers=1, max_staleness=0, engine="processes")
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        weight, count = nnx.Param(jnp.asarray([3, -7], jnp.int4)), nnx.Param(jnp.int4(1))

    def step(x: Any) -> Any:
        count[...] += jnp.int4(1)
        return weight[...] + x

    last = [coordinator.schedule(step, args=(jnp.int4(1),)) for _ in range(3)][-1]
    coordinator.join(SECONDS)
    assert (count[...].dtype, int(count[...])) == (jnp.int4, 4)
    assert (last.fetch().dtype, last.fetch().tolist()) == (jnp.int4, [4, -6])


@pytest.mark.exhaustive
def test_the_error_says_why_a_server_keeps_ending() -> None:
    """An update that needs more memory than there is."""
    strategy = dj.ParameterServerStrategy(workers=1, max_staleness=0, engine="processes")
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        weight = nnx.Param(jnp.ones(()))

    def step(x: Any) -> None:
        many = jnp.sort(jnp.sin(weight[...] * jnp.arange(1 << 21)[:, None] + jnp.arange(1 << 21)))
        weight[...] -= many[0, 0] * dj.get_replica_context().all_reduce("sum", x)

    coordinator.schedule(step, args=(1.0,))
    with pytest.raises(dj.StepFailedError, match=r"server 0 has ended 3 times: .*[Mm]emory"):
        coordinator.join(SECONDS)
