"""What published programs do otherwise than ours: copies, and bytes that are counted here once more by hand."""

from dataclasses import replace

import numpy as np
import pytest

from terapipe.planning.cost import StageSpec
from terapipe.planning.presets import GPTConfig
from terapipe.published.programs import AttentionAgain, OtherProgram, PrefixCopies, ShardedMemory
from terapipe.published.simulation import Setup, Simulation

SMALL = {"layers": 8, "hidden": 1024, "heads": 8, "vocab": 1000, "max_seq_len": 1}
PIPE = {"model": SMALL, "cluster": "dgx-a100:1", "layout": [1, 4, 2], "batch_size": 4, "seq_len": 4096}
LAYER, LAST = StageSpec(1), StageSpec(1, last=True)


def memory(**keys: object) -> OtherProgram:
    """Of the small model: hidden states and queries of 1,024, an MLP of 4,096, two tensor parallel ranks."""
    program = Simulation(Setup.of({**PIPE, **keys})).memory
    assert isinstance(program, OtherProgram)
    return program


def test_copies_of_the_prefix_move_the_bytes_that_are_counted_here() -> None:
    """Three slices of 2, 1 and 1 tokens: the forward joins 3 and 4 tokens of K and V, read and written; the backward
    adds gradients of 3 and of 2 tokens to a sum: two reads, one write."""
    setup = Setup.of({**PIPE, "order": "terapipe-1f1b", "prefix_copies": True})
    simulation = Simulation(setup)
    copies, plain = simulation.cost, simulation.evaluator.cost
    assert isinstance(copies, PrefixCopies)
    stage, context, length = StageSpec(2), np.array([0, 2, 3]), np.array([2, 1, 1])
    forward = copies.forward(stage, 1, length, context) - plain.forward(stage, 1, length, context)
    backward = copies.backward(stage, 1, length, context) - plain.backward(stage, 1, length, context)
    per_token = 2 * 2 * 1024 * 2 / 2 / simulation.cluster.host.device.bandwidth  # layers, K and V, width, bytes, tp
    assert forward.sum() == pytest.approx(per_token * 2 * (3 + 4))
    assert backward.sum() == pytest.approx(per_token * 3 * (2 + 3))


def test_attention_again_adds_its_forward_to_every_backward() -> None:
    """Scores of a causal mask that is not skipped: all rows see all keys, and the kernel writes and reads scores."""
    simulation = Simulation(Setup.of({**PIPE, "attention_again": True, "attention_kernel": "unfused"}))
    again, plain = simulation.cost, simulation.evaluator.cost
    assert isinstance(again, AttentionAgain)
    stage, device = StageSpec(3), simulation.cluster.host.device
    added = again.backward(stage, 2, 4096, 0) - plain.backward(stage, 2, 4096, 0)
    speed, pairs = device.attention_speed, 2 * 4096 * (4096 + 160)
    each = 4 * 1024 / 2 / (device.peak * speed.forward) + speed.scores * 8 / 2 * 2 / device.bandwidth
    assert added == pytest.approx(3 * pairs * each)
    assert again.forward(stage, 2, 4096, 0) == plain.forward(stage, 2, 4096, 0)
    assert again.weights(stage, 2, 4096) == plain.weights(stage, 2, 4096)


def test_the_peak_of_sharded_weights_is_counted_by_hand() -> None:
    """One layer of hidden states of 8, one head of 8 for queries and one for keys and values, an MLP of 32; 100 tokens
    on each of two devices."""
    config = GPTConfig(layers=1, hidden=8, heads=1, ffn=32, vocab=10, max_seq_len=1, tied=False)
    turns = {"saved": (16.0, 12.0, 5.0, 4.0), "mlp_turn": (2.0, 3.0), "attention_turn": (10.0, 24.0, 22.0, 2.0)}
    memory = ShardedMemory(config, 2, 16.0, True, **turns)
    state = config.parameters * 16 / 2
    ends, layer = (2 * 80 + 8 + 16) * 2 + 80 * 2, 4 * config.layer_parameters * 2
    mlp = 100 * ((16 + 2) * 8 + 12 * 8 + 5 * 16 + (4 + 3) * 32)
    attention = 100 * (10 * 8 + 24 * 8 + 22 * 16) + 200 * 2 * 16
    assert attention > mlp
    assert memory.peak(100, 200, 2) == state + ends + layer + attention
    no_ring = replace(memory, attention_turn=(10.0, 24.0, 5.0, 0.0))
    assert no_ring.peak(100, 200, 2) == state + ends + layer + mlp
    assert replace(memory, offload=False).peak(100, 200, 2) == memory.peak(100, 200, 2) + 100 * 8 * 2


