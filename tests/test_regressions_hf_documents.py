"""What was once wrong without a word in Hugging Face models: packed documents, RoPE by length, and the check itself."""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from terapipe import hf
from terapipe.cli import main
from terapipe.cli.verify_types import config_of
from terapipe.hf import Decoder, UnsupportedModelError, rope
from terapipe.hf import stage as decoder_stage
from terapipe.hf.structure import find_structure
from terapipe.hf.verify import small_model as shrink
from terapipe.hf.verify.reference import Batch, SlicedModel, errors, reference, uneven_lengths
from terapipe.hf.verify.small_model import default_config, shrink_config, small_config, small_model
from terapipe.hf.verify.verification import BOUND, ModelVerifier
from terapipe.modeling.slice_cache import SliceCache, current_cache
from terapipe.planning.slices import Plan
from terapipe.runtime.pipeline import Pipeline

Starts = tuple[tuple[int, ...], ...]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


def batch(tokens: int = 29, rows: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids, labels = (torch.randint(90, (rows, tokens), generator=generator) for _ in range(2))
    return ids, labels


def plan(decoder: Decoder, cuts: tuple[tuple[int, ...], ...] = ((9, 1, 12, 7),), rows: int = 2) -> Plan:
    """Both stages in this process."""
    return Plan((rows // len(cuts),) * len(cuts), cuts, (0, 1, decoder.num_layers), "terapipe", 2)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plainly(model: PreTrainedModel, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
    whole = copy.deepcopy(model)
    logits = whole(input_ids=ids, position_ids=positions, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return gradients(whole)


def alone(model: PreTrainedModel, ids: Tensor, labels: Tensor, documents: Starts) -> dict[str, Tensor]:
    """Each document by itself through the plain model."""
    whole, total = copy.deepcopy(model), torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(documents):
        for a, b in pairwise([*row, ids.shape[1]]):
            logits = whole(input_ids=ids[i : i + 1, a:b], use_cache=False).logits
            total = total + F.cross_entropy(logits.flatten(0, 1), labels[i, a:b], reduction="sum")
    (total / labels.numel()).backward()
    return gradients(whole)


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    largest = max(g.abs().max().item() for g in wanted.values())
    return max((found[name] - g).abs().max().item() for name, g in wanted.items()) / largest


# Windows and chunks


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "llama4_text"])
def test_windows_and_chunks_begin_anew_with_documents(name: str) -> None:
    """Documents that began exactly where a slice does passed for one, and their windows reached into the one before."""
    config = small_config(name)
    config.attn_temperature_tuning = False  # of Llama 4: by places in the row, so refused with documents
    model, (ids, labels) = small_model(config), batch()
    decoder = Decoder(copy.deepcopy(model))
    for documents in (((0, 9), (0, 9)), ((0, 9, 22), (0, 10)), ((0, 3, 4, 20), (0,))):
        pipe = Pipeline(decoder, plan(decoder))
        pipe.zero_grad()
        pipe.step(ids, labels, documents)
        assert worst(gradients(pipe), alone(model, ids, labels, documents)) < 1e-6  # gemma2 has float32 in it


def test_older_keys_are_not_touched_within_a_document() -> None:
    """A slice's block begins where the window of its first token does, or the document."""
    cache = decoder_stage.SliceCache(40)
    cache.set_documents(((0, 12),))
    cache.begin(25, 5)
    keys = [block.keys for block in cache.visibility(window=4).blocks()]
    assert min(block.start for block in keys) == 22
    assert max(block.stop for block in keys) == 30
    cache.begin(13, 5)
    assert min(block.keys.start for block in cache.visibility(window=4).blocks()) == 12


# Positions


def test_a_model_that_swallows_positions_refuses_documents_alone() -> None:
    """Bart takes ``position_ids`` and does nothing with them: packed documents were off by one to three."""
    model, (ids, labels) = small_model(small_config("bart")), batch()
    decoder = Decoder(copy.deepcopy(model))
    pipe = Pipeline(decoder, plan(decoder))
    pipe.step(ids, labels)
    before = {name: g.clone() for name, g in gradients(pipe).items()}
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(
            UnsupportedModelError, match="packed documents are not exact in BartForCausalLM: gradients differ by"
        ):
            call(ids, labels, ((0, 5), (0,)))
    assert all(torch.equal(g, before[name]) for name, g in gradients(pipe).items())
    pipe.zero_grad()
    pipe.step(ids, labels, ((0,), (0,)))  # one document each is none
    assert worst(gradients(pipe), plainly(model, ids, labels)) < 1e-12
    chosen = Decoder(small_model(small_config("bart")), backend="attention")  # nothing is checked yet
    with pytest.raises(UnsupportedModelError, match="packed documents are not exact"):
        chosen.check_step(documents=True, training=True, padded=False)


# Rotary embeddings that depend on the length


def by_length(kind: str) -> PretrainedConfig:
    """Frequencies change beyond 16 tokens."""
    config = small_config("llama")
    config.rope_parameters = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config.max_position_embeddings = 16
    if kind == "longrope":
        half = config.head_dim // 2
        config.rope_parameters |= {"short_factor": [1.0] * half, "long_factor": [3.0] * half}
    return config


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_by_length_follows_transformers_packing(kind: str) -> None:
    """The length is that of the longest document of the whole batch, not of the row, nor of a microbatch."""
    model, (ids, labels) = small_model(by_length(kind)), batch()
    decoder = Decoder(copy.deepcopy(model))
    for documents in (((0, 12, 20), (0, 7, 14, 21)), ((0, 15), (0, 4)), ((0, 9), (0, 10, 20))):
        rows = [torch.cat([torch.arange(b - a) for a, b in pairwise([*row, 29])]) for row in documents]
        pipe = Pipeline(decoder, plan(decoder, ((9, 1, 12, 7), (20, 9))))
        pipe.zero_grad()
        pipe.step(ids, labels, documents)
        assert worst(gradients(pipe), plainly(model, ids, labels, torch.stack(rows))) < 1e-12


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_by_length_forgets_the_lengths_before(kind: str) -> None:
    """After a longer batch, an evaluation or generated text, stages rotated by different frequencies."""
    model = small_model(by_length(kind))
    mine = copy.deepcopy(model)
    decoder = Decoder(mine)
    pipe = Pipeline(decoder, plan(decoder), vary="replan")
    for tokens in (29, 40, 20, 12, 29):
        ids, labels = batch(tokens)
        pipe.zero_grad()
        pipe.step(ids, labels)
        assert worst(gradients(pipe), plainly(model, ids, labels)) < 1e-12
        pipe.evaluate(*batch(60 - tokens))
        with torch.no_grad():
            wanted = copy.deepcopy(model)(input_ids=ids[:, :18]).logits[:, -1]
        assert (pipe.next_token_logits(ids[:, :18]) - wanted).abs().max() < 1e-12
    rope = mine.model.rotary_emb
    assert rope.max_seq_len_cached == 16  # the caller's own model is as it was
    assert torch.equal(rope.inv_freq, model.model.rotary_emb.inv_freq)


def test_rope_by_length_refuses_filled_batches() -> None:
    """Ranks in the middle do not know how long a batch was before it was filled."""
    decoder = Decoder(small_model(by_length("dynamic")))
    pipe = Pipeline(decoder, plan(decoder), vary="pad")
    with pytest.raises(
        UnsupportedModelError, match="depend on the length, which vary='pad' changes; take vary='replan'"
    ):
        pipe.step(*batch(20))


# Randomness and losses of whole batches


def test_dropout_after_attention_is_none_in_attention() -> None:
    """GPT-NeoX has a module ``post_attention_dropout``."""
    config = small_config("gpt_neox")
    config.hidden_dropout = 0.1
    Decoder(small_model(config), backend="attention").check_step(documents=False, training=True, padded=False)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_dropout_in_attention_is_refused_before_a_step(name: str) -> None:
    """One backend drew it anew for each slice, the other refused it in the midst of a step. Evaluation is
    allowed."""
    config = small_config(name)
    config.attention_dropout = 0.5
    decoder = Decoder(small_model(config))
    pipe = Pipeline(decoder, plan(decoder))
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(UnsupportedModelError, match=r"attention is not supported, got 0\.5 \(attention_dropout\)"):
            call(*batch())
    assert not gradients(pipe)
    assert pipe.eval().step(*batch()).isfinite()


# The check


def test_a_type_that_knows_no_float64_is_checked_in_float32() -> None:
    """XGLM was refused because float64 fails inside it."""
    result = ModelVerifier("xglm", small_config("xglm")).verify()
    assert (result.exact, result.dtype) == (True, "float32")
    assert Decoder(small_model(small_config("xglm"), torch.float32)).backend == result.backend


def test_the_table_and_the_decoder_agree() -> None:
    """Emu3's text model has a configuration that transformers' automatic classes do not know; of GOT-OCR2 the table had
    the text part alone."""
    text = (Path(hf.__file__).parent / "models.json").read_text("utf-8")
    rows = {row["model"]: row for row in json.loads(text)["models"]}
    assert Decoder.from_config(default_config("emu3")).backend == rows["emu3"]["backend"]
    assert not rows["got_ocr2"]["exact"]
    with pytest.raises(UnsupportedModelError):
        Decoder.from_config(default_config("got_ocr2"))


def test_a_folder_is_verified_by_a_small_copy(tmp_path: Path) -> None:
    """Of a folder, the whole model was built."""
    LlamaConfig().save_pretrained(tmp_path)
    assert config_of(str(tmp_path)).hidden_size == shrink.HIDDEN


def test_all_types_are_counted_and_confirmed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``verify --all`` never ran documents."""
    monkeypatch.setattr("terapipe.cli.verify_types.causal_lm_types", lambda: ["bart", "bloom", "mistral", "rwkv"])
    assert main(["verify", "--all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["whole"] == {"exact": 3, "refused": 1, "wrong": 0}
    assert found["documents"] == {"exact": 1, "refused": 3, "wrong": 0}
    assert found["dropout"] == {"exact": 2, "refused": 2, "wrong": 0}


class Moody(LlamaForCausalLM):
    """In evaluation mode it depends on how long a slice is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].register_forward_hook(self.scaled)

    @staticmethod
    def scaled(layer: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        return output if layer.training else output * (1 + 0.1 * output.shape[1])


def forgetful(plain: Any) -> Any:
    """Windows that reach into the document before."""

    def visibility(cache: SliceCache, window: int | None = None, chunk: int | None = None) -> Any:
        seen = plain(cache, window, chunk)
        segments = tuple(s if window is None else s._replace(start=0) for s in seen.segments)
        return replace(seen, segments=segments, memo={})

    return visibility


def test_the_check_finds_what_it_says_it_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fault each: in evaluation mode, with documents, after another length."""
    config = small_config("llama")
    config.num_hidden_layers = 2
    result = ModelVerifier("moody", config, kind=Moody).verify()
    assert re.search("gradients differ by .* in evaluation mode", result.reason)
    with monkeypatch.context() as broken:
        broken.setattr(rope, "_reset", lambda module: {})
        assert re.search(
            "gradients differ by .* with 23 tokens", ModelVerifier("llama", by_length("dynamic")).verify().reason
        )
    with monkeypatch.context() as broken:
        broken.setattr(SliceCache, "visibility", forgetful(SliceCache.visibility))
        result = ModelVerifier("mistral", small_config("mistral")).verify()
        assert (result.exact, result.documents_exact) == (True, False)
        assert result.documents > 0.01


def test_errors_are_relative_to_the_largest_gradient_of_all() -> None:
    """A gradient that is zero but for rounding is no fault; one that is missing, or not a number, is."""
    wanted = 1.0, {"a.0.x": torch.ones(3), "b": torch.zeros(2)}
    found = 1.0, {"a.0.x": torch.ones(3), "b": torch.full((2,), 1e-17)}
    assert max(errors(wanted, found).values()) < BOUND
    for broken in ({"b": torch.zeros(2)}, {"a.0.x": torch.full((3,), torch.nan), "b": torch.zeros(2)}):
        assert errors(wanted, (1.0, broken))["a.*.x"] == float("inf")
    assert errors(wanted, (float("nan"), found[1]))["loss"] == float("inf")
    assert errors(wanted, (1.0, {**found[1], "c": torch.ones(1)}))["c"] == float("inf")


def flat(values: dict[str, Any]) -> dict[str, Any]:
    values = {str(k): v for k, v in values.items()}
    parts = {k: flat(v) for k, v in values.items() if isinstance(v, dict)}
    return {k: v for k, v in values.items() if k not in parts} | {
        k: v for part in parts.values() for k, v in part.items()
    }


# What the docstring of small_model.py says beside the tables of names there: dtype, sizes, RoPE, scales, token ids,
# random numbers, auxiliary losses, quantized weights, and kernels.
SAID = (
    "dtype|layer|pattern|block|vocab_size|^(head_dim|hidden_size)$|original_max_position_embeddings|"
    "^(query_pre_attn_scalar|.*_multiplier)$|_token_id$|_index$|drop|jitter|aux_loss|z_loss|loss_weight|"
    "quantization_config|attn_implementation|experts_implementation"
)


@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v3", "gpt2", "jamba", "phimoe", "mpt", "opt", "qwen3_next"])
def test_all_that_a_small_copy_has_otherwise_is_listed(name: str) -> None:
    """Dropout was set to zero without a word."""
    config = default_config(name)
    before, after = flat(config.to_dict()), flat(shrink_config(config).to_dict())
    layers = [*shrink.DEPTHS, *shrink.LISTED, *shrink.FIRST, *shrink.LAST]
    sizes = {*config.attribute_map, *config.attribute_map.values(), *layers}
    for key in before:
        known = key in shrink.RULES or key in shrink.LIST_RULES or key in sizes
        known = known or re.search(SAID, key) is not None
        assert before[key] == after.get(key) or known, key


# Mixtures of experts in bfloat16


class Routing(TorchFunctionMode):
    """Notes which experts tokens are sent to; or sends those of slices there."""

    def __init__(self, model: PreTrainedModel, layers: str, known: dict[tuple[int, int], Tensor] | None = None) -> None:
        super().__init__()
        self.found, self.known, self.flipped = dict[tuple[int, int], Tensor](), known, 0
        self.place = (0, 0)  # the layer, and how many choices it made
        for i, layer in enumerate(model.get_submodule(layers)):  # type: ignore[arg-type]
            layer.register_forward_pre_hook(lambda *_, i=i: setattr(self, "place", (i, 0)))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return out
        place, self.place = self.place, (self.place[0], self.place[1] + 1)
        if self.known is None:
            self.found[place] = out[1].reshape(2, -1, *out[1].shape[1:])
            return out
        cache = current_cache()
        assert cache is not None
        chosen = self.known[place][:, cache.context : cache.end].reshape(out[1].shape)
        self.flipped += int((chosen.sort(-1)[0] != out[1].sort(-1)[0]).any(-1).sum())
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_mixtures_of_experts_differ_in_bfloat16_by_their_routing(name: str) -> None:
    """Rounding sends a token to another expert now and then: gradients were off by up to 1.2. With the experts of the
    plain model they are off by rounding alone; a Llama's are off by 0.03."""
    model = small_model(small_config(name), torch.bfloat16, seed=1)
    structure, mine, given = find_structure(copy.deepcopy(model)), copy.deepcopy(model), Batch.of(model, seed=1)
    with Routing(model, "model.layers") as plain:
        wanted = reference(model, given)
    forced = Routing(mine, "model.layers", plain.found)
    sliced = SlicedModel(mine, structure, "attention")
    free = max(errors(wanted, sliced(given, uneven_lengths(4, 1))).values())
    with forced:
        found = max(errors(wanted, sliced(given, uneven_lengths(4, 1))).values())
    assert found < 0.12
    assert free < 0.12 or forced.flipped
