"""The state of a model: weights as NumPy arrays, the summary table, checkpoints and exported programs."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export
from jax.sharding import NamedSharding

from distribute_jax import checkpoint
from distribute_jax._checks import check_choice, check_int, converting, importing, refuse
from distribute_jax._errors import ArgumentError, LoweringError, warn_user
from distribute_jax._mesh import on_host, outside_mesh
from distribute_jax._messages import (
    PyTree,
    as_numbers,
    check_not_masked,
    from_numbers,
    is_array,
    is_key,
    leaf_text,
    listed,
    size_text,
)
from distribute_jax.checkpoint._orbax import assign, find_flax_folder, load_flax
from distribute_jax.checkpoint._storage import sync
from distribute_jax.processes import is_chief
from distribute_jax.strategies import Strategy
from distribute_jax.training._batches import arrays_of
from distribute_jax.training._objective import variables
from distribute_jax.variables import Variable


def weight_variables(module: nnx.Module) -> list[tuple[str, nnx.Variable[Any]]]:
    """Returns names and variables: trained weights first, then statistics such as batch norm's."""
    ordered = sorted(variables(module).items(), key=lambda item: tuple(map(str, item[0])))
    return [
        (".".join(map(str, path)), v)
        for selects in (is_trained, _is_statistic)
        for path, v in ordered
        if selects(path, v)
    ]


def is_trained(path: Any, variable: Any) -> bool:
    """True for what ``fit`` trains: ``nnx.Param``, and trainable ``dj.Variable``."""
    del path
    kind = variable.type if isinstance(variable, nnx.Variable) else None
    if kind is not None and issubclass(kind, Variable):
        return bool(variable.get_metadata("trainable"))
    return kind is not None and issubclass(kind, nnx.Param)


def _is_statistic(path: Any, variable: Any) -> bool:
    return isinstance(variable, (nnx.BatchStat, Variable)) and not is_trained(path, variable)


_COLUMNS = ("layer", "type", "output", "parameters", "size", "dtype", "placement")
_NUMBER_COLUMNS = {"parameters", "size"}

Arrays: TypeAlias = list[tuple[bool, Any]]
"""The arrays of a layer, each with True if it is trained."""


def _summary_text(module: nnx.Module, x: Any = None, trained: Any = nnx.Param) -> str:
    """Returns the table of a module's layers; given an input ``x``, with the shapes of their outputs."""
    layers, shapes = _layers_of(module, trained), {} if x is None else _output_shapes(module, x)
    rows: list[tuple[str, ...]] = [_COLUMNS]
    rows += [_row(*key, shapes.get(key[0], ""), arrays) for key, arrays in layers.items()]
    columns = [c for c in zip(*rows, strict=True) if x is not None or c[0] != "output"]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in zip(*columns, strict=True):
        cells = zip(columns, row, widths, strict=True)
        lines.append(
            "  ".join(t.rjust(w) if c[0] in _NUMBER_COLUMNS else t.ljust(w) for c, t, w in cells)
        )
    lines.insert(1, "-" * max(map(len, lines)))
    lines += ["", *_totals([item for arrays in layers.values() for item in arrays])]
    return "\n".join(line.rstrip() for line in lines)


def _row(path: str, kind: str, shape: str, items: Arrays) -> tuple[str, ...]:
    arrays = [array for _, array in items]
    size, memory = sum(array.size for array in arrays), sum(map(_bytes, arrays))
    dtypes = dict.fromkeys(str(array.dtype) for array in arrays)
    texts = ", ".join(dtypes), ", ".join(dict.fromkeys(map(_placement, arrays)))
    return path, kind, shape, f"{size:,}", size_text(memory), *texts


