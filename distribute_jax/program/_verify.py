"""``verify``: compares the step on all replicas with the step on one device with the whole batch."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from distribute_jax._errors import (
    ClusterError,
    DeadlineExceededError,
    NotEqualError,
    log_once,
)
from distribute_jax._mesh import (
    first_replica,
    is_local,
    num_replicas,
    outside_mesh,
)
from distribute_jax._messages import listed
from distribute_jax.processes import Job, job_of
from distribute_jax.program._aggregation import Combine
from distribute_jax.program._call import BoundProgram
from distribute_jax.program._compare import (
    NUDGES,
    OTHER_ORDER,
    Array,
    Verdict,
    coarsest,
    compared,
    copied,
    difference,
    exactly_equal,
    finite,
    largest,
    noise_of,
    nudged_outcome,
    on_host,
    same_specials,
    spacing_of,
)
from distribute_jax.program._notices import results_are_parts
from distribute_jax.program._options import RunOptions
from distribute_jax.program._padding_check import run_checked_for_leaks
from distribute_jax.program._result_rows import per_example_results
from distribute_jax.program._trace import Call
from distribute_jax.program._verify_float64 import in_float64
from distribute_jax.program._verify_outputs import (
    as_read,
    check_copies,
    compared_outputs,
    components_on,
    derived,
    every_output,
    keeps_statistics,
    log_parts,
    next_values,
    scales_by_number,
)
from distribute_jax.program._verify_runs import (
    draws,
    global_batches,
    on_one_device,
    with_equal_masks,
    with_equal_shares,
    with_fixed,
    with_fixed_draws,
)

_UNEQUAL = """\
The step on {replicas} replicas is not the step on one device with the whole batch:
{lines}
A distributed step must equal the step on one device, to rounding. The state is as before the call.{hint}"""

_PAIRS = """
Use all_reduce("sum", gradients) with a loss by dj.compute_average_loss(losses), or \
all_reduce("mean", gradients) with a mean over this replica's examples. dj.Optimizer sums by itself, so it \
needs the first loss. A step that divides by the number of replicas must read it from \
dj.get_replica_context().num_replicas_in_sync."""

_TERMS = """
Where gradients are summed, add dj.scale_regularization_loss(penalty) to the loss, so that a penalty on the \
weights counts once. A value that is not a sum over examples, such as a variance, the norm that clips \
gradients, or a loss over pairs, must be computed from what all_reduce or all_gather returned."""

_MEANT = """
If the step is meant to differ from one device, as with a loss over pairs of one replica's examples: \
strategy.run(..., options=dj.RunOptions(verify="off"))."""

_RANDOM = (
    "\nThe step draws random numbers, for more than masks of dropout, which differ on each replica, so it "
    "cannot be equal: check it with them off (model.eval())."
)
_MASKS = "\nBoth ran with the same masks of dropout, so these are not the difference."
_EQUAL_SHARES = (
    "\nFor the comparison every replica got the examples and random numbers of the first one, so these, and "
    "statistics of a share as those of batch norm, are not the difference."
)

_TOPIC = "the comparison with one device"
_EXACT = 1e-9
"""More than the relative difference that sums in another order make in float64."""
_RESULT = (
    "%s returns a value that is equal on all replicas, and another one on one device with the whole batch:\n"
    "%s\nA mean over the batch is the sum over the replicas of dj.compute_average_loss(values); compute "
    "another statistic from what all_reduce or all_gather returned."
)

_TOO_SMALL = (
    "%s changes these variables by hardly more than their rounding, so verify cannot tell whether the "
    "change is that of one device:\n%s\nTo check them, run the step once with a larger learning rate, or in "
    'float64 with jax.config.update("jax_enable_x64", True).'
)

_log = logging.getLogger("distribute_jax")


