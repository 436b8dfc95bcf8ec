"""Jobs in which a process ends, or gives up, in a way that Python tells nobody."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import fault_functions
import jax

import distribute_jax as dj


def left_by_sys_exit(status):
    """Process 1 catches one exit, and leaves by another between two steps."""
    strategy = fault_functions.make_strategy()
    step, _ = fault_functions.make_step(strategy)
    x = fault_functions.batch(strategy)
    for number in range(3):
        print(f"step {number} at {time.time():.3f}", flush=True)
        if jax.process_index() == 1 and number == 1:
            try:
                sys.exit(7)
            except SystemExit:
                sys.exit(status)
        float(strategy.run(step, args=(x,)))


def caught_exits_are_none():
    """Catches an exit in the middle of the job, and comes to its end."""
    strategy = fault_functions.make_strategy()
    with contextlib.suppress(SystemExit):
        sys.exit(5)
    strategy.barrier("end")
    return "through"


def later_than_the_others_waited():
    """Process 0 comes to a barrier when process 1 has given up; both go on together."""
    strategy = fault_functions.make_strategy()
    time.sleep(4 * (jax.process_index() == 0))
    said = ""
    try:
        strategy.barrier("here", timeout=1)
    except dj.DeadlineExceededError as error:
        said = str(error)
    strategy.barrier("here", timeout=20)
    total = float(strategy.reduce("sum", strategy.run(lambda: jax.numpy.ones(()))))
    return said, total


def reduce_by_one():
    """Process 0 calls ``reduce`` alone; the other one is in its own code."""
    strategy = fault_functions.make_strategy(step_seconds=2.0)
    value = fault_functions.batch(strategy)
    strategy.reduce("sum", value)  # so that the devices are connected
    if jax.process_index():
        time.sleep(8)
        return ""
    try:
        return str(strategy.reduce("mean", value, axis=0))
    except dj.DeadlineExceededError as error:
        return str(error)


def one_is_stopped():
    """Process 1 is stopped for good; JAX counts it as dead before the step's time is over."""
    strategy = fault_functions.make_strategy(step_seconds=30.0, heartbeat_seconds=6)
    strategy.barrier("here")
    if jax.process_index():
        os.kill(os.getpid(), signal.SIGSTOP)
    strategy.barrier("there")


def both_fail_while_they_wait():
    """Each process waits for the other at another barrier."""
    strategy = fault_functions.make_strategy()
    strategy.barrier("one" if jax.process_index() else "other")
