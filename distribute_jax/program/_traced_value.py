"""Python code in a step that needs the value of a traced number, explained at the user's line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from distribute_jax._errors import TracedValueError

_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
)

_MESSAGE = """\
{fn} needs the value of a number while strategy.run traces it, but inside run arrays, Python numbers \
given in args and the replica id have no value yet: one program serves every value and every replica.
To choose between arrays use jnp.where(condition, a, b) or jax.lax.cond, also with the replica id. For \
a number that Python needs (a size, a number of layers, a flag), close over it or bind it with \
functools.partial(step, size=3): then it is a constant of the program.
JAX says: {reason}"""


@contextmanager
def explained(call: Any) -> Iterator[None]:
    """Turns JAX's errors about missing values into ours; every other error passes untouched."""
    try:
        yield
    except (*_NEEDS_A_VALUE, TypeError) as error:
        if not isinstance(error, _NEEDS_A_VALUE) and "concrete values" not in str(error):
            raise
        name = getattr(call.fn, "__qualname__", repr(call.fn))
        reason = str(error).splitlines()[0]
        message = _MESSAGE.format(fn=name, reason=reason)
        raise TracedValueError(message).with_traceback(error.__traceback__) from None
