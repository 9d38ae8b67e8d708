"""The model of a run, from its configuration. It is on the meta device: each rank materializes only its stages.

::

    key              class                        weights                    can be measured and planned
    ---------------  ---------------------------  -------------------------  --------------------------
    model.preset     `GPT`                        random, by model.seed      yes
    model.config     `hf.Decoder`                 random, by model.seed      yes
    model.folder     `hf.Decoder`                 those of the folder        yes
    model.factory    your own `PipelineModel`     as your function makes it  no: equal slices
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from terapipe import files
from terapipe.extras import import_extra, install_line
from terapipe.modeling.gpt import GPT
from terapipe.modeling.stage import PipelineModel
from terapipe.planning.layout import balance, split_layers
from terapipe.planning.presets import GPTConfig, gpt_config
from terapipe.planning.recompute import MODES, Recompute
from terapipe.planning.slices import Plan
from terapipe.training.config import DataConfig, ModelConfig, ObjectiveConfig
from terapipe.training.data.tokenizer import ByteTokenizer

WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class RunModel:
    """A model, and what the planner knows of it.

    Args:
        model: To be cut into stages; on the meta device.
        shape: Sizes that costs and memory are computed from; None: nothing is known, and it cannot be measured.
        split: Returns the boundaries of so many stages, by their costs if these are known.
        identity: Its configuration: another one is another model, whatever its weights. Checkpoints carry it.
        min_slice: Tokens that a slice must have at least.
        recompute_modes: That the model supports.
    """

    model: PipelineModel
    shape: GPTConfig | None  # None: nothing is known, and it cannot be measured
    split: Callable[[int], tuple[int, ...]]  # boundaries of so many stages
    identity: dict[str, Any]  # its configuration: another one is another model, whatever its weights
    min_slice: int = 1  # tokens that a slice must have
    recompute_modes: tuple[Recompute, ...] = MODES  # that the model supports


def check_model(config: ModelConfig, data: DataConfig) -> GPTConfig | None:
    """Refuses a model that is not there, without building it: `terapipe train` calls it before it starts ranks.

    Args:
        config: Names the model.
        data: Its tokenizer and sequences must fit a preset.

    Returns:
        The shape of a preset; None for other models, whose shape only building them would tell.
    """
    if config.preset:
        return preset_shape(config, data, ByteTokenizer.vocab if data.tokenizer == "bytes" else 1)
    if config.factory:
        check_place(config.factory, "model.factory")
        return None
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"Hugging Face models need transformers; {install_line('hf')}")
    path = Path(config.folder or config.config)
    folder = path.parent if path.is_file() else path
    files.check_kinds(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model.{'folder' if config.folder else 'config'} must be a folder with a config.json, got {str(path)!r}; "
            "a model of the Hugging Face Hub must be downloaded before: hf download MODEL_ID --local-dir FOLDER"
        )
    if not isinstance(files.read_json(folder / "config.json"), dict):
        raise ValueError(f"{folder / 'config.json'} must hold a JSON object")
    if config.folder and not any(True for pattern in WEIGHT_FILES for _ in folder.glob(pattern)):
        raise ValueError(
            f"model.folder {folder} holds no weights ({', '.join(WEIGHT_FILES)}); give its config.json as model.config "
            "to begin with random ones"
        )
    return None


def make_model(config: ModelConfig, data: DataConfig, vocab: int, objective: ObjectiveConfig | None = None) -> RunModel:
    """Makes the model of a run. Every rank makes it, on the meta device, which takes no memory.

    Args:
        config: Names the model.
        data: How long sequences are.
        vocab: Tokens of the tokenizer.
        objective: Settings of the routers of a mixture of experts; None: the default.
    """
    if config.preset:
        return _preset(config, data, vocab)
    if config.factory:
        return _from_factory(config, data, vocab)
    return _hugging_face(config, vocab, objective or ObjectiveConfig())


def _preset(config: ModelConfig, data: DataConfig, vocab: int) -> RunModel:
    """Stages are cut by the costs of their layers at this sequence length, with the embedding and the head."""
    shape = preset_shape(config, data, vocab)
    with torch.device("meta"):
        gpt = GPT(shape, seed=config.seed).to(dtype_of(config))
    identity = {**asdict(shape), "kind": "gpt", "kv_heads": shape.num_kv_heads, "ffn": shape.ffn_hidden}
    return RunModel(gpt, shape, lambda stages: split_layers(shape, stages, data.seq_len), identity)


def preset_shape(config: ModelConfig, data: DataConfig, vocab: int) -> GPTConfig:
    """Returns the shape of a preset. Vocabulary and positions are those that the data needs, unless the shape sets
    them.

    Args:
        config: Has the preset: a name, or a shape such as ``layers=4,hidden=64,heads=4``.
        data: How long sequences are.
        vocab: Tokens of the tokenizer.
    """
    shape = gpt_config(config.preset)
    keys = {item.partition("=")[0].strip() for item in config.preset.split(",")}
    if "vocab" not in keys:
        shape = replace(shape, vocab=vocab)
    if "max_seq_len" not in keys:
        shape = replace(shape, max_seq_len=max(shape.max_seq_len, data.seq_len))
    _check_vocab(shape.vocab, vocab, f"vocab={vocab} in model.preset")
    if shape.max_seq_len < data.seq_len:
        raise ValueError(
            f"the model must have a position for every token of a sequence, got max_seq_len={shape.max_seq_len} in "
            f"model.preset and data.seq_len {data.seq_len}; raise the one or lower the other"
        )
    return shape


def _check_vocab(model: int, tokenizer: int, remedy: str) -> None:
    """A token beyond the model's vocabulary would be an index error in the embedding, in the middle of training."""
    if model < tokenizer:
        raise ValueError(
            f"the model must know every token of the tokenizer, got a model of {model} and a tokenizer of {tokenizer}; "
            f"take the model's own tokenizer (data.tokenizer), or {remedy}"
        )


