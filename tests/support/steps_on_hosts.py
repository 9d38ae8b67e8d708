"""What tests/failures/test_cut_off.py runs on every host: steps without end, each of them told."""

import sys
import time

import torch.distributed as dist

from terapipe import Layout, Pipeline, PipelineError, Plan, device_mesh
from tests.support.models import TINY, make_batch, make_model

TIMEOUT = 8.0


def main(data: int, pipe: int) -> None:
    boundaries = (0, 4) if pipe == 1 else (0, 2, 4)
    plan = Plan.uniform(batch_size=2, seq_len=12, num_slices=3, boundaries=boundaries, order="terapipe-1f1b")
    pipeline = Pipeline(make_model(TINY), plan, mesh=device_mesh(Layout(data, pipe, 1)), timeout=TIMEOUT)
    batch = make_batch(TINY, plan.batch_size, plan.seq_len, ignored=False)
    while True:
        try:
            pipeline.step(*batch)
        except PipelineError as error:
            print(f"rank {dist.get_rank()} stopped: {error}", flush=True)
            sys.exit(3)
        print(f"rank {dist.get_rank()} made a step", flush=True)
        time.sleep(0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
