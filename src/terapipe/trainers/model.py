"""A Hugging Face model whose forward runs through a pipeline: called, trained and saved like any other.

``pipelined`` makes stages of a model and puts a forward of ours into the model itself. Whoever calls the model (a loop,
a Trainer, TRL) gets what the model would have returned, and gradients by ``loss.backward()``:

    model(input_ids, labels)
      call_of             what the caller passed, as token ids, shifted labels and documents, or refused    calls.py
      pipe.token_outputs  forwards of all slices; values of each token, with a gradient function
      loss                from these values, as the model itself computes it
    loss.backward()       asks the gradient function for the backwards of all slices

That works with orders in which all forwards come first. A step of plain cross-entropy needs no such detour: ``step``
runs forwards and backwards in the plan's order, and is what ``PipelineTrainer`` calls where it can.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from terapipe.hf.decoder import Decoder
from terapipe.hf.quantized import keep_unpacked, settle_scales
from terapipe.hf.refusals import without_wrapper
from terapipe.hf.stage import DecoderStage
from terapipe.hf.structure import is_classifier
from terapipe.losses.sequences import classification, scores
from terapipe.losses.tokens import token_log_probs
from terapipe.modeling.quantized import is_quantized, parts_of
from terapipe.modeling.stage import IGNORE, Autocast
from terapipe.planning.layout import Layout
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.runtime.checkpoint.frozen import digest_of
from terapipe.runtime.comm.environment import device_of, rank_and_size
from terapipe.runtime.comm.mesh import device_mesh
from terapipe.runtime.module_states import configurations
from terapipe.runtime.module_tree import persistent_buffers
from terapipe.runtime.pipeline import Pipeline
from terapipe.trainers.budget import BudgetPlanner
from terapipe.trainers.calls import Call, PipelineOutput, call_of, classify, fused_head
from terapipe.trainers.config import PipelineConfig
from terapipe.trainers.model_record import ModelRecord
from terapipe.trainers.noise import EmbeddingNoise
from terapipe.trainers.refusals import refuse_other_losses

CLASSIFYING = ("labels", "margin")  # what a classifier may be called with beside its tokens; TRL passes margins


def pipelined(
    model: nn.Module,
    slices: int | None = None,
    *,
    memory: str | int | None = None,
    config: PipelineConfig | None = None,
    batch_size: int = 1,
    seq_len: int | None = None,
    recompute: Recompute = "none",
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    timeout: float = 300.0,
    compile_backend: str | None = None,
    noise: EmbeddingNoise | None = None,
) -> "PipelinedModel":
    """Makes a causal LM of transformers run through a pipeline when it is called: on one device slice by slice, under
    torchrun over its ranks. ::

        pipelined(model, slices=16)
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()                       # gradients are in .grad, as ever

    Call it before an optimizer is made; and under ``torch.autocast``, if steps are: it then plans for that. With
    several processes give the optimizer ``pipe.parameters()`` of what is returned, and call its ``gather()`` on all of
    them before the model itself is saved or generates text. Processes that drew different random weights all take those
    of the first.

    Args:
        model: A causal LM or a sequence classifier of transformers, or what peft made of one. It is changed in place.
        slices: Of each sequence, short for ``config=PipelineConfig(num_slices=...)``.
        memory: A budget for weights, gradients, AdamW's state and a step, on one device, such as ``"22GiB"``: slices,
            recomputation and offload are chosen for it. Short for ``config=PipelineConfig(memory=...)``.
        config: How to split the model and its sequences.
        batch_size: Sequences of a batch to plan for; batches of other shapes are cut alike.
        seq_len: Tokens of a sequence to plan for. With ``memory`` what does not fit is then refused now, not in the
            first step.
        recompute: What backwards compute again, where ``config`` does not say it.
        device: Where this process computes, by default its GPU, or else the CPU.
        mesh: What ``device_mesh`` made, if it was called before.
        timeout: The longest, in seconds, that a rank waits for another, where ``config`` does not say it.
        compile_backend: Of ``torch.compile``, such as ``"inductor"``, which is then applied to each layer; None: not.
        noise: Added to embeddings in training.
    """
    short = {name: value for name, value in (("slices", slices), ("memory", memory)) if value is not None}
    if config is not None and short:
        raise ValueError(f"{' and '.join(short)} are short for a config with them, got config={config}, too; give one")
    config = config or PipelineConfig(slices=slices, memory=memory)
    inner = without_wrapper(model)
    keep_unpacked(inner)  # text may be generated between steps, by the model itself
    layout, device = config.layout(rank_and_size()[1]), device_of(device)
    if layout.devices > 1:
        mesh = device_mesh(layout, device=device, timeout=config.timeout or timeout) if mesh is None else mesh
        agree_on_weights(inner, device)

    autocast = Autocast.current(device)

    @contextmanager
    def ready() -> Iterator[None]:
        with unpatched(inner), _outside_of_calls(device), _returning_dicts(inner):
            yield

    def make(plan: Plan | None) -> Made:
        with ready():
            decoder = Decoder(model, router_loss_over="batch")  # as transformers has it
            planner, compiled = None, compile_backend is not None
            if config.plans_each_batch:
                planner = BudgetPlanner(decoder, config, device, autocast, ready, compiled, noise is not None)
            if plan is None and planner is not None and (config.seq_len or seq_len):
                plan = planner.plan_for(batch_size, config.seq_len or seq_len or 1)
            if plan is None:
                with autocast.on():  # as steps will be
                    plan = config.plan_for(decoder, layout, batch_size, seq_len, recompute, compiled=compiled)
            loss_fn = classification() if is_classifier(inner) else None
            pipe = Pipeline(
                decoder, plan, loss_fn=loss_fn, mesh=mesh, shard=layout.shard, vary="replan", device=device,
                timeout=config.timeout or timeout,
            )  # fmt: skip
            if compile_backend is not None:
                _compile(pipe, compile_backend, autocast)
            if noise is not None:
                noise.attach(pipe.stages.values())
        return Made(pipe, decoder.has_auxiliary_losses, planner)

    return PipelinedModel(model, inner, make, layout)


def _compile(pipe: Pipeline, backend: str, autocast: Autocast) -> None:
    """Compiles the layers of all stages now, on all ranks at the same time, and not one after the other in a step."""
    from terapipe.modeling.compiling import compile_layers

    for stage in pipe.stages.values():
        compile_layers(stage, backend=backend)
    with autocast.on():
        pipe.warm_up()


class Made(NamedTuple):
    """What was made of a model as it is.

    Args:
        pipe: With stages that share the model's parameters, if they are on the same device.
        router_losses: Whether the model's loss has losses of routers beside cross-entropy.
        planner: Of each batch, where there is a memory budget.
    """

    pipe: Pipeline
    router_losses: bool
    planner: BudgetPlanner | None


class PipelinedModel:
    """Replaces the ``forward`` of a model by one through a pipeline, and ``zero_grad`` by the pipeline's.

    The pipeline's stages share their parameters with the model. What transformers computes with a cache (generation)
    still runs in the model itself, which needs all weights as they are now: ``gather`` brings them.

        outer (peft's, or the model itself)
          model --forward--> call_of --> pipe.token_outputs, pipe.step --> calls.py --> what the caller expects
             |                              |
             +-- same parameters -- stages -+

    Args:
        outer: What peft made of the model, if it did, else the model.
        model: The model itself.
        make: Makes a pipeline of the model as it is, by a plan or by a new one.
        layout: How many replicas, ranks and devices per rank there are.
    """

    def __init__(
        self,
        outer: nn.Module,
        model: PreTrainedModel,
        make: Callable[[Plan | None], Made],
        layout: Layout,
    ) -> None:
        self.outer, self.model, self.layout = outer, model, layout
        self._make = make
        self.loss_only = False  # in evaluation: no logits beside the loss
        self._original = MethodType(type(model).forward, model)
        self._replaced = model.__dict__.get("forward", self._original)  # may have TRL's fused head
        self._whole = True  # whether the model itself has all weights as they are now
        self._adopt(make(None))
        self._install()

    def _adopt(self, made: Made) -> None:
        """Takes what was made of the model as it is now."""
        pipe = made.pipe
        self.pipe, self.router_losses, self.planner = made
        self._loss_checked = False
        own = {*self.model.parameters()}
        self._shares_all = self.layout.pp == 1 and all(p in own for p in pipe.parameters())
        stages = [stage for stage in pipe.stages.values() if isinstance(stage, DecoderStage)]
        self._record = ModelRecord(self.model, [stage.model for stage in stages])
        self._training: bool | None = None
        self._follow_training()
        if self.layout.pp * self.layout.tp > 1:
            pipe.compare_data()

    def _install(self) -> None:
        """Replaces ``forward`` of the model and ``zero_grad`` of what is around it, on these two objects only: copies
        of them (``copy.deepcopy`` for a reference model) have methods of their own class again."""

        @functools.wraps(type(self.model).forward)
        def forward(owner: PreTrainedModel, *arguments: Any, **named: Any) -> Any:
            if owner is not self.model:  # a copy of the model has no pipeline
                return type(owner).forward(owner, *arguments, **named)
            if self._is_generation(named):
                return self._generate(arguments, named)
            inputs = self._by_name(arguments, named)
            output = self.forward(inputs)
            return output if self._option("return_dict", inputs) else output.to_tuple()

        @functools.wraps(nn.Module.zero_grad)
        def zero_grad(owner: nn.Module, set_to_none: bool = True) -> None:
            if owner is self.outer:
                self.pipe.zero_grad(set_to_none)
            else:
                nn.Module.zero_grad(owner, set_to_none)

        # Bound methods, so that copies of the model get their own.
        self.model.forward = MethodType(forward, self.model)
        self.outer.zero_grad = MethodType(zero_grad, self.outer)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Makes the model as it was before; its weights are those of the pipeline. All ranks must call it together."""
        self.gather()
        self.model.__dict__.pop("forward", None)
        self.outer.__dict__.pop("zero_grad", None)

    # Calls

    @staticmethod
    def _is_generation(named: Mapping[str, Any]) -> bool:
        """Whether ``generate`` calls: with a cache, or for the last logits only, and without gradients."""
        cached = named.get("past_key_values") is not None or bool(named.get("use_cache")) or "logits_to_keep" in named
        return cached and not torch.is_grad_enabled()

    def _generate(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Answers a call of ``generate`` by the model itself, on this rank: a token at a time has no slices."""
        if not self._whole:
            raise ValueError(
                "this rank has only its stage's weights as they are now; call gather() of the PipelinedModel on all "
                "ranks before text is generated"
            )
        return self._original(*arguments, **named)

    @staticmethod
    def _by_name(arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name; one by position is ``input_ids`` in every model of transformers."""
        if len(arguments) > 1:
            raise ValueError("call the model with named arguments: input_ids=..., attention_mask=..., labels=...")
        return {**({"input_ids": arguments[0]} if arguments else {}), **named}

    def _option(self, name: str, inputs: Mapping[str, Any]) -> Any:
        """What a call says of its outputs, or else the configuration."""
        value = inputs.get(name)
        return getattr(self.model.config, name, None) if value is None else value

    def forward(self, inputs: dict[str, Any]) -> PipelineOutput:
        """What the model returns, through the pipeline. All ranks must call it together, with the same batch.

        With gradients and labels there is a loss but no logits: nobody looks at them in training, and they are the
        largest tensor of a step. Evaluation returns both, at the price of a second forward.

        Args:
            inputs: What the model was called with, by name.
        """
        self._follow()
        for name in ("output_hidden_states", "output_attentions"):
            if self._option(name, inputs):
                raise ValueError(
                    f"a pipeline returns losses and logits, but {name}=True was asked for; set config.{name} = False, "
                    "or call remove() of the PipelinedModel before"
                )
        if torch.is_grad_enabled():
            self.note_update()  # as an optimizer's step is likely to follow
        if is_classifier(self.model):
            return self._classify(inputs)
        call = call_of(self.model, inputs)
        if inputs.get("fused_lm_head"):
            return self._score(call, inputs)
        if call.labels is None:
            return PipelineOutput(logits=self._values(call, raw_logits))
        loss = self._loss(call, inputs.get("num_items_in_batch"))
        if self.loss_only or torch.is_grad_enabled():
            return PipelineOutput(loss=loss)
        return PipelineOutput(loss=loss, logits=self._values(call, raw_logits))

    def _classify(self, inputs: dict[str, Any]) -> PipelineOutput:
        """What a sequence classifier returns. Labels are of sequences, (rows, ...), and no token's."""
        call = call_of(self.model, {name: value for name, value in inputs.items() if name not in CLASSIFYING})
        output = classify(self.model, self._values(call, scores), inputs)
        return PipelineOutput(loss=output.get("loss"), logits=output["logits"])

    def _values(self, call: Call, per_token: Callable[..., Any]) -> Any:
        """Values of each token, at the places of the caller's input, with gradients to the parameters.

        Losses are means over replicas in the loops that call this, but pipelines sum over replicas: so gradients are
        divided by their number on the way back.

        Args:
            call: What ``call_of`` returned.
            per_token: Takes logits (rows, tokens of a slice, vocabulary) and labels of the same tokens, and returns a
                tensor (rows, tokens, ...), or several by name.
        """
        plan = self._plan_of(call)
        values = self.pipe.token_outputs(call.input_ids, call.labels, per_token, call.documents, plan)
        if isinstance(values, Tensor):
            return call.shift_back(_mean_over(self.layout.dp, values))
        return {name: call.shift_back(_mean_over(self.layout.dp, value)) for name, value in values.items()}

    def _plan_of(self, call: Call) -> Plan | None:
        """The plan of a batch within the memory budget; None where there is none, and the pipeline's own is resized.
        What would not fit with gradients may well fit without."""
        if self.planner is None:
            return None
        rows, tokens = call.input_ids.shape
        try:
            return self.planner.plan_for(rows, tokens)
        except ValueError:
            if torch.is_grad_enabled():
                raise
            return None

    def _loss(self, call: Call, items: Tensor | int | None) -> Tensor:
        """The loss, as transformers' models for causal LMs compute it.

        Args:
            call: With labels.
            items: What to divide the sum by, if the caller counted over accumulated batches; else the number of labels
                that count here.
        """
        assert call.labels is not None
        self._check_loss(call)
        if self.router_losses and not torch.is_grad_enabled():
            return self.pipe.evaluate(call.input_ids, call.labels, call.documents)
        log_probs = self._values(call, token_log_probs)
        total = (call.labels != IGNORE).sum() if items is None else items
        loss: Tensor = -log_probs.sum() / torch.as_tensor(total, device=log_probs.device)
        return loss

    @functools.cached_property
    def _fused_head(self) -> Callable[..., Any]:
        """What TRL's fused head computes for each token, read from the forward that TRL had put into the model."""
        return fused_head(self._replaced)

    def _score(self, call: Call, inputs: dict[str, Any]) -> PipelineOutput:
        """As models that TRL gave a fused head answer: a value for each token that is predicted."""
        if inputs.get("output_router_logits"):
            raise ValueError("losses of routers are not supported with TRL's trainers; set router_aux_loss_coef=0.0")
        values = self._values(call, self._fused_head)
        assert call.labels is not None
        values["label_mask"] = call.shift_back(call.labels != IGNORE)
        if inputs.get("shift_labels") is None:
            values = {name: value[:, :-1] for name, value in values.items()}
        items = inputs.get("num_items_in_batch")
        total = values["label_mask"].sum().clamp(min=1) if items is None else items
        return PipelineOutput(loss=-values["log_probs"].sum() / total, **values)

    def step(self, inputs: dict[str, Any], total: Callable[[int], float]) -> Tensor:
        """A whole training step of cross-entropy, forwards and backwards in the plan's order. Gradients are added to
        ``.grad``, as ``backward`` does.

        Args:
            inputs: A batch with labels, by name.
            total: Takes the number of labels that count in this batch, and returns what to divide the sum over tokens
                by.

        Returns:
            The loss, on all ranks.
        """
        self._follow()
        self.note_update()
        call = call_of(self.model, inputs)
        if call.labels is None:
            raise ValueError("the batch has no labels; use a collator that makes them, or a dataset that has them")
        self._check_loss(call)
        counted = int((call.labels != IGNORE).sum())
        plan = self._plan_of(call)
        return self.pipe.step(call.input_ids, call.labels, call.documents, plan=plan, total=total(counted))

    def _check_loss(self, call: Call) -> None:
        """Refuses losses that would not be the model's own."""
        if not self._loss_checked:
            refuse_other_losses(self.model)
            self._loss_checked = True
        if self.router_losses and (call.is_padded or self.layout.dp > 1):
            raise ValueError(
                "losses of routers are those of transformers only without padding, which it leaves out, and with one "
                "replica; pack sequences and take dp=1, or set output_router_logits=False"
            )

    # What is done to the model after the stages were made of it

    def _follow(self) -> None:
        """Brings stages up to date with the model, or refuses what was changed. Called before every call and step."""
        change = self._record.follow()
        if change:
            self._refuse_new_stages(change)
            self._adopt(self._make(self.pipe.plan))
        self._follow_training()

    def _follow_training(self) -> None:
        """Modules of stages follow one by one; the pipeline around them is in training mode if any of them is."""
        if self.pipe.training is not self._training:  # somebody called train() or eval() of the pipeline
            self._record.set_modes()
        self._training = self._record.is_training
        for part in (self.pipe, *self.pipe.stages.values()):
            part.training = self._training

    def _refuse_new_stages(self, change: str) -> None:
        """Other processes have the rest of the model, and an optimizer may hold parameters of stages as they are."""
        if self.layout.devices == 1 and self._shares_all:
            return
        with self.pipe.failing_together():  # the model of another rank may be as it was
            raise ValueError(
                f"the model was changed after pipelined(): {change}; stages on {self.layout.devices} devices cannot "
                "follow; change the model before, or call remove() of the PipelinedModel, and pipelined() again after"
            )

    # Weights

    def note_update(self) -> None:
        """Notes that an optimizer may change weights: those of other stages in the model itself are old from now on."""
        self._whole = self._shares_all

    def gather(self) -> None:
        """Brings the weights of all stages into the model itself, on every rank. All ranks must call it together.

        Costs nothing if no step was taken since, or if the stages share all parameters with the model.
        """
        if self._whole:
            return
        gather_weights(self.pipe, self.model)
        self._whole = True


def raw_logits(logits: Tensor, labels: Any) -> Tensor:
    """For ``_values``: the logits themselves."""
    return logits


def _mean_over(number: int, x: Tensor) -> Tensor:
    """The same value, its gradient divided by the number of replicas, over which pipelines sum."""
    if number > 1 and x.requires_grad:
        x.register_hook(lambda gradient: gradient / number)  # type: ignore[no-untyped-call]
    return x


@contextmanager
def unpatched(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model is without what others put in place of its forward: TRL's fused head, which stages, as copies
    of the model, would call.

    Args:
        model: The model itself, not a wrapper of peft.
    """
    patched = model.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if patched is not None:
            model.__dict__["forward"] = patched


@contextmanager
def _outside_of_calls(device: torch.device) -> Iterator[None]:
    """As if no forward were under way: what is made inside may be made in the middle of one."""
    plain = torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), plain[0], plain[1]:
        yield


@contextmanager
def _returning_dicts(model: PreTrainedModel) -> Iterator[None]:
    """Stages take what models return by name. What the caller gets is up to the caller."""
    configs = [config for config in configurations(model.modules()) if "return_dict" in config.__dict__]
    earlier = [config.return_dict for config in configs]
    try:
        for config in configs:
            config.return_dict = True
        yield
    finally:
        for config, value in zip(configs, earlier, strict=True):
            config.return_dict = value


# Weights that several processes share: the same on all of them at first, gathered from the stages later


def agree_on_weights(model: nn.Module, device: torch.device) -> None:
    """Where processes made models with different random weights, all get those of the first, as with
    DistributedDataParallel. All processes must call it together.

    Only digests are exchanged, so a model that is equal everywhere costs no traffic.

    Args:
        model: Whose parameters and buffers are compared by name; weights on the meta device are left out.
        device: Of this process, through which weights are sent.
    """
    settle_scales(model)
    named = dict(chain(model.named_parameters(), model.named_buffers()))
    real = {name: tensor for name, tensor in named.items() if not tensor.is_meta}
    mine = {name: digest_of(tensor) for name, tensor in real.items()}
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if any(other.keys() != mine.keys() for other in everyone):
        strange = set.union(*(set(other) ^ set(everyone[0]) for other in everyone))
        raise ValueError(f"all processes must make the same model, they differ in {', '.join(sorted(strange)[:3])}")
    for name in real:
        forms = [other[name].rpartition(" ")[0] for other in everyone]
        strange_rank = next((rank for rank, form in enumerate(forms) if form != forms[0]), 0)
        if strange_rank:
            raise ValueError(
                f"all processes must make the same model, they differ in {name}: {forms[strange_rank]} on rank "
                f"{strange_rank}, {forms[0]} on rank 0"
            )
    for name, tensor in real.items():
        if any(other[name] != mine[name] for other in everyone):
            _take_over(tensor, device)


@torch.no_grad()
def _take_over(tensor: Tensor, device: torch.device) -> None:
    """Overwrites a tensor with that of the first process, a quantized one with its scales. By way of the device: NCCL
    sends nothing else."""
    for part in (x.data for x in parts_of(tensor)):
        there = part.detach().to(device).contiguous()
        dist.broadcast(there.flatten().view(torch.uint8), 0)  # gloo knows no float8
        part.copy_(there)


@torch.no_grad()
def gather_weights(pipe: Pipeline, model: nn.Module) -> None:
    """Copies the weights of all stages into the whole model, on every rank. All ranks must call it together.

    One weight after the other goes from the rank that has it to all ranks of its pipeline, so the devices hold one
    whole weight at a time beside their own.

    Args:
        pipe: The pipeline.
        model: With the same names of parameters; on the CPU or on the device.
    """
    target = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    own = dict(pipe.named_parameters()) | dict(persistent_buffers(pipe.stages.values()))
    with pipe.failing_together():
        owners: dict[str, int] = {}
        changing = [name for name, x in own.items() if not is_quantized(x)]  # quantized weights are never trained
        for rank, names in enumerate(pipe.gather(changing)):
            owners |= {name: rank for name in names if name not in owners}
        for name, owner in owners.items():
            if owner == pipe.rank:
                value = own[name].detach()
                value = value.full_tensor() if isinstance(value, DTensor) else value
            else:
                value = torch.empty_like(target[name], device=pipe.device)
            value = pipe.transport.broadcast(value.contiguous(), owner, f"the weight {name}")
            if target[name] is not own.get(name):
                target[name].data.copy_(value)