def _output_shapes(module: nnx.Module, x: Any) -> dict[str, str]:
    """Returns the output shapes of each layer by its path; for a layer that is called twice, of the first."""
    shapes: dict[str, str] = {}

    def recording(call: Callable[..., Any], paths: dict[int, str]) -> Callable[..., Any]:
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(self), "")
            is_first = path not in shapes  # and not that of a base class, by super().__call__
            shapes.setdefault(path, "")
            result = call(self, *args, **kwargs)
            if is_first:
                shapes[path] = ", ".join(str(np.shape(leaf)) for leaf in jax.tree.leaves(result))
            return result

        return called

    def forward(x: Any) -> Any:
        copied: Any = nnx.clone(module)  # so that the call changes no statistics
        nodes = [(p, n) for p, n in nnx.iter_graph(copied) if isinstance(n, nnx.Module)]
        paths = {id(node): _path_text(path) for path, node in nodes}
        classes = {c for _, node in nodes for c in type(node).__mro__ if "__call__" in vars(c)}
        with ExitStack() as restored:
            for cls in classes:
                restored.callback(setattr, cls, "__call__", vars(cls)["__call__"])
                setattr(cls, "__call__", recording(vars(cls)["__call__"], paths))  # noqa: B010
            return copied(x)

    with converting("summary: x", x, "an input of the model, or its shape and dtype"):
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), jnp.result_type(a)), x)
    jax.eval_shape(forward, like)
    return shapes


def _path_text(path: Sequence[Any]) -> str:
    return ".".join(map(str, path)) or "(model)"


def _layers_of(module: nnx.Module, trained: Any = nnx.Param) -> dict[tuple[str, str], Arrays]:
    """Returns the arrays of every module that holds variables, by its path and class name, in order."""
    class_names: dict[tuple[Any, ...], str] = {}
    variables = []
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            variables.append((tuple(path), node))
        elif isinstance(node, nnx.Module) and not isinstance(node, (nnx.List, nnx.Dict)):
            class_names[tuple(path)] = type(node).__name__
    layers: dict[tuple[str, str], Arrays] = {}
    is_trained = nnx.filterlib.to_predicate(trained)
    for path, variable in sorted(variables, key=lambda item: list(map(str, item[0][:-1]))):
        owner = next(path[:n] for n in range(len(path) - 1, -1, -1) if path[:n] in class_names)
        key = _path_text(owner), class_names[owner]
        layers.setdefault(key, []).extend(
            (is_trained(path, variable), leaf if is_array(leaf) else np.asarray(leaf))
            for leaf in jax.tree.leaves(variable.get_raw_value())
        )
    return layers


def _totals(arrays: Arrays) -> list[str]:
    parts = (
        ("Total", [array for _, array in arrays]),
        ("Trainable", [array for trained, array in arrays if trained]),
        ("Other", [array for trained, array in arrays if not trained]),
    )
    return [
        f"{name}: {sum(a.size for a in part):,} parameters, {size_text(sum(map(_bytes, part)))}"
        for name, part in parts
    ]


def _bytes(array: Any) -> int:
    return int(jax.random.key_data(array).nbytes if is_key(array) else array.nbytes)


def _placement(array: Any) -> str:
    if not isinstance(array, jax.Array):
        return "host"
    devices: list[Any] = list(array.sharding.device_set)
    platform = devices[0].platform
    if len(devices) == 1:
        return f"{platform}:{devices[0].id}"
    if array.sharding.is_fully_replicated:
        return f"on each of {len(devices)} {platform}"
    spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else array.sharding
    return f"{spec} over {len(devices)} {platform}"


