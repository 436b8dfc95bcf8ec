"""The abstract interpreter that the analyses of a traced step share: calls, branches and loops.

Each value of a jaxpr gets a mark. An analysis subclasses ``Walk``, and says what marks are and how the
equations that have no body change them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

from distribute_jax.program._jaxprs import (
    CALLS,
    called_body,
    consts_and_carries,
    is_literal,
    open_jaxpr,
)

IDENTITIES = frozenset({
    "copy", "device_put", "mirrored", "name", "optimization_barrier", "part_gradient", "part_of_mean",
    "reshard", "sharding_constraint", "stop_gradient", "unreduced",
})  # fmt: skip
"""Primitives that return their operands."""

LINEAR = IDENTITIES | {
    "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "neg", "reduce_sum",
    "reshape", "select_n", "squeeze", "sub", "transpose",
}  # fmt: skip
"""Primitives that return zeros for zeros, and half of their results for half of all operands."""

COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})

Marks = list[Any]
Marked = tuple[Any, Marks, Marks]
"""An equation, with the marks of its operands and of its results."""


class Walk(ABC):
    """Interprets a jaxpr with marks."""

    def __init__(self) -> None:
        # Values hold the bodies, so that no id is reused.
        self._cache: dict[Any, tuple[Any, Marks]] = {}
        self.enclosing: list[Any] = []
        """The equations whose bodies are being interpreted, and the newest one."""

    @abstractmethod
    def apply(self, eqn: Any, marks: Marks) -> Marks:
        """Returns the marks of the results of an equation."""

    def joined(self, eqn: Any, one: Any, other: Any) -> Any:
        """Returns the mark of a result of a branch or loop that is one of two values."""
        return one | other

    @abstractmethod
    def decided(self, eqn: Any, by: Any, outs: Marks) -> Marks:
        """Returns the marks of results of a branch or loop that a predicate decides about."""

    def constant(self, value: Any) -> Any:
        """Returns the mark of a constant or literal."""
        return None

    def inside(self, eqn: Any, by: Any, role: str) -> AbstractContextManager[Any]:
        """Encloses the run of a body that a predicate or trip count decides about."""
        return nullcontext()

    def shifted(self, mark: Any, by: int) -> Any:
        """Returns the mark of an element of a scanned array, or of an array of elements if ``by`` is 1."""
        return mark

    def bodies(self, eqn: Any, key: str = "") -> Sequence[Any]:
        """Returns the bodies that a parameter of an equation has, or that of a call."""
        bodies = eqn.params[key] if key else called_body(eqn)
        return bodies if isinstance(bodies, (tuple, list)) else [bodies]

    def run(self, body: Any, marks: Marks) -> Marks:
        """Returns the marks of the outputs of a jaxpr, given those of its inputs."""
        key = self.key(body), tuple(marks)
        if key not in self._cache:
            self._cache[key] = body, self.outputs(body, marks)
        return self._cache[key][1]

    def key(self, body: Any) -> Any:
        """Returns what the result of a run depends on, besides the marks of inputs."""
        return id(body)

    def outputs(self, body: Any, marks: Marks) -> Marks:
        """Does what ``run`` does."""
        jaxpr, env = open_jaxpr(body), self.start(body, marks)
        for _ in self.equations(jaxpr, env):
            pass
        return [self._read(v, env) for v in jaxpr.outvars]

    def start(self, body: Any, marks: Marks) -> dict[Any, Any]:
        """Returns the marks of the inputs and constants of a jaxpr."""
        jaxpr, consts = open_jaxpr(body), map(self.constant, getattr(body, "consts", ()))
        inputs, variables = [*marks, *consts], [*jaxpr.invars, *jaxpr.constvars]
        return dict(zip(variables, inputs, strict=True))

    def equations(self, jaxpr: Any, env: dict[Any, Any]) -> Iterator[Marked]:
        """Yields each equation with the marks of its operands and results, which are added to ``env``."""
        for eqn in jaxpr.eqns:
            operands = [self._read(v, env) for v in eqn.invars]
            outs = self.applied(eqn, operands)
            env.update(zip(eqn.outvars, outs, strict=True))
            yield eqn, operands, outs

    def applied(self, eqn: Any, marks: Marks) -> Marks:
        """Does what ``apply`` does, and notes the equation meanwhile."""
        self.enclosing.append(eqn)
        try:
            return self.apply(eqn, marks)
        finally:
            self.enclosing.pop()

    def _read(self, atom: Any, env: dict[Any, Any]) -> Any:
        return self.constant(atom.val) if is_literal(atom) else env[atom]

    def state(self, marks: Marks) -> Any:
        """Returns what must stop changing while the body of a loop is run again."""
        return list(marks)

    failures: Any = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
    """Errors of a rule for a form of the equation that it does not know, as of another JAX version."""

    def by_rule(self, rule: Rule, eqn: Any, marks: Marks) -> Marks | None:
        """Returns the marks of the results by a rule; None if it does not know this form of the equation."""
        try:
            outs = rule(self, eqn, marks)
        except self.failures:
            return None
        return outs if outs is not None and len(outs) == len(eqn.outvars) else None


Rule = Callable[[Any, Any, Marks], "Marks | None"]
"""Takes the interpreter, an equation and the marks of its operands, and returns those of the results."""


def call(walk: Walk, eqn: Any, marks: Marks) -> Marks:
    """The body runs once, on the operands."""
    [body] = walk.bodies(eqn)
    return walk.run(body, marks)


def cond(walk: Walk, eqn: Any, marks: Marks) -> Marks:
    """A result is that of one branch."""
    index, *operands = marks
    with walk.inside(eqn, index, "the predicate"):
        ran = [walk.run(branch, operands) for branch in walk.bodies(eqn, "branches")]
    return walk.decided(eqn, index, reduce(lambda a, b: _joined(walk, eqn, a, b), ran))


def _joined(walk: Walk, eqn: Any, marks: Marks, others: Marks) -> Marks:
    return [walk.joined(eqn, *pair) for pair in zip(marks, others, strict=True)]


def scan(walk: Walk, eqn: Any, marks: Marks) -> Marks | None:
    """The body is run until the marks of the carries stop changing."""
    start, number = consts_and_carries(eqn)
    if start < 0:
        return None
    [body], end = walk.bodies(eqn, "jaxpr"), start + number
    scanned = [walk.shifted(mark, -1) for mark in marks[end:]]
    state = [*marks[:end], *scanned]
    while True:
        before = walk.state(state)
        outs = walk.run(body, state)
        state[start:end] = _joined(walk, eqn, state[start:end], outs[:number])
        if walk.state(state) == before:
            carries = outs[:number] if eqn.params["length"] else marks[start:end]
            return carries + [walk.shifted(out, 1) for out in outs[number:]]


def while_loop(walk: Walk, eqn: Any, marks: Marks) -> Marks:
    """The carries depend on the trip count too; JAX carries only what the body changes."""
    tests = eqn.params["cond_nconsts"]
    start = tests + eqn.params["body_nconsts"]
    [test], [body] = walk.bodies(eqn, "cond_jaxpr"), walk.bodies(eqn, "body_jaxpr")
    state, more = list(marks), None
    while True:
        before = more, walk.state(state)
        with walk.inside(eqn, more, "the trip count"):
            [more] = walk.run(test, state[:tests] + state[start:])
        with walk.inside(eqn, more, "the trip count"):
            outs = walk.decided(eqn, more, walk.run(body, state[tests:]))
        state[start:] = _joined(walk, eqn, state[start:], outs)
        if (more, walk.state(state)) == before:
            return state[start:]


STRUCTURE: dict[str, Rule] = {
    **dict.fromkeys(CALLS, call),
    "cond": cond,
    "scan": scan,
    "while": while_loop,
}
"""The rules of calls, branches and loops, by the primitive's name."""
