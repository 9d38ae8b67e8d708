"""The pretend device: its numbers are the CPU's, and what is about devices is as on a GPU."""

import copy
import os
from collections.abc import Callable
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pretend import cuda

CUDA = torch.device("cuda", 0)
Function = Callable[..., Tensor]


def pair(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The same numbers on the CPU and on the device."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x, x.to(CUDA)


# Numbers


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 2 * x,
        lambda x: x @ x.transpose(-1, -2),
        lambda x: x.softmax(-1),
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: F.rms_norm(x, x.shape[-1:]),
        lambda x: F.silu(x).cumsum(1),
        lambda x: x[:, 1:3, ::2].contiguous(),
        lambda x: x[x > 0],
        lambda x: x[:, [2, 0]],
        lambda x: x.index_select(1, torch.tensor([1, 0], device=x.device)),
        lambda x: torch.cat([x, x], 1).sort(-1).values,
        lambda x: torch.stack(x.unbind(1)).flip(0),
        lambda x: x.masked_fill(x < 0, 0.0).nonzero(),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x.double().float(),
        lambda x: F.embedding(torch.arange(2, device=x.device), x[0]),
        lambda x: torch.einsum("bij,bkj->ik", x, x),
        lambda x: torch.logaddexp(x, x.flip(0)),
        lambda x: F.pad(x, (1, 2), value=3.0),
        lambda x: torch.linalg.vector_norm(x, dim=1),
        lambda x: x.unfold(1, 2, 1),
        lambda x: x.view(torch.int32),
        lambda x: torch.tril_indices(3, 3, device=x.device),
        lambda x: torch.arange(5, device=x.device).flip(0),
        lambda x: torch.zeros_like(x).scatter_(1, torch.zeros(2, 3, 4, dtype=torch.int64, device=x.device), x),
        lambda x: F.conv1d(x, x[:, :, :2].contiguous(), padding=1),
        lambda x: F.conv1d(x, x[0, :, None, :2].contiguous(), groups=3),
    ],
)
def test_numbers_are_those_of_the_cpu(function: Function) -> None:
    host, device = pair(2, 3, 4)
    found = function(device)
    assert found.device == CUDA
    torch.testing.assert_close(found.cpu(), function(host))


def test_whole_numbers_are_counted() -> None:
    """Not on the CPU; transformers does it for experts."""
    numbers = torch.tensor([0, 2, 2, 3], dtype=torch.int32, device=CUDA)
    assert torch.histc(numbers, bins=4, min=0, max=3).tolist() == [1, 0, 2, 1]


def test_views_that_are_conjugated() -> None:
    """Rotations written with complex numbers have them in their backward."""
    host = torch.randn(3, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    device = host.to(CUDA)
    assert torch.equal((device * device.conj()).cpu(), host * host.conj())
    assert torch.equal(device.conj().cpu(), host.conj())
    assert torch.equal(device.conj().imag.cpu(), host.conj().imag)


def test_results_in_place_and_in_tensors_that_are_given() -> None:
    host, device = pair(3, 4)
    kept = device[1]
    device.mul_(2).add_(1)
    assert torch.equal(kept.cpu(), host[1] * 2 + 1)  # a view sees it
    out = torch.empty(0, device=CUDA)
    assert torch.add(device, 1, out=out) is out
    assert torch.equal(out.cpu(), host * 2 + 2)
    found = torch.max(device, 1, out=(torch.empty(0, device=CUDA), torch.empty(0, dtype=torch.int64, device=CUDA)))
    assert torch.equal(found.indices.cpu(), host.argmax(1))


def test_lists_of_tensors() -> None:
    host, device = pair(4)
    lists = [device.clone(), device * 2]
    torch._foreach_add_(lists, 1.0)
    assert torch.equal(lists[1].cpu(), host * 2 + 1)
    norms = torch._foreach_norm(lists)
    assert norms[0].device == CUDA
    assert [x.shape for x in device.split([1, 3])] == [(1,), (3,)]


def step_of_a_model(device: torch.device, fused: bool) -> list[Tensor]:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(11, 8), layer, nn.Linear(8, 11)).to(device)
    # A large eps: some gradients are zero but for rounding.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused, weight_decay=0.1, eps=1e-2)
    ids = (torch.arange(24).view(2, 12) % 11).to(device)
    for _ in range(2):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach().cpu(), *(p.detach().cpu() for p in model.parameters())]


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_is_trained_as_on_the_cpu(fused: bool) -> None:
    for found, wanted in zip(step_of_a_model(CUDA, fused), step_of_a_model(torch.device("cpu"), fused), strict=True):
        torch.testing.assert_close(found, wanted)


