"""TensorFlow's ``tf.distribute``, natively on JAX, for Flax models.

Pick a strategy, build the model under ``strategy.scope()``, write the step for one replica, and
``strategy.run`` executes it on all. ``docs/architecture.md`` shows the packages, each of which imports only
from those below it.
"""

from distribute_jax import _errors
from distribute_jax._lazy import lazy_exports, names_in_stub, publish

__version__ = "0.1.0"

_names = names_in_stub(__file__)
__all__ = sorted(name for names in _names.values() for name in names)

# Names are imported on first access, so that a job's supervisor does without JAX: the core as a whole, and
# each part that builds on `run` and the strategies by itself.
__getattr__ = lazy_exports(
    globals(),
    _names,
    core=(
        *("_errors", "_values", "collectives", "data", "processes", "program"),
        *("strategies", "tpu", "tpu.experimental", "variables"),
    ),
)

publish(vars(_errors), __all__, "distribute_jax")  # their public names stand in every traceback


def __dir__() -> list[str]:
    return sorted(__all__)
