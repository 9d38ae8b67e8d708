"""QLoRA in TRL's trainers as users write it: their default arguments, and what gradients they compute.

TRL's defaults are bfloat16 (here autocast, or weights that were loaded in bfloat16) and gradient checkpointing.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from terapipe.hf.quantized import keep_unpacked
from tests.support.hf_models import QUANTIZATIONS, save_base
from tests.support.ranks import Ranks
from tests.unit.trainers import runs
from tests.unit.trainers.test_trainer import check

pytestmark = pytest.mark.usefixtures("quiet_models")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As wide as a tokenizer of 128 words needs."""
    return str(save_base(tmp_path_factory.mktemp("base"), vocab_size=128))


def load(base: str, dtype: str) -> Any:
    """NF4, with products in the dtype of the rest. TRL casts adapters to bfloat16 if a model says that it is quantized:
    not where float32 is to be compared."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.manual_seed(3)
    quantization = BitsAndBytesConfig(**QUANTIZATIONS["nf4"], bnb_4bit_compute_dtype=DTYPES[dtype])
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization, dtype=DTYPES[dtype])
    if dtype == "float32":
        model.is_loaded_in_4bit = False
    keep_unpacked(model)  # or the plain model's evaluation would round on CPUs with AVX512-BF16, and end its training
    return model


def trained(kind: str, folder: str, own: dict[str, Any] | None, base: str, dtype: str, **changes: Any) -> runs.Run:
    """TRL makes the adapters itself, from ``peft_config``; for DPO the base is then the reference."""
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    options = {
        "max_steps": 3, "gradient_checkpointing": True, "bf16": dtype == "bfloat16",
        "model": partial(load, base, dtype), "trainer": {"peft_config": lora},
    }  # fmt: skip
    if kind == "dpo":
        options["trainer"] = {"peft_config": lora, "ref_model": None}
    return runs.tuned(kind, folder, own, **options | changes)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_in_float32(kind: str, base: str, tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """Exact, as far as float32 goes: bitsandbytes knows no wider dtype."""
    wanted = trained(kind, str(tmp_path / "plain"), None, base, "float32")
    check(trained(kind, str(tmp_path / "one"), {"slices": 5}, base, "float32"), wanted, 2e-4)
    for found in ranks(2)(trained, kind, str(tmp_path / "two"), {"slices": 5}, base, "float32"):
        check(found, wanted, 2e-4)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_at_the_defaults(kind: str, base: str, tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """In bfloat16, adapters too, plain and pipelined runs round differently, and more so with each update: bounds are
    loose, and ``test_in_float32`` shows that it is no more than rounding."""
    wanted = trained(kind, str(tmp_path / "plain"), None, base, "bfloat16")
    one = trained(kind, str(tmp_path / "one"), {"slices": 5}, base, "bfloat16")
    for found in (one, *ranks(2)(trained, kind, str(tmp_path / "two"), {"slices": 5}, base, "bfloat16")):
        assert found.column("loss") == pytest.approx(wanted.column("loss"), rel=3e-2)
        assert found.column("grad_norm") == pytest.approx(wanted.column("grad_norm"), rel=0.1)
        assert found.weights.keys() == wanted.weights.keys()
        assert {x.dtype for x in found.weights.values()} == {x.dtype for x in wanted.weights.values()}