def _hugging_face(config: ModelConfig, vocab: int, objective: ObjectiveConfig) -> RunModel:
    """A decoder of transformers. A recomputation mode that it does not support is refused here, not at the first plan:
    `auto` would choose another."""
    try:
        import transformers

        from terapipe import hf
        from terapipe.hf.structure import identity_of
        from terapipe.hf.weights import PretrainedWeights
    except ImportError as error:
        raise ValueError(f"Hugging Face models need transformers ({error}); {install_line('hf')}") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dtype = dtype_of(config)
    routers: dict[str, Any] = {
        "router_loss_over": objective.router_loss_over,
        "router_z_loss": objective.router_z_loss,
    }
    if config.folder:
        decoder = hf.Decoder.from_pretrained(config.folder, dtype, **_adapters(config), **routers)
    else:
        path = Path(config.config)
        hf_config = PretrainedWeights(path.parent if path.is_file() else path, dtype).config()
        decoder = hf.Decoder.from_config(hf_config, config.seed, dtype, **routers)
    shape = decoder.shape
    _check_vocab(shape.vocab, vocab, f"a model with a vocab_size of {vocab}")
    if config.recompute != "auto" and config.recompute != "none":
        decoder.check_plan(Plan((1,), ((decoder.min_slice,),), (0, decoder.num_layers), recompute=config.recompute))
    identity = identity_of(decoder.model.config.to_dict())
    if config.lora_rank:
        identity["adapter"] = [config.lora_rank, config.lora_alpha, *config.lora_targets]
    split = partial(hf.split_layers, decoder)
    return RunModel(decoder, shape, split, identity, decoder.min_slice, decoder.recompute_modes)


def _adapters(config: ModelConfig) -> dict[str, Any]:
    """Arguments of ``Decoder.from_pretrained`` for adapters and quantized weights; empty if all is trained."""
    if not config.lora_rank:
        return {}
    peft: Any = import_extra("peft", "quantized", "model.lora_rank")
    targets = "all-linear" if config.lora_targets == ("all-linear",) else list(config.lora_targets)
    lora = {"r": config.lora_rank, "lora_alpha": config.lora_alpha, "target_modules": targets}
    adapter = peft.LoraConfig(**lora, task_type="CAUSAL_LM", base_model_name_or_path=config.folder)
    if not config.quantize:
        return {"adapter": adapter, "seed": config.seed}
    return {"adapter": adapter, "seed": config.seed, "quantization_config": _quantization(config)}


def _quantization(config: ModelConfig) -> Any:
    """What transformers is told by ``model.quantize``."""
    import transformers

    if config.quantize.startswith("torchao"):
        torchao: Any = import_extra("torchao.quantization", "quantized", "model.quantize")
        kinds = {"torchao-int8": torchao.Int8WeightOnlyConfig, "torchao-float8": torchao.Float8WeightOnlyConfig}
        return transformers.TorchAoConfig(kinds[config.quantize](set_inductor_config=False))  # of the whole process
    import_extra("bitsandbytes", "quantized", "model.quantize")
    quantize: Any = transformers.BitsAndBytesConfig
    if config.quantize == "int8":  # without outliers, which slices would choose otherwise
        return quantize(load_in_8bit=True, llm_int8_threshold=0.0)
    return quantize(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.quantize.removesuffix("-double"),
        bnb_4bit_use_double_quant=config.quantize.endswith("-double"),
        bnb_4bit_compute_dtype=dtype_of(config),
    )


def _from_factory(config: ModelConfig, data: DataConfig, vocab: int) -> RunModel:
    """The function is given those of vocab, seq_len, seed and dtype that it takes as arguments."""
    function = import_object(config.factory, "model.factory")
    if not callable(function):
        raise ValueError(f"model.factory: {config.factory} is no function")
    arguments = {"vocab": vocab, "seq_len": data.seq_len, "seed": config.seed, "dtype": dtype_of(config)}
    accepted = inspect.signature(function).parameters
    result = function(**{name: value for name, value in arguments.items() if name in accepted})
    if not isinstance(result, PipelineModel):
        raise ValueError(
            f"model.factory must return a model that inherits from terapipe.PipelineModel, as docs/guide.md describes; "
            f"{config.factory} returned {type(result).__name__}"
        )
    return RunModel(result, None, lambda stages: balance([1.0] * result.num_layers, stages), {"kind": "own"})


def check_place(place: str, key: str) -> tuple[str, str]:
    """Checks ``module:name`` or ``file.py:name``, of which a file must exist.

    Args:
        place: What the configuration says.
        key: Which key says it, for messages.

    Returns:
        The source and the name.
    """
    source, colon, name = place.rpartition(":")
    if not colon:
        raise ValueError(f"{key} is module:function or file.py:function, got {place!r}")
    if source.endswith(".py") and not Path(source).is_file():
        raise ValueError(f"{key}: there is no file {source}")
    return source, name


def import_object(place: str, key: str) -> Any:
    """Imports what ``module:name`` or ``file.py:name`` names. This runs the user's code, on every rank.

    Args:
        place: What the configuration says.
        key: Which key says it, for messages.
    """
    source, name = check_place(place, key)
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise ValueError(f"{key}: {error}; a file is given as path/to/file.py:function") from None
    if not hasattr(module, name):
        raise ValueError(f"{key}: {source} has no function {name!r}")
    return getattr(module, name)


def dtype_of(config: ModelConfig) -> torch.dtype:
    """Returns torch's dtype of parameters and computation.

    Args:
        config: Names it.
    """
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[config.dtype]
