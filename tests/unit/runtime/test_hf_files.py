"""Models saved in Hugging Face's format from any layout, opened by transformers and by a pipeline again."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel

from terapipe import Layout, Pipeline, Plan
from terapipe.hf import save as hugging_face
from terapipe.hf.decoder import Decoder
from terapipe.hf.save import save_pretrained
from terapipe.hf.verify.small_model import small_model
from terapipe.runtime.comm import transport
from terapipe.runtime.comm.environment import local_device
from tests.support.hf_models import small_config
from tests.support.models import TINY, make_model, mesh_of, whole
from tests.support.ranks import Ranks

BOUNDARIES = {1: (0, 4), 2: (0, 3, 4), 3: (0, 1, 2, 4)}
LENGTH = 77  # of what the model generates: something in the configuration to recognise


def decoder(kind: str) -> Decoder:
    made = Decoder.from_config(small_config(kind), seed=5, backend="attention")
    made.model.generation_config.max_length = LENGTH  # type: ignore[union-attr]
    return made


def pipeline(model: Decoder, layout: Layout, *, mesh: DeviceMesh | None = None, **options: Any) -> Pipeline:
    chunks = options.pop("chunks", 1)
    plan = Plan((1,), ((9, 1, 12),), BOUNDARIES[layout.pp * chunks], "terapipe", chunks)
    mesh = mesh_of(layout) if layout.devices > 1 and mesh is None else mesh
    return Pipeline(model, plan, mesh=mesh, timeout=300.0, **options)


def step(pipe: Pipeline) -> float:
    """The loss before it, of each replica's row."""
    ids = torch.randint(90, (2, 22), generator=torch.Generator().manual_seed(0))[pipe.dp_rank :][:1]
    loss = pipe.step(ids, ids.roll(-1, 1)).item()
    torch.optim.SGD(pipe.parameters(), lr=0.5).step()
    pipe.zero_grad()
    return loss


def train_and_save(kind: str, layout: Layout, options: dict[str, Any], folder: str) -> tuple[float, dict[str, Tensor]]:
    """The next loss, and what of the saved model this rank holds."""
    pipe = pipeline(decoder(kind), layout, **options)
    step(pipe)
    chosen = [(n, b) for stage in pipe.stages.values() for n, b in stage.model.named_buffers() if "correction" in n]
    for _, buffer in chosen:
        buffer.add_(torch.arange(len(buffer)) / 64)
    save_pretrained(pipe, folder)
    saved = {name: whole(tensor.detach()).clone() for name, tensor in [*pipe.named_parameters(), *chosen]}
    return step(pipe), saved


def next_loss(layout: Layout, folder: str) -> float:
    return step(pipeline(Decoder.from_pretrained(folder, backend="attention"), layout))


def opened(folder: Path) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert isinstance(model, PreTrainedModel)
    return model


def check_saved(folder: Path, parts: list[dict[str, Tensor]]) -> None:
    model = opened(folder)
    found = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(tensor, found[name]), name
    assert set(dict(model.named_parameters())) <= {name for part in parts for name in part}
    assert model.generation_config.max_length == LENGTH  # type: ignore[union-attr]
    config = (folder / "config.json").read_text()
    assert json.loads(config)["architectures"] == [type(model).__name__]
    assert "terapipe" not in config


@pytest.mark.parametrize(
    ("kind", "layout", "options"),
    [
        ("gemma", Layout(1, 1, 1), {}),
        ("gpt2", Layout(1, 1, 1), {"chunks": 3}),
        ("mixtral", Layout(1, 2, 1), {}),
        ("gemma", Layout(2, 1, 1), {"shard": True}),
        ("deepseek_v3", Layout(2, 2, 1), {}),
        ("gpt2", Layout(2, 2, 1), {"shard": True}),
    ],
    ids=str,
)
def test_a_model_saved_from_any_layout_is_opened_by_transformers_and_trained_on(
    ranks: Callable[[int], Ranks], tmp_path: Path, kind: str, layout: Layout, options: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    saving = (kind, layout, options, str(folder))
    alone = layout.devices == 1
    results = [train_and_save(*saving)] if alone else ranks(layout.devices)(train_and_save, *saving)
    check_saved(folder, [saved for _, saved in results])
    assert [f.name for f in tmp_path.iterdir()] == ["model"]
    if layout.dp == 1:
        other = Layout(1, 3 - layout.pp, 1)
        losses = ranks(2)(next_loss, other, str(folder)) if other.pp == 2 else [next_loss(other, str(folder))]
        assert losses == [pytest.approx(results[0][0], rel=1e-5)] * len(losses)


def test_what_else_is_in_the_folder_stays(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "earlier").mkdir(parents=True)
    kept = {"tokenizer.json": "words", "earlier/model.safetensors": "a model of its own"}
    stale = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin"]
    for name, text in {**kept, **dict.fromkeys(stale, "old")}.items():
        (folder / name).write_text(text)
    (tmp_path / "model.partial").mkdir()  # of a save that did not end
    _, saved = train_and_save("llama", Layout(1, 1, 1), {}, str(folder))
    check_saved(folder, [saved])
    assert {name: (folder / name).read_text() for name in kept} == kept
    assert not any((folder / name).exists() for name in stale)
    assert [f.name for f in tmp_path.iterdir()] == ["model"]


def test_what_a_crash_left_beside_the_folder_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "model.old").mkdir()
    (tmp_path / "model.old" / "tokenizer.json").write_text("words")
    train_and_save("llama", Layout(1, 1, 1), {}, str(tmp_path / "model"))
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "words"
    assert [f.name for f in tmp_path.iterdir()] == ["model"]