class Stateful:
    """The part of ``Model`` that reads, writes, saves and loads state."""

    module: nnx.Module
    strategy: Strategy

    _trainer: Any
    """The ``Trainer`` that ``compile`` made, or None."""

    _evaluating: Callable[[], AbstractContextManager[Callable[[nnx.Module, PyTree], PyTree]]]
    """Puts the module into evaluation mode; yields the function of module and inputs for ``predict``."""

    @property
    def _trained_filter(self) -> Any:
        return is_trained if self._trainer is None else self._trainer.setup.optimizer.wrt

    def _state(self) -> dict[str, Any]:
        optimizer = {} if self._trainer is None else {"optimizer": self._trainer.setup.optimizer}
        return {"module": self.module, **optimizer}

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Returns every weight as a NumPy array: the trained ones first, then statistics."""
        return [on_host(v[...]) for _, v in weight_variables(self.module)]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets every weight, in the order of ``get_weights``; if any shape is wrong, none changes."""
        variables = weight_variables(self.module)
        with converting("set_weights: weights", weights, "a list of arrays, as of get_weights()"):
            weights = list(weights)
            for new in weights:
                check_not_masked(new, "set_weights")
            pairs = zip(weights, variables, strict=False)
            arrays = [np.array(new, v[...].dtype) for new, (_, v) in pairs]
        if len(weights) != len(variables):
            raise ArgumentError(
                f"set_weights takes {len(variables)} arrays, one for each weight, and got {len(weights)}. "
                f"The weights: {', '.join(name for name, _ in variables[:10])}."
            )
        wrong = [
            f"{name}: {new.shape} instead of {v[...].shape}"
            for (name, v), new in zip(variables, arrays, strict=True)
            if new.shape != v[...].shape
        ]
        if wrong:
            raise ArgumentError(f"set_weights got arrays of other shapes:\n{listed(wrong)}")
        for (_, variable), new in zip(variables, arrays, strict=True):
            assign(variable, new)

    def summary(self, print_fn: Callable[[str], Any] = print, *, x: Any = None) -> None:
        """Prints a table of the layers, or passes its text to ``print_fn``; on the chief only.

        Args:
            print_fn: called with the text.
            x: an input of any number of examples, such as ``x[:1]``; with it the table shows the shape of
                each layer's output. Nothing is computed.
        """
        if is_chief():
            print_fn(_summary_text(self.module, x, self._trained_filter))

    def save(self, path: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Saves weights, statistics, random streams and the optimizer, to continue the training.

        At every moment the folder holds the old checkpoint or the new one, complete. A checkpoint saved
        under one strategy can be loaded under any other.

        Args:
            path: a folder, which is created.
            overwrite: whether to replace an older checkpoint there.

        Raises:
            CheckpointError: there is one and ``overwrite=False``.
            CheckpointFileError: it cannot be written.
        """
        with self.strategy.scope():
            checkpoint.save(path, self._state(), overwrite=overwrite)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Loads what ``save`` saved into a model of the same structure; an error changes nothing.

        Args:
            path: the folder.

        Raises:
            CheckpointError: there is none, or its leaves differ from those of this model: all are listed.
            CheckpointDamagedError: the data differ from what was saved.
        """
        with self.strategy.scope():
            checkpoint.load(path, self._state())

    def save_weights(self, path: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Saves only the module: weights, statistics and random streams; see ``save``."""
        with self.strategy.scope():
            checkpoint.save(path, {"module": self.module}, overwrite=overwrite)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Loads what ``save_weights`` saved (see ``load``), or the weights of a plain Flax program.

        For the latter the path is a folder that ``orbax.checkpoint`` wrote: an ``nnx.State``, a Linen
        module's variables or ``params``, a ``TrainState``, or a step of a ``CheckpointManager``. It must
        have every weight, with its name and shape; the dtypes are those of the model. Random streams do not
        change.
        """
        with self.strategy.scope():
            if folder := find_flax_folder(path):
                load_flax(folder, self.module)
            else:
                checkpoint.load(path, {"module": self.module})

    def export(
        self,
        path: str | os.PathLike[str],
        x: PyTree,
        *,
        platforms: Sequence[str] | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Writes the computation of ``predict``, with the weights, into a file that JAX alone can serve.

        It runs on one device, without this library or the module's code. In a job all processes call
        this, and the chief writes the file, which at every moment is the old or the new one, complete.

        Args:
            path: the file.
            x: an input of any number of examples, such as ``x[:1]``, for shapes and dtypes.
            platforms: where it can run, of ``"cpu"``, ``"cuda"`` and ``"tpu"``; by default all that
                support the module.
            batch_size: the number of examples in every call, for a module that cannot be exported for
                any number.

        Raises:
            LoweringError: JAX cannot export the module.
            MissingPackageError: flatbuffers is not installed.

        Example:
            >>> import distribute_jax as dj, jax.export, numpy as np, pathlib, tempfile
            >>> from flax import nnx
            >>> model = dj.Model(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
            >>> path = pathlib.Path(tempfile.mkdtemp(), "linear.jax")
            >>> model.export(path, np.ones((1, 3), np.float32))
            >>> served = jax.export.deserialize(bytearray(path.read_bytes()))
            >>> served.call(np.ones((5, 3), np.float32)).shape
            (5, 2)
        """
        if Path(path).is_dir():
            refuse("export(path)", "the path of a file", path)
        for platform in platforms or ():
            check_choice("export(platforms)", platform, _PLATFORMS)
        if batch_size is not None:
            check_int("export(batch_size)", batch_size)
        if (arrays := arrays_of("export", x, None, None)) is None:
            raise ArgumentError(f"export takes arrays of examples, and got {leaf_text(x)}.")
        with outside_mesh(), self._evaluating() as forward:
            data = export_program(forward, self.module, arrays.x, platforms, batch_size)
        if is_chief():
            write_atomically(path, data)


_PLATFORMS = ("cpu", "cuda", "tpu")
_MAX_BYTES = 1 << 31
"""The limit of flatbuffers, the file format that JAX uses."""

_FIXED_SIZE_ONLY = """\
export: the module does not compute with a batch of any size: {error}
While it is exported, x.shape[0] is a symbol: shapes may be computed from it, an int or a bool cannot. \
model.export(path, x, batch_size=8) exports it for batches of 8."""


def export_program(
    forward: Callable[[nnx.Module, Any], PyTree],
    module: nnx.Module,
    x: PyTree,
    platforms: Sequence[str] | None,
    batch_size: int | None,
) -> bytes:
    """Returns a serialized program that calls a module; a collective if processes hold parts of it."""
    with importing("JAX's writer of exported programs needs flatbuffers", "export"):
        import_module("flatbuffers")
    graphdef, state = nnx.split(module)
    arrays = nnx.as_pure(state)
    values = jax.tree.map(lambda array: on_host(as_numbers(array)), arrays)
    if (size := sum(value.nbytes for value in jax.tree.leaves(values))) >= _MAX_BYTES:
        raise LoweringError(
            f"export: the weights are {size_text(size)}, and a file of jax.export is less than 2 GiB. Write "
            "them with save_weights, and serve them where the module's code is."
        )

    def predict(x: PyTree) -> PyTree:
        weights = jax.tree.map(lambda v, like: from_numbers(jnp.asarray(v), like), values, arrays)
        return forward(nnx.merge(graphdef, weights), x)

    return _serialized(predict, x, platforms, batch_size)


def _serialized(
    predict: Callable[..., PyTree], x: PyTree, platforms: Sequence[str] | None, size: int | None
) -> bytes:
    """Returns a program for these platforms; by default for all that support it."""

    def typed(rows: Any) -> PyTree:
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct((rows, *array.shape[1:]), jnp.result_type(array)), x
        )

    def attempt(platforms: Sequence[str], rows: Any) -> bytes | Exception:
        try:
            program = export.export(jax.jit(predict), platforms=platforms)(typed(rows))
            return bytes(program.serialize())
        except Exception as error:  # from the user's code, or any of JAX's lowering rules
            return error

    rows = size or export.symbolic_shape("batch")[0]
    first = attempt(platforms or _PLATFORMS, rows)
    if isinstance(first, bytes):
        return first
    reason = str(first).partition("\n")[0]
    jax.eval_shape(predict, typed(size or 2))  # raises if the module itself fails
    supported = [
        p for p in _PLATFORMS if platforms is None and isinstance(attempt([p], rows), bytes)
    ]
    if supported and isinstance(program := attempt(supported, rows), bytes):
        warn_user(f"export: the file is for {' and '.join(supported)} only: {reason}")
        return program
    is_any_size = size is None and isinstance(attempt(platforms or ("cpu",), 2), bytes)
    text = _FIXED_SIZE_ONLY if is_any_size else "export: JAX cannot export the module: {error}"
    raise LoweringError(text.format(error=reason)) from first


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file so that at every moment it is the old one or the new one, complete."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(data)
        sync(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