def test_backward_runs_in_a_thread_of_the_device() -> None:
    names = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
            import threading

            names.append((threading.current_thread() is threading.main_thread(), torch.cuda.current_device()))
            return grad * 2

    x = torch.ones(2, device="cuda:3", requires_grad=True)
    Spy.apply(x).sum().backward()
    assert names == [(False, 3)]
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), torch.full((2,), 2.0))


def test_autocast() -> None:
    x, w = (torch.randn(4, 4, device=CUDA) for _ in range(2))
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")
        assert (x @ w).dtype == torch.bfloat16
        assert (x @ w).softmax(-1).dtype == torch.float32
    assert (x @ w).dtype == torch.float32


def test_fresh_memory_is_not_a_number() -> None:
    assert torch.empty(5, device=CUDA).isnan().all()
    assert torch.empty(5, dtype=torch.bfloat16, device=CUDA).isnan().all()
    assert torch.empty_like(torch.ones(3, device=CUDA)).isnan().all()
    assert not torch.zeros(5, device=CUDA).isnan().any()


def test_storages_may_be_freed_and_taken_again() -> None:
    """As FSDP does with parameters it has gathered."""
    x = torch.ones(4, device=CUDA)
    before = torch.cuda.memory_allocated()
    x.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() < before
    x.untyped_storage().resize_(16)
    assert x.isnan().all()
    view = torch.arange(4.0, device=CUDA)
    y = torch.empty(0, device=CUDA).set_(view.untyped_storage(), 1, (3,), (1,))  # type: ignore[call-overload]
    assert y.tolist() == [1, 2, 3]


def test_copies_of_storages() -> None:
    x = torch.arange(3.0, device=CUDA)
    y = copy.deepcopy(x)
    x.zero_()
    assert y.device == CUDA
    assert y.tolist() == [0, 1, 2]
    assert copy.deepcopy(torch.ones(2)).tolist() == [1, 1]


def test_views_of_a_resized_tensor_see_the_same_memory() -> None:
    x = torch.arange(4.0, device=CUDA)
    view = x[:2]
    x.resize_(6)
    x[0] = 7.0
    assert view[0].item() == 7.0


# Devices


def test_torch_sees_gpus() -> None:
    count = int(os.environ["TERAPIPE_PRETEND_GPUS"])
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == torch.accelerator.device_count() == count
    assert str(torch.accelerator.current_accelerator()) == "cuda"
    assert torch.cuda.get_device_name(1) == cuda.NAME
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.nccl.version() == cuda.NCCL
    properties = [torch.cuda.get_device_properties(i) for i in range(2)]
    assert properties[0].uuid != properties[1].uuid
    assert properties[0].total_memory == torch.cuda.mem_get_info(0)[1]
    with cuda.capability(7, 0):
        assert torch.cuda.get_device_capability(1) == (7, 0)
    with pytest.raises(ValueError, match=r"Expected a torch\.device with a specified index"):
        torch.cuda.set_device("cuda")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(count)