def verify(call: Call, entry: BoundProgram, values: Sequence[Any], options: RunOptions) -> bool:
    """Runs the step both ways from copies of the state, and raises if they differ.

    With ``verify="auto"`` a step is compared only if a difference is certainly an error. Returns whether the
    step needs no further comparison.
    """
    if num_replicas(call.mesh) == 1:
        return True
    flat = entry.flat_inputs(values, call.arguments)
    if options.verify == "auto":
        return not options.check_sync or _verify_auto(call, entry, values, flat, options)
    fixed = with_equal_masks(entry.program.traced)
    comparison = _Comparison(call, *with_fixed(fixed, call, entry, flat, options), values)
    check_copies(entry, comparison.outs)
    lines, small = comparison.differences()
    if lines:
        raise _not_equal(entry, call, lines, _masks(entry))
    comparison.log_results()
    if small and options.verify not in entry.program.verified:
        _log.warning(_TOO_SMALL, entry.step, listed(small))
    return True


def _verify_auto(
    call: Call, entry: BoundProgram, values: Sequence[Any], flat: list[Any], options: RunOptions
) -> bool:
    """Compares the state after a training step; a step that cannot be compared passes."""
    try:
        chosen = compared_outputs(call, entry)
        if not chosen and not (results_are_parts.get() and is_local(call.mesh)):
            return True
        fixed = with_fixed_draws(call, entry.program.traced)
        has_equal_shares = bool(chosen) and (bool(fixed.drawn) or keeps_statistics(entry))
        if has_equal_shares:
            call = replace(call, arguments=with_equal_shares(call.arguments))
            flat = entry.flat_inputs(values, call.arguments)
        entry, flat = with_fixed(fixed, call, entry, flat, options)
        comparison = _Comparison(call, entry, flat, values, chosen)
        lines, _ = comparison.differences()
        compared_again = functools.partial(_Comparison, call, entry, flat, values, chosen)
        if lines and scales_by_number(call, entry, compared_again):
            return True
    except (ClusterError, DeadlineExceededError):  # another process diverged or ended
        raise
    except Exception as error:  # the step may not accept the whole batch, or not fit on one device
        _log.debug("%s is not compared with one device: %r", entry.step, error)
        return True
    if not lines:
        comparison.log_results()
        return not chosen or comparison.has_changed()
    if call.arguments.counts is not None and entry.program.padding is None:
        # A padding leak would be the more precise error.
        run_checked_for_leaks(call, entry, values, copied(flat))
    equal = _EQUAL_SHARES if has_equal_shares else _masks(entry)
    raise _not_equal(entry, call, lines, equal, _MEANT)


def _masks(entry: BoundProgram) -> str:
    return _MASKS if entry.program.traced.drawn == () else ""


def _not_equal(
    entry: BoundProgram, call: Call, lines: list[str], equal: str, hint: str = ""
) -> NotEqualError:
    scaled = any("number of replicas" in line for line in lines)
    random = _RANDOM if draws(entry.program.traced.jaxpr.jaxpr) else ""
    hint = f"{equal}{random}{_PAIRS if scaled else '' if random else _TERMS}{hint}"
    replicas = num_replicas(call.mesh)
    return NotEqualError(_UNEQUAL.format(replicas=replicas, lines=listed(lines), hint=hint))


class _Outcomes(NamedTuple):
    """The outputs of a step both ways, at one precision."""

    run: Callable[[list[Any]], list[Any]]
    """The program of all replicas."""
    flat: list[Any]
    """Its inputs."""
    before: list[Any]
    """The old value of each output; 0 if it has none."""
    many: list[Any]
    one: list[Any]


_Differing = dict[int, tuple[Verdict, str]]
"""The verdict on each output that is not equal, by index, and a line for the message."""


