"""What the host does for a slice is bounded, by counts: a fast GPU waits for it. See benchmarks/host_time."""

from typing import Any

import pytest
import torch

from benchmarks.host_time.counting import calls, operations
from benchmarks.host_time.measure import Maker, python_calls, sliced_gpt, sliced_llama
from terapipe import Pipeline, Plan
from terapipe.hf import Decoder
from terapipe.hf.stage import DecoderStage
from terapipe.hf.verify.small_model import default_config, shrink_config, small_model
from terapipe.modeling import attention


def decoder(kind: str, layers: int) -> Decoder:
    return Decoder(small_model(shrink_config(default_config(kind), layers=layers)), backend="attention")


def calls_of_ends(kind: str, layers: int) -> list[tuple[int, int]]:
    """In Python and in C, of a first stage's forward and a last stage's head, each with two of so many layers."""
    model, ids = decoder(kind, layers), torch.arange(4)[None]
    first, last = (model.stage(k, k + 2, torch.device("cpu")) for k in (0, layers - 2))
    cache = first.make_cache(1, 4)
    cache.begin(0, 4)
    hidden = torch.zeros(last.hidden_shape(1, 4), dtype=torch.float64)
    found = []
    for work in (lambda: first(ids, cache), lambda: last.loss(hidden, ids)):
        work()
        found.append(calls(work))
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_layers_of_other_stages_cost_nothing(kind: str) -> None:
    """Each of them cost 14 calls in Python and 17 in C for every slice, on the last stage twice."""
    assert calls_of_ends(kind, 4) == calls_of_ends(kind, 10)


def stage_of(kind: str, first: int, last: int) -> DecoderStage:
    return decoder(kind, 4).stage(first, last, torch.device("cpu"))


def test_stages_have_their_own_layers_under_their_names() -> None:
    stage = stage_of("llama", 1, 3)
    layers: Any = stage.model.model.layers
    assert stage.has_own_layers_only
    assert list(layers._modules) == ["1", "2"]
    assert [layer.self_attn.layer_idx for layer in layers] == [1, 2]
    assert [layers[0], layers[-1]] == stage.blocks
    assert {name.split(".")[2] for name, _ in stage.named_parameters()} == {"1", "2"}
    assert stage.model.model.config.num_hidden_layers == 2
    assert stage.blocks[0].self_attn.config.num_hidden_layers == 4  # type: ignore[union-attr]
    assert stage.model.config.num_hidden_layers == 4


def test_kinds_of_layers_are_those_of_the_stage() -> None:
    """The loop over layers asks the configuration for the kind of each."""
    stage = stage_of("gemma2", 1, 4)
    whole = stage.model.config.layer_types
    assert len(set(whole)) == 2
    assert stage.model.model.config.layer_types == whole[1:4]


def test_a_loop_that_knows_more_of_numbers_keeps_stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that does something in every second layer: in a stage that begins with an odd one it would be
    wrong."""
    from transformers.models.llama import modeling_llama

    from terapipe.hf.structure import find_structure
    from terapipe.hf.verify.reference import Batch, SlicedModel, errors, reference

    plain = modeling_llama.LlamaModel.forward

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        handles = [
            layer.register_forward_pre_hook(lambda _, args, i=i: (args[0] * (1 + i % 2), *args[1:]))
            for i, layer in enumerate(self.layers._modules.values())
        ]
        try:
            return plain(self, *arguments, **named)
        finally:
            for handle in handles:
                handle.remove()

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    model = small_model(shrink_config(default_config("llama")))
    sliced = SlicedModel(model, find_structure(model), "attention", num_stages=4)
    assert [stage.has_own_layers_only for stage in sliced.stages] == [True, False, False, False]
    batch = Batch.of(model)
    assert max(errors(reference(model, batch), sliced(batch, (9, 1, 12, 7))).values()) < 1e-12


@pytest.mark.parametrize(("make", "most"), [(sliced_llama, 350), (sliced_gpt, 270)], ids=["llama", "gpt"])
def test_python_calls_of_a_layer_and_slice(make: Maker, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of 8 layers and 8 slices, forward and backward. They were 610 for a Llama. Where another test has
    compiled layers, attention is wrapped for the rest of the process, which costs three calls."""
    plain = getattr(attention._attend, "_torchdynamo_orig_callable", attention._attend)
    monkeypatch.setattr(attention, "_attend", plain)
    assert python_calls(make) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_operations_as_large_as_the_vocabulary(dtype: torch.dtype, tied: bool) -> None:
    """One for each slice, the product of the head, and one or two that begin a sum. They were 3.75: a table of
    gradients of the embedding, a matrix of those of the head, and the sums of both."""
    config: Any = shrink_config(default_config("llama"))
    config.tie_word_embeddings, slices = tied, 8
    plan = Plan.uniform(batch_size=1, seq_len=32, num_slices=slices, boundaries=(0, 4))
    pipe = Pipeline(Decoder(small_model(config, dtype), backend="attention"), plan)
    ids = torch.arange(32)[None] % 7
    pipe.step(ids, ids.roll(-1, 1))
    pipe.zero_grad()
    names = operations(lambda: pipe.step(ids, ids.roll(-1, 1)), (config.vocab_size, config.hidden_size)).on_matrix
    names.pop("index_add_")  # touches the rows of the slice's tokens alone
    if dtype is torch.bfloat16:  # on a GPU product and sum are one operation
        names.pop("add_")
        names.pop("_to_copy")
    assert names.total() <= slices + 2
