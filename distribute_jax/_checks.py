"""Checks of the arguments of public functions, with one message for each kind of fault.

``checked`` reads the types of arguments from their annotations, and ``publish`` applies it to all public
names. Only ranges, and what an array holds, are checked by hand.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType, NoneType, UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin

from distribute_jax import _frames
from distribute_jax._absent import KEYWORDS, describe_foreign, is_ours
from distribute_jax._errors import (
    ArgumentError,
    ArgumentTypeError,
    DistributeError,
    MissingPackageError,
    hide_frames,
)

_E = TypeVar("_E", bound=enum.Enum)
_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound=type)


def refuse(
    name: str,
    wanted: str,
    value: Any,
    cause: Exception | None = None,
    error: type[ArgumentError] = ArgumentError,
) -> NoReturn:
    """Raises the error for a bad argument: what it must be, and what it is."""
    raise error(f"{name} must be {wanted}; got {brief(value)}.") from cause


def refusing(text: str) -> Callable[..., NoReturn]:
    """Returns a method, such as ``__getitem__``, that a class does not support: it raises a TypeError."""

    def refuse(self: Any, *_: Any) -> NoReturn:
        raise ArgumentTypeError(text)

    return refuse


def takes(function: Any, *arguments: Any, **keywords: Any) -> bool:
    """True if a function can be called with these arguments, or has no signature that tells."""
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError:
        return False
    except ValueError:  # it is written in C
        return True
    return True


def brief(value: Any) -> str:
    """Returns the repr of an argument if it is short, otherwise its type."""
    if described := describe_foreign(value):
        return described
    try:
        is_traced = "Tracer" in type(value).__name__
        if isinstance(getattr(value, "ndim", None), int) and (value.ndim or is_traced):
            return f"{value.dtype}[{','.join(map(str, value.shape))}]"
        text = f"{value!r:.60}" if isinstance(value, str) else repr(value)
    except Exception:  # of the user's class, or of an int that has too many digits
        text = ""
    is_short = 0 < len(text) <= 80 and "\n" not in text and "Tracer(" not in text
    return text if is_short else f"a {type(value).__name__}"


@contextmanager
def converting(
    name: str, value: Any, wanted: str = "a number or an array of numbers"
) -> Iterator[None]:
    """Turns the errors of a block that converts an argument into an ``ArgumentError``."""
    try:
        yield
    except DistributeError:
        raise
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:
        refuse(name, wanted, value, error)


@contextmanager
def importing(who_needs_what: str, extra: str, instead: str = "") -> Iterator[None]:
    """Turns the ImportError of a block that imports an optional package into one that says what to type."""
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(
            f"{who_needs_what}, which is not installed: pip install 'distribute-jax[{extra}]'{instead}."
        ) from error


def is_integer(value: Any) -> bool:
    """True for an integer of Python or NumPy, and for a 0-d integer array."""
    try:
        operator.index(value)
    except Exception:  # arrays with dims and tracers have errors of their own
        return False
    return True


def _is_scalar(value: Any, *dtypes: str) -> bool:
    """True for a NumPy scalar or 0-d array whose dtype has a name that begins like this."""
    dtype = getattr(value, "dtype", "")
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    return getattr(value, "ndim", 1) == 0 and name.startswith(dtypes)


def is_real(value: Any) -> bool:
    """True for a real number that fits into a float, and for a 0-d array or tracer of one."""
    with suppress(OverflowError):
        if isinstance(value, (int, float)):
            return isinstance(float(value), float)
        return _is_scalar(value, "bool", "int", "uint", "float", "bfloat")
    return False


def is_function(value: Any) -> bool:
    """True for a callable that is not a variable: variables have ``__call__``, in case they hold one."""
    return callable(value) and not hasattr(type(value), "set_raw_value")


def is_path(value: Any) -> bool:
    """True for a str or ``os.PathLike`` that a file system accepts."""
    text = os.fsdecode(value) if isinstance(value, (str, os.PathLike)) else ""
    return text != "" and "\0" not in text


def check_int(name: str, value: Any, at_least: int = 1, below: int | None = None) -> int:
    """Returns an integer argument, or raises unless ``at_least <= value < below``."""
    number = operator.index(value) if is_integer(value) else at_least - 1
    if isinstance(value, bool) or number < at_least or (below is not None and number >= below):
        limit = "" if below is None else f" and < {below}"
        refuse(name, f"an integer >= {at_least}{limit}", value)
    return number


def check_number(
    name: str, value: Any, *, at_least: float | None = None, most: float | None = None
) -> None:
    """Raises unless an argument is a finite number > 0, or >= ``at_least``, and <= ``most``."""
    number = float(value) if is_real(value) and not isinstance(value, bool) else math.nan
    is_high = number > 0 if at_least is None else number >= at_least
    if not is_high or number > (sys.float_info.max if most is None else most):
        limit = "above 0" if at_least is None else f">= {at_least:g}"
        refuse(name, f"a number {limit}" + (f", at most {most:g}" if most else ""), value)


def check_optional(check: Callable[..., Any], name: str, value: Any, **limits: Any) -> None:
    """Checks an argument by ``check_int`` or ``check_number`` unless it is None."""
    if value is not None:
        check(name, value, **limits)


def as_member(name: str, value: Any, kind: type[_E]) -> _E:
    """Returns a member of an enum, which may be named in any case, or raises an ``ArgumentError``."""
    if isinstance(value, enum.Enum) and type(value).__name__.startswith(kind.__name__):
        value = value.name  # TensorFlow's enum of this name, maybe with V2 at its end
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    if not isinstance(value, kind):
        names = ", ".join(repr(member.lower()) for member in kind.__members__)
        refuse(name, f"one of {names}, or a member of {kind.__name__}", value)
    return value


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises an ``ArgumentError`` unless an argument is one of the choices."""
    if not is_choice(value, choices):
        refuse(name, f"one of {', '.join(map(repr, choices))}", value)


