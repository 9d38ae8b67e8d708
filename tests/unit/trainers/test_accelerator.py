"""An Accelerator of trainers counts replicas, not processes. (With several: tests of trainers and peers.)"""

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]

from terapipe import Layout
from terapipe.trainers.accelerator import PipelineAccelerator


def test_stages_of_one_replica_are_one_process() -> None:
    accelerator = Accelerator(cpu=True)
    PipelineAccelerator.adopt(accelerator, Layout(1, 4, 1), None)
    assert (accelerator.num_processes, accelerator.process_index) == (1, 0)
    values = {"loss": torch.arange(3.0)}
    assert accelerator.gather(values) is values
    assert accelerator.reduce(values, "mean") is values
    assert accelerator.pad_across_processes(values) is values
    model = torch.nn.Linear(2, 2)
    assert accelerator.prepare_model(model) is model  # no DistributedDataParallel around it