class _Comparison:
    """One call on all replicas and on one device."""

    def __init__(
        self,
        call: Call,
        entry: BoundProgram,
        flat: list[Any],
        values: Sequence[Any],
        chosen: Sequence[int] | None = None,
    ) -> None:
        """Runs the step both ways.

        ``chosen`` are the outputs to compare; None compares all outputs, and every entry of them.
        """
        entry.check_readable(flat)
        self.call, self.entry, self._strict = call, entry, chosen is None
        self._job = job_of(call.mesh)
        self._replicas = num_replicas(call.mesh)
        self.chosen = every_output(entry) if chosen is None else chosen
        self._old = _old_inputs(call, entry)
        self._spacing = coarsest(entry.program.traced.jaxpr.jaxpr)
        self.outs = entry.execute(copied(flat))
        # JAX refuses a second mesh within the scope of the mesh of all replicas.
        with outside_mesh(), components_on(entry.binding, first_replica(call.mesh)):
            batches = global_batches(call)
            one = _on_each(self._job, lambda: self._run_on_one_device(values, batches))
        many = as_read(entry, self.outs)
        self._native = _Outcomes(entry.execute, flat, self._before(flat), many, one)

    def _run_on_one_device(self, values: Sequence[Any], batches: Sequence[Any]) -> list[Any]:
        self._single_call, self.single = on_one_device(self.call, self.entry, batches)
        self._single_flat = self.single.flat_inputs(values, self._single_call.arguments)
        return as_read(self.single, self.single.execute(self.single.placed(self._single_flat)))

    def has_changed(self) -> bool:
        """True if the step changed a floating-point output that is compared."""
        _, _, before, many, _ = self._native
        return not all(
            exactly_equal(_old_on_host(before[k], many[k]), on_host(many[k]))
            for k in self.chosen
            if spacing_of(many[k])
        )

    def log_results(self) -> None:
        """Logs once the combined results of a step that are other numbers on one device.

        They may be meant so, and are no state. Those that another warning names are left out.
        """
        _, _, _, many, one = self._native
        if results_are_parts.get():
            log_parts(self.entry, many, one)
            return
        relative, unequal = max(0.01, 32 * self._spacing), Verdict.UNEQUAL
        differing = self._compare(self._native, self._combined_results(), relative, only=unequal)
        if differing:
            # Rounding may decide a prediction, and so a share of an accuracy.
            near = [self._nudged(self._native, times) for times in NUDGES[:2]]
            differing = self._compare(self._native, differing, relative, near, unequal)
        step, names = self.entry.step, self.entry.output_names()
        lines = [
            f"{names[k]}: {_shown(many[k])}, on one device {_shown(one[k])}" for k in differing
        ]
        if lines:
            log_once(_RESULT, step, listed(lines), about=(step, *differing))

    def _combined_results(self) -> list[int]:
        """Returns the results that are equal on all replicas, and that no other warning names."""
        program, first = self.entry.program, self.entry.state_size
        facts = (notice.named[0] for notice in program.plan.notices)
        noticed = {fact["name"] for fact in facts if isinstance(fact, dict)}
        return [
            k
            for k, name in enumerate(program.results.names, first)
            if program.plan.mirrored[k - first] and spacing_of(self._native.many[k])
            if k not in self.chosen and name not in noticed
        ]

    def differences(self) -> tuple[list[str], list[str]]:
        """Returns a line for each output that differs, and for each that changed too little to compare.

        Outputs that are not equal at the step's precision are compared in float64. Differences no larger
        than those from rounding the inputs are ignored.
        """
        differing = self._without_derived(self._compare(self._native, self.chosen))
        if differing:
            # Often a few entries, such as gradients near 0, are rounding. Nudging compiles no program.
            near = [self._nudged(self._native, times) for times in NUDGES[:2]]
            differing = self._compare(self._native, differing, near=near)
            noise = [k for k, (verdict, _) in differing.items() if verdict is Verdict.NOISE]
            if not self._strict and 2 * len(noise) < len(self.chosen):
                # This precision shows no more of them, and the other outputs are enough.
                differing = {k: item for k, item in differing.items() if k not in noise}
            differing = self._without_derived(differing)
        if not differing:
            return [], []
        try:
            with jax.enable_x64(True):
                unequal, far = self._unequal_in_float64(differing)
            # If they are far apart in float64 only, some operation means something else there.
            confirmed = self._compare(self._native, far, OTHER_ORDER)
            unequal = {k: line for k, line in unequal.items() if k in confirmed or k not in far}
            small = []
        except Exception as error:  # no device computes everything in float64
            _log.debug("%s is not compared in float64: %r", self.entry.step, error)
            unequal = self._unequal(self._native, differing, OTHER_ORDER, OTHER_ORDER)
            small = [text for k, (_, text) in differing.items() if k not in unequal]
        return [text for _, text in unequal.values()], small

    def _without_derived(self, differing: _Differing) -> _Differing:
        """Drops the outputs that both programs compute by the same equations from equal outputs."""
        program, plan = self.entry.program, self.entry.program.plan
        mirrored = [*(rule is Combine.MIRRORED for rule in plan.combine), *plan.mirrored]
        equal = [k for k in self.chosen if k not in differing and mirrored[k]]
        dropped = derived(self.call, program.traced, self.single.program.traced, equal)
        return {k: item for k, item in differing.items() if k not in dropped or not mirrored[k]}

    def _unequal_in_float64(self, differing: _Differing) -> tuple[_Differing, _Differing]:
        """Returns the outputs that are unequal in float64, and those of them that are far apart."""
        run, flat = in_float64(self.call, self.entry, self._native.flat)
        many = as_read(self.entry, run(flat))
        with outside_mesh(), components_on(self.entry.binding, self.single.program.mesh):
            run_one, flat_one = in_float64(self._single_call, self.single, self._single_flat)
            one = _on_each(self._job, lambda: as_read(self.single, run_one(flat_one)))
        exact = _Outcomes(run, flat, self._before(flat), many, one)
        unequal = self._unequal(exact, differing, _EXACT, 8 * self._spacing)
        if 2 * len(unequal) < len(self.chosen):
            run, _ = in_float64(self.call, self.entry, self._native.flat, inexact_terms=True)
            unequal = self._unequal(exact._replace(run=run), unequal, _EXACT, _EXACT)
        return unequal, self._compare(exact, unequal, OTHER_ORDER, only=Verdict.UNEQUAL)

    def _before(self, flat: list[Any]) -> list[Any]:
        before: list[Any] = [0.0 if i is None else flat[i] for i in self._old]
        return as_read(self.entry, before)

    def _unequal(
        self, outcomes: _Outcomes, indices: Iterable[int], relative: float, nudged: float
    ) -> _Differing:
        """Returns the outputs that differ by more than rounding.

        An entry may differ by ``relative`` of its change; or by ``nudged`` of it, besides what nudging the
        inputs changes.
        """
        unequal = self._compare(outcomes, indices, relative, only=Verdict.UNEQUAL)
        near: list[list[Any]] = []
        for times in NUDGES:
            if not unequal:
                break
            near.append(self._nudged(outcomes, times))
            unequal = self._compare(outcomes, unequal, nudged, near, only=Verdict.UNEQUAL)
        return unequal

    def _nudged(self, outcomes: _Outcomes, times: int) -> list[Any]:
        run, flat, *_ = outcomes
        return as_read(self.entry, nudged_outcome(run, flat, times * self._spacing, self._old))

    def _compare(
        self,
        outcomes: _Outcomes,
        indices: Iterable[int],
        relative: float | None = None,
        near: Sequence[Sequence[Any]] = (),
        only: Verdict | None = None,
    ) -> _Differing:
        """Returns the outputs that are not equal, or those of ``only`` one verdict."""
        names, differing = self.entry.output_names(), _Differing()
        for k in indices:
            if outcomes.many[k] is None:  # ON_READ without aggregation has no value to compare
                continue
            left = on_host(outcomes.many[k])
            noise = noise_of(left, (on_host(outs[k]) for outs in near))
            verdict, text = self._compare_output(outcomes, k, left, relative, noise)
            if verdict is not Verdict.EQUAL and only in (None, verdict):
                differing[k] = verdict, f"{names[k]}: {text}"
        return _of_chief(self._job, differing)

    def _compare_output(
        self, outcomes: _Outcomes, k: int, left: Array, relative: float | None, noise: float
    ) -> tuple[Verdict, str]:
        right, eps = on_host(outcomes.one[k]), spacing_of(outcomes.many[k])
        program, result = self.entry.program, k - self.entry.state_size
        if result >= 0 and not program.plan.mirrored[result]:
            if self.call.arguments.has_batch and program.per_example is None:
                program.per_example = per_example_results(self.call, self.entry)
            rows = result in program.results.declared
            line = difference(
                left, right, rows=program.per_example[result] if program.per_example else rows,
                counts=self.call.arguments.counts, eps=eps,
                relative=32 * eps if relative is None else relative, noise=noise,
            )  # fmt: skip
            return (Verdict.UNEQUAL, line) if line else (Verdict.EQUAL, "")
        if left.shape != right.shape:
            text = f"shape {left.shape} on the replicas, {right.shape} on one device"
            return Verdict.UNEQUAL, text
        old = _old_on_host(outcomes.before[k], outcomes.one[k])
        verdict = compared(
            left, right, old, eps=eps, relative=relative, noise=noise, every=self._strict
        )
        if verdict in (Verdict.TOO_SMALL, Verdict.NOISE):
            many, one, size = map(largest, (left - old, right - old, right))
            text = f"changed by up to {many:.3g}, on one device by {one:.3g}, at values up to {size:.3g}"
            return verdict, text
        return verdict, _unequal_text(left, right, old, self._replicas)