def is_choice(value: Any, choices: Sequence[Any]) -> bool:
    """True if a value is among the choices; an array never is."""
    return isinstance(value, (str, int, float, NoneType)) and value in choices


def checked(function: _F) -> _F:
    """Wraps a function so that it refuses arguments whose types are not those of its annotations.

    The TypeError of a call that does not fit the signature says what to write. Tracebacks show the user's
    lines only.
    """
    inner = inspect.unwrap(function)
    if function in _checked or not inspect.isfunction(inner) or inner.__qualname__ in _UNCHECKED:
        return _checked.get(function, function)
    code, parameters = inner.__code__, []
    for position, name in enumerate(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]):
        types = _checkable_types(inner.__annotations__.get(name), inner.__globals__["__name__"])
        if types and inner.__qualname__ not in _CHECK_THEMSELVES:
            exact = (*types, *map(_COMMON_TYPE.get, types))  # compared first, since that is quick
            is_positional = position < code.co_argcount
            parameters.append((position if is_positional else sys.maxsize, name, types, exact))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        depth = len(_frames.stack.frames)
        try:
            for position, name, types, exact in parameters:
                value = args[position] if position < len(args) else kwargs.get(name, _OMITTED)
                if type(value) in exact or value is _OMITTED or _has_type(value, types):
                    continue
                wanted = " or ".join(dict.fromkeys(map(_type_text, types)))
                refuse(f"{_call_text(inner, args)}: {name}", wanted, value, error=ArgumentTypeError)
            return function(*args, **kwargs)
        except BaseException as error:
            # An interrupt in the first instruction of __exit__ leaves a scope open.
            _frames.leave_to(depth)
            try:
                if type(error) is TypeError:
                    _check_signature(inner, args, kwargs)
                raise
            except BaseException as shown:
                hide_frames(shown)
                raise

    _checked[function] = _checked[call] = call
    return call  # type: ignore[return-value]


