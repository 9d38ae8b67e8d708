"""Lightning on one device, each sequence in slices: the model is called as ever. Needs lightning and transformers.

pip install lightning && python -m examples.lightning_slices
"""

from pathlib import Path

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from terapipe.trainers import pipelined

TEXT = Path(__file__).parent / "data/shakespeare.txt"
TOKENS = 512


class Decoder(lightning.LightningModule):
    def __init__(self, slices: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=256
        )
        self.model = AutoModelForCausalLM.from_config(config)
        self.losses: list[float] = []
        if slices:
            pipelined(self.model, slices)

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss  # transformers shifts labels itself
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(slices: int | None, steps: int = 10) -> list[float]:
    text = torch.tensor(list(TEXT.read_bytes()[: steps * TOKENS]))
    module = Decoder(slices)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, gradient_clip_val=1.0,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(text.view(steps, TOKENS), batch_size=1))
    return module.losses


if __name__ == "__main__":
    for plain, sliced in zip(train(None), train(8), strict=True):
        print(f"loss {plain:.6f} in one piece, {sliced:.6f} in 8 slices")
