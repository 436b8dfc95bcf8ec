"""Explains errors of Python, JAX and Flax that are raised while a step is traced or compiled."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import flax
import jax
import numpy as np
from flax import linen, nnx
from jax.tree_util import keystr

from distribute_jax._absent import ABSENT, framework_of
from distribute_jax._checks import takes
from distribute_jax._errors import (
    ArgumentError,
    DistributeError,
    StaleCaptureError,
    TracedValueError,
)
from distribute_jax._mesh import DATA
from distribute_jax._messages import is_array, leaf_text
from distribute_jax._values import DistributedValues, PerReplica
from distribute_jax.program._capture import is_library

_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

_NO_NUMPY = (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError)

_MESSAGE = """\
{fn} needs the value of a number while strategy.run traces it, but inside run arrays, Python numbers \
in args and the replica id have no value yet: one program serves every value and every replica.
To choose between arrays use jnp.where(condition, a, b) or jax.lax.cond, also with the replica id. For \
a number that Python needs (a size, a number of layers, a flag), close over it or bind it with \
functools.partial(step, size=3): then it is a constant of the program.
To print it write jax.debug.print("{{}}", value), or return it from the step.
JAX says: {reason}"""


_NUMPY = "NumPy cannot compute with traced arrays. Use jax.numpy, as jnp.mean for np.mean."

_LARGE_NUMPY = """\
{fn} computes with NumPy on {names}. A NumPy array of more than 64 KiB that a step captures is an input of \
the compiled program, so it has no numbers while the step is traced.
Use jax.numpy instead, as jnp.linalg.norm for np.linalg.norm; or do what NumPy is needed for before the step.
JAX says: {reason}"""


_UNSEEN = """\
{fn} uses a variable, a module or an array of the strategy that it neither got as an argument nor \
captured in a way that run could see, so it would become stale.
Pass the object in args: strategy.run(step, args=(model, x)); or let the step reach it through its \
closure, a global, self, or an attribute, list or dict of one of these.
The original error: {reason}"""


_NOT_WRITTEN = """\
{fn} writes a variable where it can only be read. JAX's transformations cannot write a variable that the \
function they transform captured: a body of jax.lax.scan, cond or fori_loop, or a function in nnx.grad or \
nnx.jit. Pass the variable, or its module, through Flax's own, where the function gets it as an argument: \
nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(model, xs), where body returns the model; or \
nnx.grad(loss)(model, x). Or return the new value from the function and write it after.
A variable that the step writes outside of these, and that run could not see, is passed in args: \
strategy.run(step, args=(model, x)).
Flax says: {reason}"""


_NOT_COPIED = """\
{fn} uses a module or variable inside nnx.grad, jax.lax.scan or another transformation that was made \
outside of it, and in a way that run could not see.
Pass the object in args: strategy.run(step, args=(model, x)). If it came from nnx.merge(graphdef, state), \
which takes over the variables of the state instead of making new ones, write \
nnx.merge(graphdef, state, copy=True) inside the function that is scanned or differentiated.
Flax says: {reason}"""


_NO_AXIS = """\
{fn} uses the axis {axis!r}, which does not exist: the axis of the replicas is called {known}.
Write axis_name={known}, or give the axis its name, as in dj.MirroredStrategy(axis_name={axis!r}). \
dj.get_replica_context().all_reduce needs no name."""


_LINEN = """\
{fn} calls a Linen module, which holds no weights. Create them in the scope, \
variables = module.init(jax.random.key(0), x), pass them in args and write module.apply(variables, x); or \
let dj.Model(module, sample_input=x[:1]) hold them.
Flax says: {reason}"""


_FOREIGN = """\
{fn} calls {framework}, which cannot compute with the arrays that JAX traces. In a step use jax.numpy, \
jax.nn and jax.lax, layers of flax.nnx, losses of dj.losses or optax, dj.metrics, and nnx.value_and_grad \
for gradients. What prepares data belongs before the step, into the dataset.
{framework} says: {reason}"""


_ORDERED = """\
{fn} prints or calls back with ordered=True, but its replicas run at the same time, so there is no order \
between them.
Leave ordered=True out, jax.debug.print("{{}}", value), or run the step under a dj.OneDeviceStrategy."""


_DIVIDED = """\
{fn} shards an array over devices, but run has sharded the batch and the state already: the step is that of \
one replica.
Leave out with_sharding_constraint, shard_map, device_put to a mesh and set_mesh. To shard a replica, use \
dj.ModelParallelStrategy, under which a step may name the axis 'model' of strategy.mesh.
JAX says: {reason}"""


_UNWRAPPED = """\
{fn} calls checkify.check in a function that checkify.checkify does not wrap, which JAX cannot compile.
Write error, result = checkify.checkify(f)(x) in the step, return the error, and after the step: \
for error in strategy.experimental_local_results(error): error.throw()."""


# Messages of JAX for what it cannot compile on several devices; "GlobalToLocalShape" if a step has no inputs.
_NOT_COMPILED = {
    r"ordered effects are not supported|GlobalToLocalShape": _ORDERED,
    r"checkify\.check which was not": _UNWRAPPED,
}

# Messages of JAX for meshes, shardings and axes that do not fit those inside run.
_OF_MESHES = re.compile(
    r"manual axes|Auto axes|of type Auto|mesh passed to shard_map|found in mesh|size of the mesh"
    r"|mesh\.axis_names|`set_mesh` can only|implies that array axis|inside jit with device ids"
)

# Messages of Flax and JAX for an object, or an array on the mesh, from outside of the trace.
_FROM_OUTSIDE = ("different trace level", "should match the mesh of sharding")


# Messages of JAX and Python for a value that is not known: of a slice, an axis, a format, a dict key.
_NEEDED = re.compile(
    r"concrete values|static (start/stop/step|integers)|hashable.*Tracer|Tracer(\.__format__| is not JSON)"
    r"|(number|integer|an int)\b.*Tracer|'(list|tuple|str)' and '\w+Tracer"
)


# Messages of PyTorch's C functions for an argument that is not a tensor.
_NO_TENSOR = re.compile(r"Tensor\b.*\w+Tracer\b|\w+Tracer\b.*Tensor\b|\(got \w+Tracer", re.DOTALL)


# Messages for what tensors, layers and models of other frameworks take, and what to write instead.
_TENSOR_HABITS = {
    r"keyword argument 'training'": "A module of Flax has modes: model.train() and model.eval().",
    r"keyword argument '(dim|keepdim)'": "JAX's arrays take axis and keepdims.",
    r"<Model of .* is not a valid JAX type": "Differentiate the module: nnx.grad(loss)(model.module).",
    r"'int' object is not callable": "The size of an array is an int: x.shape[0] for x.size(0).",
    r"Cannot interpret '(torch|tf)\.": "JAX's dtypes are jnp.float32 and the like.",
    r"Cannot interpret '-?\d+' as a data": "The view of an array takes a dtype: x.reshape(shape).",
}


# The message of JAX for an axis name that is not bound.
_UNBOUND = re.compile(r"[Uu]nbound axis name: (\w+)")


# Messages of Flax for what was done to the object.
_OUTSIDE_USES = {"extract graph node": _NOT_COPIED, "Cannot mutate": _NOT_WRITTEN}


def step_name(fn: Any) -> str:
    """Returns the name of a function, or that of the class of a callable object, such as a module."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


