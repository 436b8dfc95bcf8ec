"""Compiles a per-replica function into one program: bind, trace, prove, plan, lower, call.

In the order of a call: ``_run`` looks a program up (``_arguments``, ``_binding``, ``_cache``) or has
``_program`` build it. ``_capture``, ``_graph`` and ``_places`` find what the function reaches, ``_trace``
makes a jaxpr of it, ``_replication`` proves which values are equal on all replicas, ``_plan`` decides how
state and results are combined, ``_lowerings`` makes a program for the mesh, with ``_sharded_update`` and
``_gather`` where ``_placement`` divides state, and ``_call`` executes it. ``_halves`` and ``_divide`` divide
a step among workers and parameter servers, and ``_part`` compiles what each of them runs. ``_padding_check``
and ``_verify`` check results, ``_across_processes`` the other processes.
"""

from distribute_jax.program._aggregation import (
    Combine,
    MergeRule,
    moments_combined,
    register_aggregation,
    register_merge,
)
from distribute_jax.program._ahead_of_time import PlanTable, StepPlan, plan, plan_table
from distribute_jax.program._binding import one_at_a_time
from distribute_jax.program._failures import is_runtime_failure
from distribute_jax.program._halves import Halves, ServerHalf, build_halves
from distribute_jax.program._hlo import Collective
from distribute_jax.program._options import RunOptions, library_options
from distribute_jax.program._part import LoadedPart, Part, export_part, load_part
from distribute_jax.program._placement import (
    ParameterDevice,
    Path,
    PlacedLeaf,
    Replicas,
    modules_of,
)
from distribute_jax.program._placement_rules import Rules
from distribute_jax.program._preparation import PreparationClock
from distribute_jax.program._random import same_on_all_replicas
from distribute_jax.program._replica_context import MergedValues, ReplicaContext
from distribute_jax.program._results import per_example
from distribute_jax.program._run import Runner
from distribute_jax.program._state_placement import snapshot
from distribute_jax.program._verify import results_are_parts

__all__ = [
    "Collective",
    "Combine",
    "Halves",
    "LoadedPart",
    "MergeRule",
    "MergedValues",
    "ParameterDevice",
    "Part",
    "Path",
    "PlacedLeaf",
    "PlanTable",
    "PreparationClock",
    "ReplicaContext",
    "Replicas",
    "Rules",
    "RunOptions",
    "Runner",
    "ServerHalf",
    "StepPlan",
    "build_halves",
    "export_part",
    "is_runtime_failure",
    "library_options",
    "load_part",
    "modules_of",
    "moments_combined",
    "one_at_a_time",
    "per_example",
    "plan",
    "plan_table",
    "register_aggregation",
    "register_merge",
    "results_are_parts",
    "same_on_all_replicas",
    "snapshot",
]
