"""A step that keeps recompiling: said once, with what changed."""

from __future__ import annotations

from typing import Any

from distribute_jax._warn import warn_user
from distribute_jax.program.binding._arguments import Arguments
from distribute_jax.program.binding._bind import Binding

_MANY = 5
_REMEMBERED = 256


class Recompilations:
    """Counts the programs of each step on its own models, and what the last one was made for.

    The same step on another model is another count: five models of one class are no mistake.
    """

    def __init__(self) -> None:
        """Starts with no step seen."""
        self._seen: dict[Any, tuple[int, dict[str, Any], tuple[Any, ...]]] = {}

    def note(self, fn: Any, binding: Binding, arguments: Arguments) -> None:
        """Notes that a program is being built; warns at the fifth for the same code and models."""
        name = getattr(fn, "__name__", None)  # wrappers share their code, and not their name
        code = (binding.key[0], name, frozenset(binding.anchors))
        facts = {**binding.statics, **_argument_facts(arguments)}
        times, before, owners = self._seen.get(code, (0, {}, ()))
        if any(owner() is None for owner in owners):
            times, before = 0, {}  # another model has got the identity of one that is gone
        if len(self._seen) > _REMEMBERED:
            self._seen.clear()
        self._seen[code] = (times + 1, facts, binding.owners())
        if times + 1 == _MANY:
            changed = [
                f"{name} ({before[name]} then {facts[name]})"
                for name in facts
                if name in before and before[name] != facts[name]
            ]
            what = ", ".join(changed[:4]) or "an object or function that it captures is made anew"
            warn_user(
                f"{getattr(fn, '__qualname__', fn)} was compiled {_MANY} times. What changed last: "
                f"{what}. Each new value or shape compiles a new program: pass a number that changes "
                "in args, where it is data, and keep batch shapes equal."
            )


def _argument_facts(arguments: Arguments) -> dict[str, Any]:
    facts = zip(arguments.names, arguments.kinds, arguments.leaves, strict=True)
    described: dict[str, Any] = {}
    for name, kind, leaf in facts:
        if kind == "static":
            described[name] = leaf
        elif kind == "data":
            value = getattr(leaf, "global_array", leaf)
            described[name] = getattr(value, "shape", type(value).__name__)
        else:
            described[name] = type(leaf).__name__
    return described