def _check_signature(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises if the arguments of a call do not fit the signature of a function."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
        return
    except TypeError as error:
        reason = str(error)
    called, parameters = _call_text(function, args), list(signature.parameters.values())
    has_self = bool(parameters) and parameters[0].name == "self"
    names = [each.name for each in parameters[has_self:]]
    unknown = [name for name in kwargs if name not in names]
    if unknown and inspect.Parameter.VAR_KEYWORD not in [each.kind for each in parameters]:
        text = (
            f"{called} has no argument {unknown[0]!r}. {_keyword_hint(function, unknown[0], names)}"
        )
    elif has_self and not _is_method(function, args):
        text = f"{function.__name__} is a method: call it on an object, not on its class."
    else:
        shown = [
            f"{each.name}=…" if each.kind is each.KEYWORD_ONLY else each.name
            for each in parameters[has_self:]
            if each.default is each.empty and "VAR" not in each.kind.name
        ]
        shown += ["…"] * (len(shown) < len(names))
        text = f"{called}({', '.join(shown)}): {reason}."
    raise ArgumentTypeError(text) from None


def _keyword_hint(function: Any, name: str, names: Sequence[str]) -> str:
    """Returns what to write instead of an unknown keyword."""
    called = function.__qualname__.removesuffix(".__init__")
    for owner, instead in KEYWORDS.items():
        if owner.endswith(f".{called}") and name in instead:
            return f"Instead: {instead[name]}"
    near = difflib.get_close_matches(name, names) or [each for each in names if name in each]
    nearest = " or ".join(map(repr, near))
    return f"Did you mean {nearest}?" if near else f"It takes {', '.join(names) or 'none'}."


_checked: dict[Any, Any] = {}
"""The wrapper of each function: a function may be both a method and a name of a module."""
_OMITTED = object()
_COMMON_TYPE: dict[Any, Any] = {Callable: FunctionType}
"""The exact type of most values, for types that ``type(value)`` never is."""

_SPECIAL_METHODS = ("__init__", "__call__", "__iter__")

_UNCHECKED = ("PerReplica.__init__",)
"""What the library itself calls, for each batch and each result."""

_CHECK_THEMSELVES = ("Strategy.run", "Strategy.run_steps")
"""Methods that check the types themselves, with a hint in their message."""


def check_methods(cls: _C) -> _C:
    """Applies ``checked`` to the public methods of a class and of its bases in this library."""
    for owner in cls.__mro__:
        for name, method in list(vars(owner).items()) if is_ours(owner) else ():
            # Hooks, on_…, are called by the library itself, and often.
            if name in _SPECIAL_METHODS or not name.startswith(("_", "on_")):
                if isinstance(method, (staticmethod, classmethod)):
                    setattr(owner, name, type(method)(checked(method.__func__)))
                elif inspect.isfunction(method):
                    setattr(owner, name, checked(method))
    return cls


def _is_method(function: Any, args: Sequence[Any]) -> bool:
    """True if the first argument is the object on which a method was called."""
    owner = function.__qualname__.rpartition(".")[0]
    return bool(args) and owner in [cls.__name__ for cls in type(args[0]).__mro__]


def _call_text(function: Any, args: Sequence[Any]) -> str:
    owner, _, name = function.__qualname__.rpartition(".")
    if _is_method(function, args):
        owner = type(args[0]).__name__
        if name == "__init__" and inspect.unwrap(type(args[0]).__init__) is not function:
            return "super().__init__"  # called by that of a subclass
    return owner if name == "__init__" else f"{owner}.{name}".lstrip(".")


@functools.cache
def _checkable_types(annotation: Any, module: str) -> tuple[type, ...]:
    """Returns the types that an annotation allows; none if it cannot be checked."""
    try:
        hint = eval(annotation, vars(sys.modules[module]))
    except (NameError, TypeError, AttributeError):  # a name that is imported for type checkers only
        return ()
    each = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    types = [NoneType if one is None else get_origin(one) or one for one in each]
    if os.PathLike in types:  # is_path also finds NUL characters
        types = [one for one in types if one is not str]
    types.sort(key=lambda one: one is not NoneType)
    return tuple(types) if all(map(_is_checkable, types)) else ()


def _is_checkable(kind: Any) -> bool:
    if not isinstance(kind, type) or kind in _TYPE_CHECKS:
        return kind in _TYPE_CHECKS
    # An enum accepts names too, and a protocol any object with its methods.
    return is_ours(kind) and not (issubclass(kind, enum.Enum) or hasattr(kind, "_is_protocol"))


def _has_type(value: Any, types: Sequence[type]) -> bool:
    return any(
        _TYPE_CHECKS[kind][1](value) if kind in _TYPE_CHECKS else isinstance(value, kind)
        for kind in types
    )


def _type_text(kind: type) -> str:
    named = f"{kind.__module__}.{kind.__name__}".replace("distribute_jax", "dj", 1)
    return _TYPE_CHECKS[kind][0] if kind in _TYPE_CHECKS else named


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


_TYPE_CHECKS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    NoneType: ("None", lambda value: value is None),
    bool: ("a bool", lambda value: is_choice(value, (0, 1)) or _is_scalar(value, "bool")),
    int: ("an integer", is_integer),
    float: ("a number", is_real),
    str: ("a str", lambda value: isinstance(value, str)),
    bytes: ("bytes", lambda value: isinstance(value, bytes)),
    os.PathLike: ("a path", is_path),
    Callable: ("a function", is_function),
    Mapping: ("a dict", _is_mapping),
    dict: ("a dict", _is_mapping),
    Iterator: ("an iterator", lambda value: isinstance(value, Iterator)),
}
"""What an argument of a type must be, in words, and its check."""
