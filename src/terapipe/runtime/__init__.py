"""One step on many ranks: the pipeline, what executes it, and what measures a model."""

from terapipe.runtime.environment import local_device, rank_and_size, under_torchrun
from terapipe.runtime.failures import PipelineError
from terapipe.runtime.memory_counter import MemoryCounter
from terapipe.runtime.mesh import device_mesh
from terapipe.runtime.pipeline import Pipeline
from terapipe.runtime.profiler import Profiler
from terapipe.runtime.transport import Transport

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