@contextmanager
def explain_errors(call: Any) -> Iterator[None]:
    """Replaces errors of JAX and Flax by ours, or adds hints as notes."""
    try:
        yield
    except Exception as error:
        explanation = _explanation(call, error)
        if explanation is None:
            hints = [module_hint(error), _array_hint(error), *_argument_hints(call, error)]
            if hasattr(call.fn, "_torchdynamo_orig_callable"):
                hints.append("Leave torch.compile out: strategy.run compiles the step.")
            for note in filter(None, hints):
                error.add_note(note)
            raise
        for note in getattr(error, "__notes__", ()):
            explanation.add_note(note)
        raise explanation.with_traceback(error.__traceback__) from None


def _explanation(call: Any, error: Exception) -> Exception | None:
    name, text = step_name(call.fn), str(error)
    reason = text.partition("\n")[0]
    if not isinstance(error, DistributeError) and (framework := _foreign_caller(error)):
        return TracedValueError(_FOREIGN.format(fn=name, framework=framework, reason=reason))
    large = _large_numpy(call, error)
    if (
        large
        or isinstance(error, _NEEDS_A_VALUE)
        or (isinstance(error, (TypeError, ValueError, IndexError)) and _NEEDED.search(text))
    ):
        message = _LARGE_NUMPY if large else _MESSAGE
        explanation = message.format(fn=name, names=", ".join(large), reason=reason)
        is_of_numpy = isinstance(error, jax.errors.TracerArrayConversionError) and not large
        return TracedValueError(f"{_NUMPY}\n{explanation}" if is_of_numpy else explanation)
    if isinstance(error, NameError) and (axis := _UNBOUND.search(text)) is not None:
        known = repr(getattr(call.strategy, "axis_name", DATA))
        return ArgumentError(_NO_AXIS.format(fn=name, axis=axis[1], known=known))
    if isinstance(error, flax.errors.CallCompactUnboundModuleError):
        return ArgumentError(_LINEN.format(fn=name, reason=reason))
    from_outside = isinstance(error, ValueError) and any(part in text for part in _FROM_OUTSIDE)
    if from_outside or isinstance(error, flax.errors.TraceContextError):
        message = next((t for part, t in _OUTSIDE_USES.items() if part in text), _UNSEEN)
        return StaleCaptureError(message.format(fn=name, reason=reason))
    return _mesh_error(name, error)


def _mesh_error(step: str, error: Exception) -> Exception | None:
    """Explains a step that shards arrays itself."""
    if not isinstance(error, ValueError) or _OF_MESHES.search(text := str(error)) is None:
        return None
    return ArgumentError(_DIVIDED.format(fn=step, reason=text.partition("\n")[0]))


