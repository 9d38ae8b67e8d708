"""One step on many ranks: the pipeline, what executes it, and what measures a model."""

from terapipe.runtime.comm.environment import local_device, rank_and_size, under_torchrun
from terapipe.runtime.comm.errors import PipelineError
from terapipe.runtime.comm.mesh import device_mesh
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.memory_counter import MemoryCounter
from terapipe.runtime.pipeline import Pipeline
from terapipe.runtime.profiler import Profiler

__all__ = [
    "MemoryCounter",
    "Pipeline",
    "PipelineError",
    "Profiler",
    "Transport",
    "device_mesh",
    "local_device",
    "rank_and_size",
    "under_torchrun",
]
