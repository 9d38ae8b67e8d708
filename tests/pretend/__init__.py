"""A pretend GPU: CUDA and NCCL code runs on a machine that has no GPU, with real numbers.

``python -m tests.pretend tests/gpu`` runs tests on it, ``python -m tests.pretend -- COMMAND`` any command. The device
itself is device.cpp, which build.py compiles. cuda.py fills in torch.cuda, waits.py counts where the host would wait
for the device, operators.py and cudnn.py have doubles of private operators, and nccl.py one of NCCL. activation.py puts
all of them in place when torch is imported. flash_packages.py has doubles of packages that tests install.

What it cannot show: speed, work that runs while the host goes on, and the numbers and bugs of real kernels.
"""

import os

GPUS = "TERAPIPE_PRETEND_GPUS"  # in the environment: how many there are; without it, nothing here is used


def is_active() -> bool:
    """Whether this process is one that has pretend GPUs."""
    return bool(os.environ.get(GPUS))
