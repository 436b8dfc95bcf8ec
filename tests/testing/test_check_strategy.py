"""The conformance suite: every strategy of the library passes, and each defect is found and named."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import broken
import jax
import pytest
from cases import long

import distribute_jax as dj
from distribute_jax.testing._check_strategy import CHECKS

OPERATIONS = {
    "nccl": dj.NcclAllReduce,
    "hierarchical": dj.HierarchicalCopyAllReduce,
    "to_one": dj.ReductionToOneDevice,
    "ring": dj.RingAllReduce,
}
FACTORIES: dict[str, Callable[[Any], dj.Strategy]] = {
    "mirrored": dj.MirroredStrategy,
    "central_storage": dj.CentralStorageStrategy,
    "fully_sharded": dj.FullyShardedStrategy,
    **{name: broken.mirrored_with(ops) for name, ops in OPERATIONS.items()},
}


@pytest.mark.parametrize(
    ("factory", "n"), [long(dj.OneDeviceStrategy, 1), (dj.MirroredStrategy, 4)]
)
def test_a_strategy_passes_and_the_report_says_which_checks_ran(factory: Any, n: int):
    only = [
        *("context_of_scope", "context_of_run", "mixed_strategies_refused", "replica_order"),
        *("results", "reduce", "merge_call", "training"),
    ]
    report = dj.testing.check_strategy(factory, [n] if n > 1 else None, only=only)
    assert (report.checks, report.replicas) == (tuple(only), (n,))
    assert (report.lowerings, report.refused) == (("shard_map",), ())


def tpu_with(cores: int, devices: list[jax.Device]) -> dj.TPUStrategy:
    """The first core of replica i is on device i; all first cores come before the second ones."""
    replicas = len(devices)
    resolver = dj.cluster_resolver.TPUClusterResolver("local")
    topology = dj.initialize_tpu_system(resolver)
    own = topology.device_coordinates[0]
    chosen = [[own[core * replicas + i] for core in range(cores)] for i in range(replicas)]
    return dj.TPUStrategy(resolver, dj.tpu.experimental.DeviceAssignment(topology, chosen))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("cores", "replicas"), [(2, 4), (1, 4), (2, 1)])
def test_tpu_strategy_passes_every_check(cores: int, replicas: int):
    """One replica of several cores is compiled differently from several replicas."""
    dj.testing.check_strategy(functools.partial(tpu_with, cores), [replicas])


ALONE: dict[str, Callable[[Any], dj.Strategy]] = {
    "one_device": dj.OneDeviceStrategy,
    "in_groups": lambda devices: dj.FullyShardedStrategy(devices, shard_over=2),
}
LOWERINGS = ("shard_map", "pmap")
CELLS = [
    ("in_groups", 4, "shard_map"),
    *(("one_device", 1, lowering) for lowering in LOWERINGS),
    *((name, n, lowering) for name in FACTORIES for n in (1, 2, 4, 8) for lowering in LOWERINGS),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "replicas", "lowering"), CELLS)
def test_every_strategy_passes_every_check(name: str, replicas: int, lowering: str):
    factory = {**FACTORIES, **ALONE}[name]
    report = dj.testing.check_strategy(factory, [replicas], lowerings=[lowering])
    assert (report.checks, report.refused) == (tuple(CHECKS), ())


def test_checks_that_a_lowering_refuses_are_reported_and_logged(caplog: pytest.LogCaptureFixture):
    factory = functools.partial(tpu_with, 2)
    only = ["all_reduce_is_proved", "dataset", "verify_option"]
    report = dj.testing.check_strategy(factory, [2], lowerings=["pmap"], only=only)
    assert [line.partition(": ")[0] for line in report.refused] == [
        "all_reduce_is_proved, 2 replicas, pmap",
        "verify_option, 2 replicas, pmap",
    ]
    assert all("replicas of 2 cores" in line for line in report.refused)
    assert "2 of 3 checks were not run" in caplog.text


BROKEN: dict[Any, dict[int, list[str]]] = {
    broken.ForgetsReplica0: {
        2: ["all_reduce_mean", "all_reduce_options", "all_reduce_transformed"]
    },
    broken.Averages: {2: ["all_reduce_gradient"]},
    broken.Rounds: {4: ["all_reduce_sum"]},
    broken.AddsInFloat32: {4: ["all_reduce_sum"]},
    broken.AddsInDifferentOrders: {4: ["all_reduce_copies"]},
    broken.UnprovedRing: {2: ["all_reduce_is_proved"]},
    broken.Reversed: {2: ["replica_order"]},
    broken.HasNoScope: {
        2: ["context_of_scope", "variables_on_write_outside", "variables_on_read_outside"]
    },
    broken.Delegates: {1: ["context_of_run"]},
    broken.RunsTwice: {
        1: ["training_with_dj_optimizer", "metrics_over_replicas", "batch_norm"],
        2: [
            *("variables_on_write", "variables_rows"),
            *("training", "random_streams", "random_parameters"),
        ],
    },
    broken.TurnsChecksOff: {
        2: ["variables_drift_refused", "unreduced_gradients_refused", "verify_option"]
    },
    broken.ForgetsKeywords: {1: ["arguments"]},
    broken.ReturnsOnlyReplica0: {2: ["results", "all_gather", "merge_call", "variables_on_read"]},
    broken.NeverDonates: {1: ["donation"]},
    broken.DropsPartialBatches: {2: ["dataset", "partial_batches"]},
    broken.ReducesWithoutChecks: {
        1: ["context_refusals", "mixed_strategies_refused"],
        2: ["reduce"],
    },
    broken.GathersReversed: {2: ["gather"]},
    broken.RunsOneStepLess: {1: ["run_steps"]},
}
"""What is wrong, and for some numbers of replicas the checks that must see it."""


def failure_message(cls: Any, replicas: int, only: list[str]) -> str:
    factory = broken.mirrored_with(cls) if issubclass(cls, dj.CrossDeviceOps) else cls
    with pytest.raises(dj.NotEqualError) as caught:
        dj.testing.check_strategy(factory, [replicas], only=only)
    return str(caught.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cls", BROKEN, ids=[cls.__name__ for cls in BROKEN])
def test_every_defect_is_found_by_the_checks_for_it(cls: Any):
    for replicas, only in BROKEN[cls].items():
        text = failure_message(cls, replicas, only)
        assert (
            re.findall(rf"^  (\w+), {replicas} replicas, shard_map:$", text, re.MULTILINE) == only
        )
        assert text.startswith(f"check_strategy: {len(only)} of {len(only)} checks failed.")


def test_every_check_finds_some_defect():
    assert {check for counts in BROKEN.values() for only in counts.values() for check in only} == {
        *CHECKS
    }


@pytest.mark.exhaustive
def test_the_message_names_the_facts_and_how_to_repeat_the_check():
    text = failure_message(broken.GathersReversed, 2, ["dataset", "gather", "arguments"])
    assert text.startswith("check_strategy: 2 of 3 checks failed.")
    assert (
        "\n    gather of uneven parts:\n      expected [1. 2. 2.]\n      received [2. 2. 1.]"
        in text
    )
    assert "check_strategy(factory, [2], lowerings=['shard_map'], only=['dataset'])\n" in text


def test_an_error_in_a_check_is_reported_after_its_facts():
    class BreaksLater(dj.MirroredStrategy):
        entered = 0

        def scope(self) -> Any:
            self.entered += 1
            if self.entered > 2:
                raise OSError("scope is broken\nin two lines")
            return broken.HasNoScope.scope(self)

    text = failure_message(BreaksLater, 1, ["context_of_scope", "context_of_run"])
    assert "1 of 2 checks failed" in text
    assert text.index("what is current in scope():") < text.index("expected no error")
    assert "expected no error\n      received OSError: scope is broken … in two lines" in text


@pytest.mark.exhaustive
def test_only_the_first_facts_of_a_check_are_listed():
    text = failure_message(broken.ForgetsReplica0, 2, ["all_reduce_sum"])
    assert text.count("expected") == 8
    assert re.search(r"\n    and \d+ more\n", text)


@pytest.mark.exhaustive
def test_the_suite_restores_the_logger(caplog: pytest.LogCaptureFixture):
    dj.testing.check_strategy(dj.MirroredStrategy, [2], only=["batch_norm"])
    assert caplog.text == ""
    logging.getLogger("distribute_jax").warning("heard")
    assert "heard" in caplog.text


WRONG = {
    "made already": (
        lambda: dj.testing.check_strategy(dj.MirroredStrategy()),
        "factory must be a function",
    ),
    "no strategy": (
        lambda: dj.testing.check_strategy(lambda devices: devices, [1]),
        r"must make a dj.Strategy .* got \[",
    ),
    "fixed size": (
        lambda: dj.testing.check_strategy(lambda devices: dj.MirroredStrategy([0, 1]), [1]),
        r"on each of 1 device\(s\); got .* with 2 replica",
    ),
    "three": (lambda: dj.testing.check_strategy(dj.MirroredStrategy, [3]), "some of 1, 2, 4, 8"),
    "check": (
        lambda: dj.testing.check_strategy(dj.MirroredStrategy, only=["sum"]),
        "all_reduce_sum",
    ),
    "lowering": (
        lambda: dj.testing.check_strategy(dj.MirroredStrategy, lowerings=["jit"]),
        "'shard_map', 'pmap'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_before_anything_runs(case: str):
    call, wanted = WRONG[case]
    with pytest.raises(dj.ArgumentError, match=wanted):
        call()


def test_more_replicas_than_devices_are_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch):
    devices = jax.local_devices()[:3]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    with pytest.raises(ValueError, match=r"has 3 device\(s\). Call dj.simulate\(4\) before JAX"):
        dj.testing.check_strategy(dj.MirroredStrategy, [4])
    report = dj.testing.check_strategy(dj.MirroredStrategy, only=["context_of_scope"])
    assert report.replicas == (1, 2)