def test_state_as_another_program_keeps_it() -> None:
    plain, fixed = (Simulation(Setup.of({**PIPE, **more})) for more in ({}, {"state_bytes": 4.0}))
    stage = StageSpec(2)
    count = 2 * plain.source.config.layer_parameters / 2
    assert fixed.memory.model_state(stage) == pytest.approx(4 * count, rel=1e-2)  # norms are whole on every rank
    assert fixed.memory.gradients(stage).during == 0
    assert fixed.memory.activations(stage, 1, 64) == plain.memory.activations(stage, 1, 64)


def test_full_recomputation_by_layers_keeps_the_input_of_each() -> None:
    full = {**PIPE, "recompute": "full", "state_bytes": 4.0}
    ours, theirs = (Simulation(Setup.of({**full, "layer_checkpoints": each})).memory for each in (False, True))
    stage = StageSpec(4)
    token = 1024 * 2 / 2  # hidden size, bytes, tensor parallel ranks
    assert ours.activations(stage, 1, 64) == 2 * 64 * token  # input and output of the stage
    assert theirs.activations(stage, 1, 64) == 4 * 64 * token
    assert theirs.kv_cache(stage, 1, 64) == 0 < ours.kv_cache(stage, 1, 64)
    assert theirs.workspace(stage, 1, 64, 0)[1] < ours.workspace(stage, 1, 64, 0)[1]
    whole = Simulation(Setup.of({**full, "layer_checkpoints": True, "sequence_parallel": False})).memory
    assert whole.activations(stage, 1, 64) == 2 * 4 * 64 * token


def test_what_layers_keep_is_counted_from_the_code_of_a_program() -> None:
    """Megatron-LM without FlashAttention (Korthikanti et al., 2022): s b h (10 + 24 / t + 5 a s / h t) bytes."""
    megatron = memory(saved=[10.0, 4.0, 2.0, 4.0], score_bytes=5.0, sequence_parallel=False)
    tokens = 64
    per_layer = tokens * 1024 * (10 + 24 / 2 + 5 * 8 * tokens / (1024 * 2))
    assert megatron.activations(StageSpec(3), 1, tokens) == pytest.approx(3 * per_layer)
    assert megatron.kv_cache(LAYER, 1, tokens) == 0  # among what the layer keeps
    divided = memory(saved=[10.0, 4.0, 2.0, 4.0], score_bytes=5.0)
    assert divided.activations(LAYER, 1, tokens) == pytest.approx(per_layer - tokens * 1024 * 10 / 2)


def test_masks_count_for_the_step_and_for_each_layer() -> None:
    saved = [16.0, 8.0, 0.0, 8.0]
    plain, masked = memory(saved=saved), memory(saved=saved, mask_bytes=2.0, layer_masks=[3.0, 0.0])
    for without, with_mask in zip(plain.workspace(LAYER, 1, 64, 0), masked.workspace(LAYER, 1, 64, 0), strict=True):
        assert with_mask - without == pytest.approx(2 * 64**2)
    assert masked.activations(LAYER, 1, 64) - plain.activations(LAYER, 1, 64) == pytest.approx(3 * 64**2)
    streamed = memory(layer_masks=[0.0, 1e6], recompute="full", layer_checkpoints=True)
    assert streamed.workspace(LAYER, 1, 8, 56)[1] == pytest.approx(1e6 * 64**2)  # of all tokens so far


def test_logits_of_a_slice_of_a_chunk_and_of_a_whole_sequence() -> None:
    vocab = 1000 / 2
    whole = memory(logit_bytes=14.0)
    assert whole.workspace(LAST, 1, 4096, 0)[0] == pytest.approx(4096 * 14 * vocab)
    assert whole.workspace(LAYER, 1, 4096, 0)[0] == 0
    # Of few tokens the gradient of the head's weight is more than the logits.
    few = memory(logit_bytes=14.0, logits_chunk=10)
    assert few.workspace(LAST, 1, 4096, 0)[0] == pytest.approx(10 * 2 * vocab + 1024 * vocab * 2)
    spread = memory(logit_bytes=4.0, head="spread")
    for stage in (LAYER, LAST):
        assert spread.workspace(stage, 1, 1024, 3072)[0] == pytest.approx(4096 * 4 * vocab / 4)  # pipeline ranks
    assert memory(head="apart").workspace(LAST, 1, 4096, 0)[0] == 0


def test_gradients_of_keys_and_values_of_every_query_head() -> None:
    program = memory(kv_gradient_bytes=4.0, temporaries=False)
    assert program.kv_gradients(StageSpec(3), 1, 4096) == pytest.approx(3 * 4096 * 1024 * 4 / 2)
    assert program.workspace(LAYER, 1, 1024, 3072)[1] == 0


def test_a_layer_may_have_more_than_its_slice_in_its_backward() -> None:
    program = memory(whole_layer=[1000.0, 500.0], recompute="full", layer_checkpoints=True)
    assert program.workspace(LAYER, 1, 8, 56)[1] == pytest.approx(64 * 1024 * 1500)
