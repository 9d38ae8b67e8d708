"""A device, as the analytic cost model sees it: how fast it computes, reads and writes, and what it leaves to plans."""

from dataclasses import dataclass
from typing import NamedTuple

GB, GIB, MIB = 1e9, 2**30, 2**20
# Attention kernels, as modeling/kernels.py names them; the last two are torch's FlashAttention in newer versions.
FLASH, CUDNN, EFFICIENT, CPU_ATTENTION = "flash", "cudnn", "memory-efficient", "flash for CPUs"
FLASH3, FLASH4 = "flash (FA3)", "flash (FA4)"
UNFUSED = "unfused"  # matrices of scores in memory, as before FlashAttention; no kernel of ours


@dataclass(frozen=True)
class Link:
    """A connection between devices. A message takes its latency, then its bytes at the bandwidth."""

    bandwidth: float  # bytes per second, in one direction
    latency: float  # seconds

    def seconds(self, nbytes: float) -> float:
        """Seconds of a message, from its start to its last byte.

        Args:
            nbytes: Of the message.
        """
        return self.latency + nbytes / self.bandwidth


class AttentionSpeed(NamedTuple):
    """What an attention kernel makes of a device. ``hardware.ATTENTION`` has those of kernels and GPUs."""

    forward: float  # share of the peak, counting products of visible tokens only
    backward: float  # the same; a fused backward has 2.5 times the products of its forward
    causal: bool = True  # whether it skips masked blocks; otherwise it computes whole rectangles
    scores: float = 0.0  # how often a matrix of scores is read or written in memory; fused kernels never do


_HALF = AttentionSpeed(0.5, 0.45)


@dataclass(frozen=True)
class Device:
    """A device, and how well transformer layers use it. The times that follow from it are in ``analytic.py``."""

    peak: float  # FLOP/s in the dtype of training, of dense matrices
    achieved: float  # utilization of the peak by large products, for as long as training lasts
    bandwidth: float  # memory bandwidth, bytes per second
    memory: int  # bytes
    layer_overhead: float  # seconds of a layer's forward besides its arithmetic: gaps between kernels
    min_layer_time: float  # lower bound on the seconds of a layer's forward: its kernels, however little they do
    units: int = 1  # multiprocessors (NVIDIA's SMs, AMD's CUs), over which a product's tiles are spread
    # How often the forward of a layer reads or writes a number of its hidden width, beside products and attention:
    # norms, rotary embeddings, residuals, the activation function. Its backward does so as often.
    passes: float = 105.0
    # Memory traffic of accumulating a slice's weight gradients, as a multiple of weight bytes. A product that adds to a
    # sum in float32 reads and writes 4 bytes for each weight: 4 times the bytes of half precision.
    accumulated: float = 4.0
    fuses: bool = True  # whether a product can add to such a sum itself
    element: int = 2  # bytes of a weight, an activation, a gradient
    summed: int = 4  # bytes of a gradient in the all-reduce over replicas, which is in float32
    state: float = 12  # bytes of optimizer state per parameter: float32 copy and Adam's two moments
    tile: int = 8  # tokens; slice lengths that are multiples of it use the device well
    accelerator: bool = True  # whether a context and NCCL take part of its memory, see ``usable_memory``
    architecture: str = ""  # of GPUs, as in ``hardware.ATTENTION``
    attention_kernel: str = FLASH  # as modeling/kernels.py names it; see ``hardware.with_attention``
    attention_speed: AttentionSpeed = _HALF
    blas: int = 3 * 32 * MIB  # bytes of cuBLAS's workspaces, see ``blas_workspaces``
    # Seconds of the host that issues the kernels; zero where ``min_layer_time`` has them, or the device is the host.
    host_forward: float = 0.0  # of a layer's forward
    host_backward: float = 0.0  # of a layer's backward
    host_action: float = 0.0  # of a computation beside its layers
    host_message: float = 0.0  # to post a send or a receive

    @property
    def rate(self) -> float:
        """FLOP/s of large products."""
        return self.peak * self.achieved


# What a plan cannot have of an accelerator's memory. Typical values, not measured on the device at hand.
REPORTED = 0.989  # of the data sheet's memory: a card of 80 GiB reports 79.1 GiB, one of 40 GiB 39.6, of 16 GiB 15.8
CONTEXT = 3 << 28  # bytes of the CUDA context with loaded kernels: 0.5 to 1 GiB
COLLECTIVES = 3 << 29  # bytes of NCCL's buffers for pipeline, tensor and data parallel groups: 1 to 2 GiB
LATER_GROUPS = 1 << 29  # of these, bytes of the groups of replicas and tensor parallel ranks
FRAGMENTED = 0.04  # of the rest: gaps between tensors that torch's allocator cannot fill, 3 to 5 %


def usable_memory(device: Device) -> int:
    """Bytes that a plan may use: the data sheet's, less what driver, CUDA context, NCCL and fragmentation take.

    Args:
        device: A described device. Where the device is the host, nothing is taken.
    """
    if not device.accelerator:
        return device.memory
    return _without_fragmentation(device.memory * REPORTED - CONTEXT - COLLECTIVES)


def usable_of_measured(free: int) -> int:
    """The same of a GPU on which ``free`` bytes were measured to be left for tensors when context and connections of a
    pipeline were there. Profiling makes no groups of replicas and tensor parallel ranks; a run may.

    Args:
        free: Bytes that tensors could have had.
    """
    return _without_fragmentation(free - LATER_GROUPS)


def _without_fragmentation(nbytes: float) -> int:
    return max(0, int(nbytes * (1 - FRAGMENTED)))


def blas_workspace(capability: int) -> int:
    """Bytes that torch's cuBLAS keeps for each thread.

    Args:
        capability: The first number of the GPU's compute capability: 7 is Volta, 8 Ampere and Ada, 9 Hopper.
    """
    return 32 * MIB if capability >= 9 else 8 * MIB + 128 * 2**10


def blas_workspaces(capability: int) -> int:
    """For the threads of forwards, of backwards, and of attention kernels' self-tests, if these multiply anything.

    Args:
        capability: As in ``blas_workspace``.
    """
    return 3 * blas_workspace(capability)