def fail_to_save(folder: str) -> str:
    pipe = pipeline(decoder("llama"), Layout(1, 2, 1))
    save_pretrained(pipe, folder)
    step(pipe)
    if pipe.rank == 1:
        hugging_face.save_file = _full  # type: ignore[assignment]
    with pytest.raises((OSError, RuntimeError)) as caught:
        save_pretrained(pipe, folder)
    return str(caught.value)


def _full(*_: Any) -> None:
    raise OSError("the disk is full")


def test_a_rank_that_cannot_write_stops_all_and_the_old_model_stays(
    fresh_ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    first, second = fresh_ranks(2)(fail_to_save, str(folder))
    assert second == "the disk is full"
    assert first.startswith("rank 1 stopped: OSError: the disk is full")
    untrained = dict(decoder("llama").stage(0, 4, torch.device("cpu")).named_parameters())
    check_saved(folder, [{name: p.detach() for name, p in untrained.items()}])
    assert [f.name for f in tmp_path.iterdir()] == ["model"]


def save_each(folder: str) -> None:
    """Each process is a pipeline of its own."""
    mesh = init_device_mesh(local_device().type, (2, 1), mesh_dim_names=("other", "pipe"))
    pipe = pipeline(decoder("llama"), Layout(1, 1, 1), mesh=mesh["pipe"])
    save_pretrained(pipe, Path(folder) / str(mesh.get_rank()))


def test_a_pipeline_without_rank_0_saves_too(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    ranks(2)(save_each, str(tmp_path))
    assert opened(tmp_path / "1").num_parameters() == opened(tmp_path / "0").num_parameters()


def test_ranks_hear_of_each_other_while_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline(decoder("llama"), Layout(1, 1, 1))
    heard: list[Any] = []

    def slowly(model: PreTrainedModel, folder: Path, **_: object) -> None:
        while heard.count(False) < 3:  # for ever, if nothing is heard meanwhile
            time.sleep(0.01)
        folder.mkdir()

    monkeypatch.setattr(pipe.transport, "gather", lambda value, over: [heard.append(value), value][1:])
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", slowly)
    monkeypatch.setattr(transport, "BEAT", 0.02)
    save_pretrained(pipe, tmp_path / "model")
    assert heard.count(False) >= 3
    assert heard[-2:] == [True, None]


def test_other_models_and_files_in_the_way_are_refused(tmp_path: Path) -> None:
    plan = Plan((1,), ((9, 1, 12),), (0, 4))
    with pytest.raises(ValueError, match=r"only pipelines of Hugging Face models .* type GPT; Pipeline\.save writes"):
        save_pretrained(Pipeline(make_model(TINY), plan), tmp_path / "model")
    (tmp_path / "model").write_text("")
    with pytest.raises(ValueError, match=r"saved to a folder, got the file .*model; take another name"):
        save_pretrained(pipeline(decoder("llama"), Layout(1, 1, 1)), tmp_path / "model")


def test_weights_that_were_added_to_a_model_are_refused_by_name(tmp_path: Path) -> None:
    model = small_model(small_config("llama"))
    model.lm_head.bias = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight[:, 0]))
    pipe = pipeline(Decoder(model, backend="attention"), Layout(1, 1, 1))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM must be those .* for lm_head\.bias; undo what was added"):
        save_pretrained(pipe, tmp_path / "model")
    assert not list(tmp_path.iterdir())