def _shown(value: Any) -> str:
    numbers = on_host(value).ravel().squeeze()
    return np.array2string(numbers, precision=4, threshold=4, edgeitems=1, separator=", ")


def _on_each(job: Job, run: Callable[[], list[Any]]) -> list[Any]:
    """Runs something on each process; raises on all if it fails on one, so that none goes on alone."""
    try:
        outs, failure = jax.block_until_ready(run()), None
    except Exception as error:
        outs, failure = [], error
    failures = job.exchange(_TOPIC, f"{failure!r}" if failure else "")
    if failure:
        raise failure
    if any(failures):
        raise RuntimeError("\n".join(failures))
    return outs


def _of_chief(job: Job, differing: _Differing) -> _Differing:
    """Returns the verdicts of process 0, since another may round in other ways."""
    if job.is_alone:
        return differing
    text = json.dumps([(k, verdict.name, line) for k, (verdict, line) in differing.items()])
    first, *_ = job.exchange(_TOPIC, text)
    return {k: (Verdict[name], line) for k, name, line in json.loads(first)}


def _old_inputs(call: Call, entry: BoundProgram) -> list[int | None]:
    """Returns for each output the position of the input with its old value; None if it has none."""
    program = entry.program
    old = {**dict(enumerate(program.traced.old_inputs)), **next_values(call, program)}
    # The program takes only the inputs that it reads, in another order.
    position = {i: at for at, i in enumerate(program.order)}
    return [position.get(old.get(k, -1)) for k in range(len(entry.output_names()))]


