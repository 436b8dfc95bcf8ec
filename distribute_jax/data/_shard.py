"""Which part of a source a process reads: the policy that holds, and the source of its part."""

from __future__ import annotations

from typing import Any, cast

from distribute_jax._errors import ArgumentError
from distribute_jax._warn import warn_user
from distribute_jax.data._options import HINT_REFUSED, InputOptions
from distribute_jax.data._policies import AutoShardPolicy
from distribute_jax.data._source import Source
from distribute_jax.data._split import Rule


def files_of(num_files: int, workers: int, worker: int) -> range:
    """Gives the files that one worker reads under FILE.

    >>> list(files_of(3, workers=2, worker=0))
    [0, 2]
    """
    return range(worker, num_files, workers)


def choose_policy(asked: AutoShardPolicy | None, source: Source, workers: int) -> AutoShardPolicy:
    """Gives the policy that holds: OFF, FILE or DATA.

    The user's option comes first, then the source's own, then AUTO. With one worker nothing is
    sharded, and the policy only says by which rule batches are divided.

    Raises:
        ArgumentError: HINT; or FILE where some worker would have no file.
    """
    policy = _own_policy(source) if asked is None else asked
    if policy is AutoShardPolicy.HINT:
        raise ArgumentError(f"{source.text} has the option auto_shard_policy=HINT. {HINT_REFUSED}")
    if policy is AutoShardPolicy.FILE and workers > 1:
        _check_files(source, workers)
    if policy is not AutoShardPolicy.AUTO:
        return policy
    if workers == 1 or source.num_files is None:
        return AutoShardPolicy.DATA
    if source.num_files >= workers:
        return AutoShardPolicy.FILE
    _warn_of_few_files(source, workers)
    return AutoShardPolicy.DATA


def shard(source: Source, options: InputOptions, workers: int, worker: int) -> tuple[Source, Rule]:
    """Gives what one worker reads, and the rule by which its batches are divided."""
    policy = choose_policy(cast("Any", options.auto_shard_policy), source, workers)
    if policy is AutoShardPolicy.DATA:
        return source, Rule.A
    if policy is AutoShardPolicy.OFF or workers == 1:
        return source, Rule.B
    part = source.shard_files(workers, worker)
    if part is None:
        raise _no_files(source)
    return part, Rule.B


def _own_policy(source: Source) -> AutoShardPolicy:
    return AutoShardPolicy[(source.own_policy or "auto").upper()]


def _check_files(source: Source, workers: int) -> None:
    if source.num_files is None:
        raise _no_files(source)
    if source.num_files < workers:
        raise ArgumentError(
            f"AutoShardPolicy.FILE gives each of the {workers} processes files of its own, but "
            f"{source.text} reads {source.num_files}. Write the data to at least {workers} files, "
            'or let every process read all of it: dj.InputOptions(auto_shard_policy="data").'
        )


def _no_files(source: Source) -> ArgumentError:
    return ArgumentError(
        f"AutoShardPolicy.FILE divides files among the processes, but {source.text} reads none that "
        "it knows of. Use dj.data.from_files or one of tf.data's readers, or let every process read "
        'everything: dj.InputOptions(auto_shard_policy="data").'
    )


def _warn_of_few_files(source: Source, workers: int) -> None:
    warn_user(
        f"{source.text} reads {source.num_files} files for {workers} processes, too few to give each "
        "its own, so every process reads all of them and takes its part of each batch. Write at "
        f'least {workers} files, or choose this with dj.InputOptions(auto_shard_policy="data").'
    )
