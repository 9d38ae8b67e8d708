"""One step on many ranks: the pipeline, what executes it, and what measures a model.

These names are the door for other rooms: ``Pipeline`` runs steps, ``Transport`` and ``device_mesh`` meet the other
ranks, ``Emulation`` says what devices take that only sleep, ``Profiler`` and ``MemoryCounter`` measure, ``job``,
``restarts`` and the like say what torchrun told this process. README.md beside this file says which file to read first.
"""

from terapipe.runtime.comm.environment import job, local_device, rank_and_size, restarts, under_torchrun
from terapipe.runtime.comm.errors import PipelineError
from terapipe.runtime.comm.failures import FailureReport
from terapipe.runtime.comm.mesh import ALL, device_mesh
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.emulation import EmulatedModel, Emulation, Seconds, predict, sharpen_sleep, sleep_until
from terapipe.runtime.host_optimizer import HostOptimizer
from terapipe.runtime.memory_counter import MemoryCounter
from terapipe.runtime.pipeline import Pipeline
from terapipe.runtime.profiler import Profiler
from terapipe.runtime.random_state import rng_state, seed_rng, set_rng_state

__all__ = [
    "ALL",
    "EmulatedModel",
    "Emulation",
    "FailureReport",
    "HostOptimizer",
    "MemoryCounter",
    "Pipeline",
    "PipelineError",
    "Profiler",
    "Seconds",
    "Transport",
    "device_mesh",
    "job",
    "local_device",
    "predict",
    "rank_and_size",
    "restarts",
    "rng_state",
    "seed_rng",
    "set_rng_state",
    "sharpen_sleep",
    "sleep_until",
    "under_torchrun",
]
