"""Checkpoints of adapters and other models with frozen weights: what they leave out, and what they never do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from terapipe import Layout, Pipeline, Plan
from terapipe.hf.decoder import Decoder
from terapipe.hf.verify.small_model import small_model
from terapipe.modeling.quantized import parts_of, scales_of
from terapipe.runtime.checkpoint.manifest import damage
from terapipe.runtime.checkpoint.reader import FROZEN, Reader
from tests.support.hf_models import quantized, save_base, small_config
from tests.support.models import mesh_of, whole
from tests.support.ranks import Ranks

BOUNDARIES = {1: (0, 4), 2: (0, 3, 4)}
ALONE = Layout(1, 1, 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    small_model(small_config("llama"), torch.float32).save_pretrained(folder)
    return folder


def adapted(base: Path, **options: Any) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)


def pipeline(model: Any, layout: Layout = ALONE, *, shard: bool = False) -> tuple[Pipeline, torch.optim.Optimizer]:
    plan = Plan((1,), ((9, 13),), BOUNDARIES[layout.pp], "terapipe")
    decoder = model if isinstance(model, Decoder) else Decoder(model, backend="attention")
    mesh = mesh_of(layout) if layout.devices > 1 else None
    pipe = Pipeline(decoder, plan, mesh=mesh, shard=shard, timeout=300.0)
    if isinstance(model, Decoder):  # without adapters: the norms are trained
        for name, p in pipe.named_parameters():
            p.requires_grad_("norm" in name)
    return pipe, torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=0.01)


def step(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> float:
    ids = torch.randint(90, (1, 22), generator=torch.Generator().manual_seed(0))
    loss = pipe.step(ids, ids.roll(-1, 1)).item()
    optimizer.step()
    pipe.zero_grad()
    return loss


def state(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: whole(p.detach()).clone() for name, p in pipe.named_parameters()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    pairs = ((a, b) for name, x in found.items() for a, b in zip(parts_of(x), parts_of(wanted[name]), strict=True))
    return all(torch.equal(a, b) for a, b in pairs)


def saved_names(folder: Path) -> set[str]:
    return {name.removeprefix("model.") for name in Reader(folder).index.state_dict_metadata if name[:6] == "model."}


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_a_checkpoint_of_an_adapter_holds_the_adapter(base: Path, tmp_path: Path) -> None:
    pipe, optimizer = pipeline(adapted(base))
    step(pipe, optimizer)
    pipe.save(tmp_path / "small", optimizer)
    pipe.save(tmp_path / "whole", optimizer, frozen=True)
    trained = {name for name, p in pipe.named_parameters() if p.requires_grad}
    assert saved_names(tmp_path / "small") == trained
    assert saved_names(tmp_path / "whole") == {name for name, _ in pipe.named_parameters()}
    assert not (tmp_path / "whole" / FROZEN).exists()
    told = json.loads((tmp_path / "small" / FROZEN).read_text())
    assert told["source"] == str(base)
    assert set(told["weights"]) == {name for name, p in pipe.named_parameters() if not p.requires_grad}
    wanted, loss = state(pipe), step(pipe, optimizer)
    for folder in ("small", "whole"):
        pipe, optimizer = pipeline(adapted(base))
        pipe.load(tmp_path / folder, optimizer)
        assert same(state(pipe), wanted)
        assert step(pipe, optimizer) == loss
        step(pipe, optimizer)
    (tmp_path / "small" / FROZEN).write_text("{}")
    assert damage(tmp_path / "small")


def test_in_the_background_too(base: Path, tmp_path: Path) -> None:
    pipe, optimizer = pipeline(adapted(base))
    wanted = state(pipe)
    saving = pipe.save_in_background(tmp_path / "x", optimizer)
    step(pipe, optimizer)
    saving.result()
    assert saved_names(tmp_path / "x") == {name for name, p in pipe.named_parameters() if p.requires_grad}
    pipe.load(tmp_path / "x")
    assert same(state(pipe), wanted)


def test_frozen_weights_that_no_file_has_are_saved(base: Path, tmp_path: Path) -> None:
    """A base with random weights, even if its configuration came from a folder; one whose files are gone; and weights
    that were changed after they were loaded, by peft behind autograd's back, too."""
    model = adapted(base)
    inner = model.get_base_model()
    inner.model.norm.weight.data.mul_(2)
    pipe, optimizer = pipeline(model)
    pipe.save(tmp_path / "changed", optimizer)
    assert "model.norm.weight" in saved_names(tmp_path / "changed")
    assert "model.embed_tokens.weight" not in saved_names(tmp_path / "changed")
    dict(pipe.named_parameters())["model.embed_tokens.weight"].data[5, 3] += 1  # after the first save
    pipe.save(tmp_path / "changed", optimizer)
    assert "model.embed_tokens.weight" in saved_names(tmp_path / "changed")
    wanted = state(pipe)
    fresh, _ = pipeline(adapted(base))
    fresh.load(tmp_path / "changed")
    assert same(state(fresh), wanted)

    torch.manual_seed(7)
    random = AutoModelForCausalLM.from_config(inner.config)  # which has the name of the folder
    pipe, _ = pipeline(get_peft_model(random, LoraConfig(r=2, target_modules=["q_proj"])))
    pipe.save(tmp_path / "random")
    assert saved_names(tmp_path / "random") == {name for name, _ in pipe.named_parameters()}

    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    pipe, _ = pipeline(adapted(moved))
    shutil.rmtree(moved)
    pipe.save(tmp_path / "gone")
    assert saved_names(tmp_path / "gone") == {name for name, _ in pipe.named_parameters()}