def _array_hint(error: Exception) -> str:
    """Returns what to write for an attribute or argument that arrays and modules do not have."""
    text = str(error)
    absent = re.search(r"(Tracer)?(?: object)? has no attribute '?(\w+)", text)
    is_module = isinstance(getattr(error, "obj", None), nnx.Module)
    if absent and (absent[1] or is_module):
        instead = ABSENT["dj.Model" if is_module else "jax.Array"].get(absent[2])
        return f"Instead of {absent[2]}: {instead}" if instead else ""
    return next((hint for words, hint in _TENSOR_HABITS.items() if re.search(words, text)), "")


def _foreign_caller(error: Exception) -> str:
    """Returns the framework that a traced array was passed to, in the calls below the user's last line."""
    framework = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, code = str(frame.f_globals.get("__name__")), frame.f_code
        if name := framework_of(module):
            with suppress(ValueError):  # a dict whose keys cannot be sorted
                leaves = jax.tree.leaves(list(frame.f_locals.values()))
                is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
                framework = framework or name * is_traced
        elif not is_library(module) and not code.co_filename.startswith("<"):
            framework = framework if "site-packages" in code.co_filename else ""
    return framework or "PyTorch" * bool(_NO_TENSOR.search(str(error)))


def _argument_hints(call: Any, error: Exception) -> Iterator[str]:
    """Yields what is wrong with args: they do not fit the signature, or are divided as for ``pmap``."""
    args, kwargs = call.arguments.unflatten(call.arguments.leaves)
    if isinstance(error, TypeError) and not takes(call.fn, *args, **kwargs):
        yield (
            f"strategy.run called {step_name(call.fn)} with {len(args)} values in args, {len(kwargs)} in "
            "kwargs; a batch of several arrays that is one argument goes into a tuple, args=(batch,), "
            "or for run_steps into the step's *batch."
        )
        return
    replicas = call.strategy.num_replicas_in_sync
    batches = [v for v in call.arguments.data if isinstance(v, PerReplica)]
    rows = {(sum(v.counts),) if v.counts else v.global_array.shape[:1] for v in batches}
    for i, arg in enumerate(args if replicas > 1 else ()):
        leaves = jax.tree.leaves(arg, is_leaf=lambda x: isinstance(x, DistributedValues))
        shapes = [leaf.shape[:1] for leaf in leaves if isinstance(leaf, (jax.Array, np.ndarray))]
        if leaves and shapes == [(replicas,)] * len(leaves):
            yield (
                f"args[{i}] has one row for each replica, as for pmap. strategy.run does not divide it: "
                "every replica gets all of it. Pass the value itself, or a distributed value."
            )
        if set(shapes) & rows and "shape" in str(error):
            yield (
                f"args[{i}] has a row for each example of the global batch. strategy.run does not divide it: "
                "every replica gets all of it. Pass it through strategy.distribute_dataset, with the batch."
            )


_HAPPENED = "This happened in "


def module_hint(error: Exception) -> str:
    """Returns which Flax module could not take its inputs, with their shapes; empty if none is known."""
    modules: list[Any] = []
    inputs: list[Any] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "__call__" and isinstance(module, (nnx.Module, linen.Module)):
            modules.append(module)
            names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
            inputs = [frame.f_locals.get(name) for name in names]
    leaves: list[Any] = []
    with suppress(ValueError):  # a dict whose keys cannot be sorted
        leaves = jax.tree_util.tree_leaves_with_path(inputs)
    shapes = [f"{keystr(path[1:])} {leaf_text(x)}".strip() for path, x in leaves if is_array(x)]
    noted = any(note.startswith(_HAPPENED) for note in getattr(error, "__notes__", ()))
    if noted or not modules or not shapes or isinstance(error, DistributeError):
        return ""
    calls = " -> ".join(dict.fromkeys(type(module).__name__ for module in modules))
    width = getattr(modules[-1], "in_features", None)
    wanted = "" if width is None else f" It takes inputs whose last dim is {width}."
    return f"{_HAPPENED}{calls}, called with {', '.join(shapes)}.{wanted}"


def _large_numpy(call: Any, error: Exception) -> list[str]:
    """Returns the names of the captured NumPy arrays that are inputs, if NumPy got a traced array."""
    absent = isinstance(error, AttributeError) and re.search(r"Tracer has.* (\w+)", str(error))
    if not isinstance(error, _NO_NUMPY) and not (absent and hasattr(np.ndarray, absent[1])):
        return []
    arrays = zip(call.binding.arrays, call.binding.captured_arrays(), strict=True)
    return [name for (name, *_), array in arrays if isinstance(array, np.ndarray)]


@contextmanager
def explain_compile_errors(step: str) -> Iterator[None]:
    """Explains why a traced step cannot be compiled for several devices."""
    try:
        yield
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        messages = (m for words, m in _NOT_COMPILED.items() if re.search(words, str(error)))
        if message := next(messages, ""):
            raise ArgumentError(message.format(fn=step)) from None
        if explanation := _mesh_error(step, error):
            raise explanation from None
        raise
