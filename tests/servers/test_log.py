"""The log of updates and its servers: each closure once, in one order, whatever is lost on the way."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from distribute_jax.servers._state import State
from distribute_jax.servers._updates import Attempt, Log, Store


def server_with() -> Store:
    """A server of one array: what it applied, in order, as nested pairs."""
    server = Store()
    server.load("done", [0], [0], lambda old, sent: [(old[0], sent[0])])
    server.assign([0], [()])
    return server


def in_order(state: Any) -> list[Any]:
    """What a server applied."""
    applied = []
    while state:
        state, last = state
        applied.append(last)
    return applied[::-1]


class Run:
    """Closures on workers and servers that are killed, over a network that loses a quarter both ways."""

    def __init__(
        self, seed: int, *, closures: int, workers: int, servers: int, bound: float, shares: int = 1
    ) -> None:
        self.random, self.log = random.Random(seed), Log(bound)
        self.closures, self.shares, self.workers = closures, shares, workers
        self.servers = [server_with() for _ in range(servers)]
        self.alive = [True] * servers
        self.snapshot = self.snapshots()
        self.flights: dict[int, tuple[Attempt, list[int]]] = {}
        self.commits: list[Any] = []
        self.lost: Counter[str] = Counter()
        self.most_stale = 0
        self.order: list[int] = []
        for closure in range(closures):
            self.log.add(closure, shares=shares)

    def call(self, server: int, method: str, *args: Any) -> bool:
        """Sends a request until a reply comes; returns whether the server is alive."""
        while self.alive[server]:
            if self.random.random() < 0.25:
                self.lost["requests"] += 1
                continue
            getattr(self.servers[server], method)(*args)
            if self.random.random() < 0.25:
                self.lost["replies"] += 1
                continue
            return True
        return False

    def advance(self) -> None:
        """Does one thing that may be done next."""
        worker = self.random.randrange(self.workers)
        if worker not in self.flights:
            if (attempt := self.log.admit(worker)) is not None:
                self.flights[worker] = attempt, list(range(len(self.servers)))
            return
        attempt, left = self.flights[worker]
        if left:
            part = attempt.closure if attempt.share == 0 else 0
            self.call(left.pop(), "stage", attempt.epoch, attempt.number, "done", [part])
            return
        del self.flights[worker]
        if (update := self.log.finish(attempt)) is not None:
            self.order.append(update.closure)
            self.most_stale = max(self.most_stale, update.staleness)
            assert update.staleness <= self.log.max_staleness
            runs = tuple(run.number for run in update.attempts)
            every = range(len(self.servers))
            sent = self.log.epoch, update.number, runs, update.oldest_run
            self.commits += [(server, *sent) for server in every]

    def deliver(self) -> None:
        """Delivers one of the commits that are under way, in any order."""
        at = self.random.randrange(len(self.commits))
        server, *commit = self.commits[at]
        if self.call(server, "commit", *commit):
            del self.commits[at]

    def save(self) -> None:
        """Takes a snapshot of all servers at one version."""
        self.snapshot = self.snapshots()
        assert {version for version, _ in self.snapshot} == {self.log.version}
        self.log.forget(self.log.version)

    def snapshots(self) -> list[tuple[int, Any]]:
        """The versions and states of the servers."""
        return [(server.version, server.state[0]) for server in self.servers]

    def kill_worker(self) -> None:
        """Loses a worker with what it computes; another one comes."""
        if self.flights:
            worker = self.random.choice(list(self.flights))
            late, _ = self.flights.pop(worker)
            self.log.give_up(worker)
            assert self.log.finish(late) is None, "a run that was given up is not applied"
            self.lost["workers"] += 1

    def kill_server(self) -> None:
        """Loses a server with all of its memory: all go back to the snapshot."""
        server = self.random.randrange(len(self.servers))
        self.alive[server] = False
        if self.commits:
            self.deliver()
        self.servers[server], self.alive[server] = server_with(), True
        again = self.log.go_back(self.snapshot[0][0])
        assert [update.closure for update in again] == self.order[self.log.version :]
        del self.order[self.log.version :]
        for one, (version, state) in zip(self.servers, self.snapshot, strict=True):
            one.restore(self.log.epoch, version, [0], [state])
        self.commits.clear()
        self.flights.clear()
        self.lost["servers"] += 1

    def to_the_end(self, kill_workers: int = 0, kill_servers: int = 0) -> None:
        """Runs all closures; kills at random times, and checks what the servers have then."""
        times = range(10, 3 * self.closures)
        kills = [(t, self.kill_worker) for t in self.random.sample(times, kill_workers)]
        kills += [(t, self.kill_server) for t in self.random.sample(times, kill_servers)]
        kills.sort(key=lambda kill: -kill[0])
        saved = tick = 0
        while self.log.open or self.commits:
            tick += 1
            if kills and tick >= kills[-1][0]:
                kills.pop()[1]()
            self.advance()
            if self.commits and self.random.random() < 0.8:
                self.deliver()
            if not self.commits and self.log.version - saved >= 40:
                self.save()
                saved = self.log.version
        assert sorted(self.order) == list(range(self.closures)), "nothing twice, nothing lost"
        for server in self.servers:
            assert in_order(server.state[0]) == self.order, "all servers have one order"
            assert server.version == self.closures


def simulate(seeds: range, closures: int) -> Counter[str]:
    """Many runs; the sum of what they lost."""
    total: Counter[str] = Counter()
    for seed in seeds:
        workers, servers, bound, shares = [(3, 2, 4, 1), (3, 2, 0, 1), (8, 5, 7, 1), (4, 2, 0, 4)][
            seed % 4
        ]
        run = Run(
            seed, closures=closures, workers=workers, servers=servers, bound=bound, shares=shares
        )
        run.to_the_end(kill_workers=10, kill_servers=3)
        assert run.most_stale == bound, "the bound is used"
        total += run.lost
    return total


def test_each_closure_is_applied_once_whatever_is_lost() -> None:
    """A quarter of requests and replies lost, ten workers and three servers killed: nothing twice or lost."""
    assert min(simulate(range(8), 100).values()) > 0


@pytest.mark.exhaustive
def test_each_closure_is_applied_once_in_a_thousand_runs() -> None:
    """The same in 1,000 runs of 500 closures."""
    lost = simulate(range(1000), 500)
    assert lost["servers"] == 3000
    assert lost["requests"] > 100_000


def test_admission_keeps_the_bound() -> None:
    """With a bound of 1 two steps are under way from version 0; a third one waits until one has ended."""
    log = Log(1)
    for closure in range(4):
        log.add(closure)
    first, second = log.admit(0), log.admit(1)
    assert first is not None
    assert second is not None
    assert log.admit(2) is None
    assert log.finish(second).staleness == 0  # type: ignore[union-attr]
    assert log.admit(2) is None, "the first would be two updates too late"
    assert log.finish(first).staleness == 1  # type: ignore[union-attr]
    assert log.admit(2).pulled == 2  # type: ignore[union-attr]


def test_closures_that_write_nothing_get_no_number() -> None:
    """They are admitted beside as many updates as they may miss, and the version stays."""
    log = Log(1)
    for closure, writes in enumerate((True, False, True, False)):
        log.add(closure, writes=writes)
    update, read, second = (log.admit(worker) for worker in range(3))
    assert None not in (update, read, second)
    assert log.admit(3) is None, "it would miss two updates that were scheduled before it"
    assert log.finish(read).number is None  # type: ignore[union-attr]
    assert log.version == 0
    assert log.finish(update).number == 0  # type: ignore[union-attr]
    last = log.admit(3)
    assert last is not None
    assert last.pulled == 1
    log.finish(second)
    log.finish(last)
    assert not log.open


def test_the_log_keeps_no_more_than_it_can_go_back_to() -> None:
    """A million updates are one number."""
    log = Log(0)
    for closure in range(3):
        log.add(closure)
        log.finish(log.admit(0))  # type: ignore[arg-type]
        log.forget(closure)
    assert log.version == 3
    assert [update.closure for update in log.go_back(2)] == [2]


def test_a_snapshot_has_the_version_of_its_values() -> None:
    """An update that is applied while the servers answer is not in it."""
    log = Log(0)

    def wait_for(answers: Any) -> Any:
        log.version += 1
        return answers

    state = State([Store()], jax.devices()[0], log, wait_for, can_be_lost=True)
    state.save()
    assert state.saved_version == 0


def test_cancelled_closures_do_not_run() -> None:
    """All that wait are removed; what runs ends."""
    log = Log(4)
    for closure in range(3):
        log.add(closure)
    running = log.admit(0)
    assert log.cancel() == [1, 2]
    assert running is not None
    assert log.finish(running) is not None
    assert log.admit(0) is None
    assert not log.open


def test_what_was_applied_is_not_cancelled_while_it_runs_again() -> None:
    """A later closure fails after the servers have gone back: the earlier ones are updates all the same."""
    log = Log(4)
    for closure in range(3):
        log.add(closure)
    for _ in range(2):
        running = log.admit(0)
        assert running is not None
        log.finish(running)
    log.go_back(0)
    assert log.cancel() == [2]
    assert list(log.open) == [0, 1]


def test_an_update_waits_for_earlier_ones_and_is_applied_once() -> None:
    """A commit that overtakes another is applied after it; sent again, it changes nothing."""
    server = server_with()
    server.stage(0, 1, "done", ["a"])
    server.stage(0, 2, "done", ["b"])
    server.commit(0, 1, [2], 3)
    assert server.version == 0
    for update in [(0, [1], 2), (1, [2], 3)]:
        server.commit(0, *update)
        assert server.version == 2
    assert in_order(*server.pull([0])) == ["a", "b"]


def test_what_lost_workers_staged_is_dropped() -> None:
    """A run that was given up is dropped with the next update, and refused when it comes late."""
    server = server_with()
    server.stage(0, 1, "done", ["lost"])
    server.stage(0, 2, "done", ["again"])
    server.commit(0, 0, [2], 3)
    server.stage(0, 1, "done", ["late"])
    assert not server._staged
    assert in_order(*server.pull([0])) == ["again"]


def test_an_earlier_epoch_is_void() -> None:
    """After the servers went back, what was sent before changes nothing."""
    server = server_with()
    server.restore(1, 7, [0], [("kept",)])
    server.stage(0, 1, "done", ["old"])
    server.commit(0, 7, [1], 2)
    assert (server.version, server._staged) == (7, {})
    assert server.pull([0]) == [("kept",)]


def test_the_shares_of_a_closure_that_writes_nothing_read_one_version() -> None:
    """It waits for the update under way, which would come between two of them."""
    log = Log(0)
    log.add(0)
    log.add(1, shares=2, writes=False)
    update = log.admit(0)
    assert update is not None
    assert log.admit(1) is None
    log.finish(update)
    shares = [log.admit(worker) for worker in (0, 1)]
    assert [share and share.pulled for share in shares] == [1, 1]


def test_messages_of_the_next_epoch_wait_until_the_server_has_gone_back() -> None:
    """A worker's message may overtake that of the coordinator, and is neither lost nor void."""
    server = server_with()
    with ThreadPoolExecutor() as pool:
        staged = pool.submit(server.stage, 1, 1, "done", ["new"])
        fetched = pool.submit(server.fetch, 1, 2)
        server.restore(1, 7, [0], [("kept",)])
        staged.result(10)
        server.prepare(2, [0])
        assert fetched.result(10) == [("kept",)]
    server.commit(1, 7, [1], 2)
    assert server.pull([0]) == [(("kept",), "new")]


def test_a_share_of_a_failed_closure_does_not_wait_for_what_it_reads():
    """A later update drops what was set aside for it, before it has read that."""
    log, server = Log(16), server_with()
    log.add(1, shares=2)
    log.add(2, shares=1)
    runs = [log.admit(worker) for worker in range(3)]
    for run in runs:
        server.prepare(run.number, [0])
    log.cancel(1)  # its first share failed
    server.stage(0, runs[2].number, "done", [2])
    update = log.finish(runs[2])
    with ThreadPoolExecutor() as pool:
        server._prepared.pop(runs[0].number)
        waiting = pool.submit(server.fetch, 0, runs[0].number)
        server.commit(0, update.number, [runs[2].number], update.oldest_run)
        assert waiting.result(timeout=10) is None
    assert server.fetch(0, runs[1].number) is None
    assert in_order(server.state[0]) == [2]