def test_another_base_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    pipe, optimizer = pipeline(adapted(base))
    step(pipe, optimizer)
    pipe.save(tmp_path / "x", optimizer)
    other = adapted(base)
    other.get_base_model().model.layers[2].mlp.up_proj.weight.data[1, 1] += 1e-3
    pipe, optimizer = pipeline(other)
    before = state(pipe)
    with pytest.raises(ValueError, match=r"frozen weights of .*, got another model\.layers\.2\.mlp\.up_proj\.weight; "):
        pipe.load(tmp_path / "x", optimizer)
    assert same(state(pipe), before)
    model = adapted(base)
    model.get_base_model().lm_head = nn.Linear(*model.get_base_model().lm_head.weight.shape[::-1], bias=False)
    pipe, _ = pipeline(model)
    with pytest.raises(ValueError, match=r"got another lm_head\.weight"):
        pipe.load(tmp_path / "x")


def test_the_source_is_read_once(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, optimizer = pipeline(adapted(base))
    pipe.save(tmp_path / "x", optimizer)
    step(pipe, optimizer)
    for name in ("digest_of", "digests_of"):
        monkeypatch.delattr(f"terapipe.runtime.checkpoint.frozen.{name}")
    pipe.save(tmp_path / "x", optimizer)
    assert (tmp_path / "x" / FROZEN).exists()


# Layouts

LAYOUTS = {
    "pp": (Layout(1, 2, 1), False), "dp": (Layout(2, 1, 1), False), "fsdp": (Layout(2, 1, 1), True),
    "tp": (Layout(1, 1, 2), False),
}  # fmt: skip


def save_in(base: Path, kind: str, folder: Path) -> dict[str, Tensor]:
    layout, shard = LAYOUTS[kind]
    pipe, optimizer = pipeline(Decoder.from_pretrained(base, backend="attention"), layout, shard=shard)
    step(pipe, optimizer)
    pipe.save(folder, optimizer)
    return state(pipe)


def load_in(folder: Path, base: Path, kind: str, saved: Path) -> tuple[dict[str, Tensor], str]:
    layout, shard = LAYOUTS[kind]
    pipe, optimizer = pipeline(Decoder.from_pretrained(base, backend="attention"), layout, shard=shard)
    pipe.load(saved, optimizer)
    found = state(pipe)
    pipe.save(folder, optimizer)
    for name, p in pipe.named_parameters():
        if name == "model.layers.3.mlp.up_proj.weight":  # on the last stage only
            p.data.add_(1)
    try:
        pipe.load(saved)
    except ValueError as error:
        return found, str(error)
    return found, "loaded"


@pytest.mark.parametrize(
    "kind", [k if k in ("pp", "fsdp") else pytest.param(k, marks=pytest.mark.exhaustive) for k in LAYOUTS]
)
def test_any_layout(ranks: Callable[[int], Ranks], base: Path, tmp_path: Path, kind: str) -> None:
    pipe, optimizer = pipeline(Decoder.from_pretrained(base, backend="attention"))
    step(pipe, optimizer)
    pipe.save(tmp_path / "one", optimizer)
    wanted = state(pipe)
    told = json.loads((tmp_path / "one" / FROZEN).read_text())
    for found, error in ranks(2)(load_in, tmp_path / "back", base, kind, tmp_path / "one"):
        assert same(found, wanted)
        assert "got another model.layers.3.mlp.up_proj.weight;" in error
    assert json.loads((tmp_path / "back" / FROZEN).read_text()) == told
    assert saved_names(tmp_path / "back") == saved_names(tmp_path / "one") == {n for n in wanted if "norm" in n}
    shares = ranks(2)(save_in, base, kind, tmp_path / "two")
    pipe, optimizer = pipeline(Decoder.from_pretrained(base, backend="attention"))
    pipe.load(tmp_path / "two", optimizer)
    assert all(same(share, state(pipe)) for share in shares)


@pytest.mark.parametrize("kind", ["nf4-double", "int8", "torchao-float8"])
def test_a_quantized_base(kind: str, tmp_path: Path) -> None:
    """Its whole numbers are left out with their scales, and other scales are another base."""
    folder = save_base(tmp_path / "base")
    pipe, optimizer = pipeline(quantized(folder, kind))
    step(pipe, optimizer)
    pipe.save(tmp_path / "small", optimizer)
    pipe.save(tmp_path / "whole", optimizer, frozen=True)
    assert all("lora_" in name for name in saved_names(tmp_path / "small"))
    weight = "model.layers.0.self_attn.q_proj.base_layer.weight"
    scale = {"nf4-double": "nested_absmax", "int8": "SCB", "torchao-float8": "scale"}[kind]
    numbers = f"{weight}.qdata" if kind.startswith("torchao") else weight
    assert {numbers, f"{weight}.{scale}"} <= saved_names(tmp_path / "whole")
    wanted, loss = state(pipe), step(pipe, optimizer)
    for checkpoint in ("small", "whole"):
        pipe, optimizer = pipeline(quantized(folder, kind))
        pipe.load(tmp_path / checkpoint, optimizer)
        assert same(state(pipe), wanted)
        assert step(pipe, optimizer) == pytest.approx(loss, rel=1e-6)
    scales = scales_of(dict(pipe.named_parameters())[weight])
    scales[scale].mul_(2)
    with pytest.raises(ValueError, match=f"got another {weight}"):
        pipe.load(tmp_path / "small")
    pipe.load(tmp_path / "whole")
    assert step(pipe, optimizer) == pytest.approx(loss, rel=1e-6), "scales were loaded"
