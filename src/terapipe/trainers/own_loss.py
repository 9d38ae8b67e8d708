"""Whether the loss that a model of transformers computes from labels is the cross-entropy of next tokens."""

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from terapipe.hf.attention_backend import UnsupportedModelError
from terapipe.hf.routers import with_router_logits
from terapipe.hf.verify.small_model import shrink_config, small_model


def refuse_other_losses(model: PreTrainedModel) -> None:
    """Compares the two on a small copy, once. A copy does not have a loss that was given to the model itself."""
    if "_loss_function" in model.__dict__:
        raise UnsupportedModelError(
            f"{type(model).__name__} was given a loss of its own (loss_function), which a pipeline would not compute; "
            "compute it from logits, with compute_loss_func"
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        small = small_model(with_router_logits(shrink_config(model.config), False), torch.float32, kind=type(model))
        small.train(False)
        ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
        small.loss_type = model.loss_type
        found = small(input_ids=ids, labels=ids, use_cache=False)
        wanted = F.cross_entropy(found.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    if not torch.allclose(found.loss.float(), wanted, rtol=1e-4):
        raise UnsupportedModelError(
            f"the loss of {type(model).__name__} is not the cross-entropy of the next tokens ({float(found.loss):.4f} "
            f"against {float(wanted):.4f} for a small copy); compute it from logits, with compute_loss_func"
        )
