"""Hugging Face models of which each stage makes only its part real: drawn at random, or read from a folder."""

import inspect
import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from terapipe import Pipeline, Plan
from terapipe.hf.backends import UnsupportedModelError
from terapipe.hf.decoder import Decoder, decoder_from
from terapipe.hf.stage import DecoderStage
from terapipe.hf.verify.small_model import config_of, small_model
from terapipe.hf.weights import meta_model
from tests.support.hf_models import small_config

# fast=True throughout: which way of cutting a model is exact is not the question here, and takes a while to find out.
CPU = torch.device("cpu")
DRAWN = ["llama", "gpt2", "gemma2", "qwen3_moe", "gpt_neox", "deepseek_v3"]
SAVED = ["llama", "gemma", "gpt2", "mixtral", "gpt_neox", "deepseek_v3"]


def stages(decoder: Decoder, count: int) -> list[DecoderStage]:
    edges = [decoder.num_layers * k // count for k in range(count + 1)]
    return [decoder.stage(a, b, CPU) for a, b in pairwise(edges)]


def named(model: torch.nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def check_equal(line: list[DecoderStage], whole: PreTrainedModel) -> None:
    """To the last bit, nothing missing, buffers too."""
    wanted, buffers = named(whole), dict(whole.named_buffers())
    found = [(name, p) for stage in line for name, p in named(stage.model).items()]
    assert {name for name, _ in found} == set(wanted)
    for name, p in found:
        assert p.dtype == wanted[name].dtype
        assert torch.equal(p, wanted[name]), name
    held = {name: b for stage in line for name, b in stage.model.named_buffers() if name in buffers}
    assert set(held) == set(buffers)
    for name, b in held.items():
        assert torch.equal(b, buffers[name]), name


@pytest.mark.parametrize("kind", DRAWN)
def test_a_seed_gives_the_same_weights_however_the_model_is_split(kind: str) -> None:
    config, state = small_config(kind), torch.random.get_rng_state()
    decoder = Decoder.from_config(config, seed=3, backend="attention")
    whole = decoder.stage(0, decoder.num_layers, CPU).model
    for count in (2, 3):
        check_equal(stages(decoder, count), whole)
    check_equal(stages(Decoder.from_config(config, seed=3, backend="attention"), 1), whole)
    other = named(Decoder.from_config(config, seed=4, backend="attention").stage(0, decoder.num_layers, CPU).model)
    for name, p in named(whole).items():
        if p.std() > 0:
            assert not torch.equal(p, other[name]), f"{name} is the same for all seeds"
            clone = named(whole)[name.replace(".2.", ".3.")]
            assert clone is p or not torch.equal(p, clone), f"{name} is the same in all layers"
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("kind", DRAWN)
def test_weights_are_drawn_as_transformers_does(kind: str) -> None:
    config = small_config(kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(config)
    line = stages(Decoder.from_config(config, backend="attention"), 3)
    drawn = {name: p for stage in line for name, p in named(stage.model).items()}
    for name, p in plain.named_parameters():
        if p.std() == 0:
            assert torch.equal(p, drawn[name]), name
        elif p.numel() > 1000:
            assert drawn[name].std().item() == pytest.approx(p.std().item(), rel=0.2), name
        assert torch.equal(drawn[name] == 0, p == 0), name  # such as the row of a token that fills up
    buffers = {name: b for stage in line for name, b in stage.model.named_buffers()}
    for name, b in plain.named_buffers():
        assert torch.equal(buffers[name], b), name


def test_first_and_last_stage_have_the_same_copy_of_a_tied_weight() -> None:
    first, _, last = stages(Decoder.from_config(small_config("gpt2"), seed=1, backend="attention"), 3)
    embedding, head = first.model.transformer.wte.weight, last.model.lm_head.weight
    assert torch.equal(embedding, head)
    assert embedding.std() > 0
    assert "transformer.wte.weight" not in dict(last.named_parameters())


def test_a_stage_takes_the_memory_of_its_own_part() -> None:
    decoder = Decoder.from_config(small_config("gemma2"), dtype=torch.bfloat16, backend="attention")
    sizes = {name: p.nbytes for name, p in decoder.model.named_parameters()}
    assert all(p.dtype == torch.bfloat16 for p in decoder.model.parameters())
    for k, stage in enumerate(stages(decoder, decoder.num_layers)):
        own = {name for name in sizes if name.startswith(f"model.layers.{k}.")}
        own |= {"model.embed_tokens.weight"} if stage.is_first or stage.is_last else set()  # the head is tied
        own |= {"model.norm.weight"} if stage.is_last else set()
        tensors = [*stage.model.parameters(), *stage.model.buffers()]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert not any(t.is_meta for t in tensors)
        assert 0 <= sum(held.values()) - sum(sizes[name] for name in own) < 300  # buffers and zeros


def test_weights_of_zero_take_no_memory_on_another_device_either() -> None:
    decoder = Decoder.from_config(small_config("llama"), backend="attention")
    whole = dict(decoder.model.named_buffers())
    zeros = [b for name, b in decoder.stage(1, 2, torch.device("meta")).model.named_buffers() if name not in whole]
    assert len(zeros) == 3  # embedding, norm and head
    assert all(b.untyped_storage().nbytes() == b.element_size() for b in zeros)


def test_a_model_that_does_not_initialize_all_of_itself_is_refused() -> None:
    decoder = Decoder.from_config(small_config("apertus"), backend="attention")
    with pytest.raises(
        UnsupportedModelError, match=r"does not initialize model\.layers\.0\.mlp\.act_fn\.alpha_p.* and \d+ more"
    ):
        decoder.stage(0, decoder.num_layers, CPU)


def test_a_real_model_shares_its_modules_and_one_on_meta_is_drawn() -> None:
    config = small_config("llama")
    model = small_model(config)
    line = stages(Decoder(model, backend="attention"), 2)
    assert all(p is named(model)[name] for stage in line for name, p in named(stage.model).items())
    check_equal(
        stages(Decoder(meta_model(config), backend="attention"), 2),
        stages(Decoder.from_config(config, backend="attention"), 1)[0].model,
    )


# From files

PretrainedWeights = Callable[[str], tuple[PreTrainedModel, Path]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> PretrainedWeights:
    """``saved(kind)``: a small model and the folder it is saved in."""
    made: dict[str, tuple[PreTrainedModel, Path]] = {}

    def of_kind(kind: str) -> tuple[PreTrainedModel, Path]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            model = small_model(small_config(kind), torch.float32)
            model.save_pretrained(folder)
            made[kind] = model, folder
        return made[kind]

    return of_kind


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", SAVED)
def test_stages_read_their_parts_of_a_folder(saved: PretrainedWeights, kind: str, count: int) -> None:
    model, folder = saved(kind)
    state = torch.random.get_rng_state()
    line = stages(Decoder.from_pretrained(folder, backend="attention"), count)
    check_equal(line, model)
    assert all(type(stage.model) is type(model) for stage in line)
    assert not any(t.is_meta for stage in line for t in (*stage.parameters(), *stage.buffers()))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_weights_come_in_the_saved_precision_or_the_one_asked_for(saved: PretrainedWeights, tmp_path: Path) -> None:
    model, folder = saved("llama")
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    check_equal(stages(Decoder.from_pretrained(folder, torch.bfloat16, backend="attention"), 2), half)
    check_equal(stages(Decoder.from_pretrained(tmp_path, backend="attention"), 2), half)
    for stage in stages(Decoder.from_pretrained(tmp_path, backend="attention"), 3):
        zeros = {b.dtype for name, b in stage.model.named_buffers() if name not in dict(model.named_buffers())}
        assert zeros <= {torch.bfloat16}


def changed(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a folder with other weights."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


def test_a_stage_asks_for_its_own_weights_only_and_names_those_that_lack(
    saved: PretrainedWeights, tmp_path: Path
) -> None:
    _, folder = saved("mixtral")

    def forget(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.startswith("model.layers.1.") and "experts" not in name]:
            del weights[name]
        del weights["model.embed_tokens.weight"]

    decoder = Decoder.from_pretrained(changed(folder, tmp_path, forget), backend="attention")
    decoder.stage(2, 4, CPU)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.input_layernorm\.weight, .*o_proj\.weight.*; save"):
        decoder.stage(1, 4, CPU)
    with pytest.raises(ValueError, match=r"lacks model\.embed_tokens\.weight; save the model again"):
        decoder.stage(0, 1, CPU)


def test_a_tied_weight_may_be_saved_under_either_name_but_must_be_one(saved: PretrainedWeights, tmp_path: Path) -> None:
    model, folder = saved("gemma")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    assert head not in load_file(folder / "model.safetensors")
    other = changed(folder, tmp_path / "other", lambda w: w.update({head: w.pop(embedding)}))
    check_equal(stages(Decoder.from_pretrained(other, backend="attention"), 3), model)
    both = changed(folder, tmp_path / "both", lambda w: w.update({head: w[embedding] + 1}))
    decoder = Decoder.from_pretrained(both, backend="attention")
    decoder.stage(1, 2, CPU)
    for first, last in ((0, 2), (2, 4)):
        with pytest.raises(ValueError, match=f"one weight for {embedding} and {head}, but the saved ones differ"):
            decoder.stage(first, last, CPU)


@pytest.mark.parametrize("kind", ["gemma", "mixtral"])
def test_a_pipeline_from_a_folder_trains_like_one_of_the_whole_model(saved: PretrainedWeights, kind: str) -> None:
    model, folder = saved(kind)
    plan = Plan((1, 1), ((9, 1, 12, 7), (20, 9)), (0, 1, 2, 4), "terapipe", 3)
    ids = torch.randint(90, (2, 29), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for decoder in (Decoder(model, backend="attention"), Decoder.from_pretrained(folder, backend="attention")):
        pipe = Pipeline(decoder, plan)
        losses.append(pipe.step(ids, ids.roll(-1, 1)))
        gradients.append({name: p.grad for name, p in pipe.named_parameters()})
    assert torch.equal(*losses)
    for name, wanted in gradients[0].items():
        assert wanted is not None  # sums are in another order where a weight is tied, or experts computed otherwise
        torch.testing.assert_close(gradients[1][name], wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


def test_training_leaves_the_files_alone(saved: PretrainedWeights) -> None:
    _, folder = saved("gpt_neox")
    before = (folder / "model.safetensors").read_bytes()
    with torch.no_grad():
        for p in Decoder.from_pretrained(folder, backend="attention").stage(0, 2, CPU).parameters():
            p.add_(1.0)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["", "meta-llama/Llama-3.1-8B"])
def test_what_is_no_saved_model_is_refused(name: str, tmp_path: Path) -> None:
    """An empty folder, or a model id of the Hub: the message says how to fetch it."""
    with pytest.raises(
        ValueError, match=r"a folder with a config\.json, got .*; nothing is downloaded.* `hf download "
    ):
        Decoder.from_pretrained(name or tmp_path, backend="attention")


def test_a_decoder_takes_public_things_only() -> None:
    """Names, numbers, and transformers' and peft's own configurations: no types that terapipe.hf does not export."""
    for make, names in (
        (Decoder, ["model", "backend", "router_loss_over", "router_z_loss"]),
        (Decoder.from_config, ["config", "seed", "dtype", "backend", "options"]),
        (
            Decoder.from_pretrained,
            ["folder", "dtype", "backend", "quantization_config", "adapter", "seed", "options"],
        ),
    ):
        assert list(inspect.signature(make).parameters) == names


STRANGE_CODE = """
from pathlib import Path
from transformers import {base}
Path(__file__).with_name("ran").touch()
class Strange({base}):
    model_type = "strange"
"""


@pytest.mark.parametrize("read", [Decoder.from_pretrained, config_of, decoder_from])
def test_code_in_a_folder_is_not_run(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anybody asked: transformers would take a ``y`` that is piped to the command for consent."""
    config = {"model_type": "strange", "auto_map": {"AutoConfig": "code.Strange", "AutoModelForCausalLM": "code.Other"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(STRANGE_CODE.format(base="PretrainedConfig"))
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    with pytest.raises(ValueError, match=r"brings Python code of its own .* does not run"):
        read(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_configuration_in_memory_runs_no_code_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Strange(PretrainedConfig):
        model_type = "strange"

    config = Strange(auto_map={"AutoModelForCausalLM": "code.Other"}, name_or_path=str(tmp_path))
    (tmp_path / "code.py").write_text(STRANGE_CODE.format(base="PreTrainedModel"))
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    with pytest.raises(ValueError, match="trust_remote_code"):
        Decoder.from_config(config)
    assert not (tmp_path / "ran").exists()


def test_an_index_of_weights_names_files_of_its_folder_only(saved: PretrainedWeights, tmp_path: Path) -> None:
    _, folder = saved("llama")
    (tmp_path / "model").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "model")
    shutil.copy(folder / "model.safetensors", tmp_path / "other.safetensors")
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "../other.safetensors")
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(ValueError, match=r"must lie in it, its index names '\.\./other\.safetensors'"):
        Decoder.from_pretrained(tmp_path / "model")