def _old_on_host(old: Any, new: Any) -> Array:
    """Returns the old value of an output; zeros if it has none of that shape."""
    array = on_host(old) if isinstance(old, jax.Array) else np.asarray(old)
    fits = array.shape == new.shape and not isinstance(old, float)
    return array if fits else np.zeros(new.shape, on_host(new).dtype)


def _unequal_text(left: Array, right: Array, old: Array, replicas: int) -> str:
    """Describes how the updates differ (or the values, if there were none before)."""
    if not np.issubdtype(right.dtype, np.inexact):
        return f"differs by up to {largest(left.astype(np.float64) - right):.3g}"
    if not same_specials(left, right):
        return "has NaNs or infinities in other places than on one device"
    left, right, old = map(finite, (left, right, old))
    gap = np.abs(left - right)
    change = float(np.abs(right - old).flat[int(np.argmax(gap))])
    ratio = _ratio(left - old, right - old, replicas)
    more = ratio or f", where one device changes it by {change:.3g}"
    return f"differs by up to {largest(gap):.3g}{more}"


def _ratio(left: Array, right: Array, replicas: int) -> str:
    """Describes the common ratio of the entries that differ, and its likely cause; "" if there is none."""
    sizes = np.abs(right)
    differ = (sizes > 1e-6 * largest(right)) & (np.abs(left - right) > 1e-3 * sizes)
    if not differ.any() or np.iscomplexobj(right):
        return ""
    low, ratio, high = map(float, np.quantile(left[differ] / right[differ], (0.1, 0.5, 0.9)))
    if high - low > 0.02 * abs(ratio):
        return ""
    causes = {
        replicas: "number of replicas: gradients of a mean were summed",
        1 / replicas: "1 / number of replicas: the gradient of a sum was averaged",
        replicas**2: "number of replicas squared: a square of summed gradients of a mean",
    }
    near = (why for value, why in causes.items() if abs(ratio - value) <= 0.01 * value)
    cause = next((f" ({ratio:.3f} = {why})" for why in near), "")
    return f"; the change is {ratio:.3f} times that on one device{cause}"