def test_the_current_device_is_that_of_the_thread() -> None:
    seen = []
    with torch.cuda.device(2):
        seen.append(torch.empty(1, device="cuda").device.index)
        thread = Thread(target=lambda: seen.append(torch.cuda.current_device()))
        thread.start()
        thread.join()
    assert seen == [2, 0]
    assert torch.cuda.current_device() == 0
    assert (torch.ones(1, device="cuda:1") + 1).device.index == 1


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_operators_take_tensors_of_one_device(other: str) -> None:
    x, y = torch.ones(2, device=CUDA), torch.ones(2, device=other)
    with pytest.raises(RuntimeError, match=f"found at least two devices, .*{other}"):
        x + y
    with pytest.raises(RuntimeError, match="found at least two devices"):
        F.embedding(torch.zeros(1, dtype=torch.int64, device=other), torch.ones(2, 2, device=CUDA))
    assert (x + torch.tensor(1.0)).tolist() == [2, 2]  # numbers may come from the host
    assert x[torch.tensor([0])].tolist() == [1]  # and indices
    assert y.to(CUDA).device == CUDA


def test_streams_and_events() -> None:
    stream = torch.cuda.Stream()
    assert stream != torch.cuda.current_stream() == torch.cuda.default_stream()
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        first.record()
        torch.cuda._sleep(4_000_000)
        x = torch.ones(1, device=CUDA)
    second.record(stream)
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(torch.cuda.current_stream())
    second.synchronize()
    assert second.query()
    assert first.elapsed_time(second) >= 2.0
    assert isinstance(stream, torch.Stream)
    assert not torch.cuda.is_current_stream_capturing()


def test_pinned_memory() -> None:
    x = torch.arange(6.0)
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert pinned[2:].is_pinned()
    assert not x.is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.equal(pinned.to(CUDA, non_blocking=True).cpu(), x)
    assert torch.ones(2, device=CUDA).to("cpu", non_blocking=True).is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(1, device=CUDA).pin_memory()
    address = pinned.data_ptr()
    del pinned
    assert not torch.frombuffer(bytearray(8), dtype=torch.uint8).is_pinned()
    assert address


def test_a_forked_process_has_no_gpu() -> None:
    torch.cuda.init()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            torch.cuda.current_device()
            os.write(write, b"fine")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as answer:
        assert b"Cannot re-initialize CUDA in forked subprocess" in answer.read()


# Random numbers


def test_each_device_has_a_generator_of_its_own() -> None:
    torch.manual_seed(3)
    host = torch.rand(3)
    torch.manual_seed(3)
    first, other = torch.rand(3, device=CUDA), torch.rand(3, device="cuda:1")
    assert torch.equal(first.cpu(), other.cpu())  # the same seed
    assert not torch.equal(torch.rand(3, device=CUDA), first)
    assert torch.equal(torch.rand(3), host)  # the host's was not used


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(5, device=CUDA),
        lambda: torch.randint(100, (5,), device=CUDA),
        lambda: torch.randperm(20, device=CUDA),
        lambda: F.dropout(torch.ones(50, device=CUDA)),
        lambda: torch.native_dropout(torch.ones(50, device=CUDA), 0.5, True)[0],  # takes no generator
        lambda: torch.empty(5, device=CUDA).normal_(),
        lambda: torch.multinomial(torch.ones(30, device=CUDA), 5),
    ],
)
def test_states_can_be_kept(draw: Callable[[], Tensor]) -> None:
    host = torch.get_rng_state()
    state = torch.cuda.get_rng_state()
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(draw(), first)
    assert torch.equal(torch.get_rng_state(), host)
    assert state.shape == (16,)


def test_generators_that_are_given() -> None:
    generators = [torch.Generator(CUDA).manual_seed(5) for _ in range(2)]
    first, second = (torch.rand(4, device=CUDA, generator=g) for g in generators)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(4, device=CUDA, generator=torch.Generator())
    with torch.random.fork_rng(devices=[0]):
        torch.rand(4, device=CUDA)
