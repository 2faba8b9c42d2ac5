"""Plans of whole runs: what was reported to fit, what each feature changes, what is proposed."""

import dataclasses
import subprocess
import sys

import pytest

from engine.config.rules import check
from engine.config.schema import RunConfig
from engine.planning import ModelShape, plan_memory, smallest_change

GIB = 2**30
LLAMA_2_7B = ModelShape.from_config(
    {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
    }
)
OPT_13B = ModelShape.from_config(
    {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 5120,
        "ffn_dim": 20480,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "max_position_embeddings": 2048,
    }
)
OPT_350M = ModelShape.from_config(
    {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    }
)


def configuration(ranks: int = 1, **values) -> RunConfig:
    """Step 3 alone, on one node."""
    models = {"sft": "a", "trained_reward": "b"}
    launch = {"deployment": "single_node", "num_accelerators": ranks}
    return RunConfig.model_validate({"models": models, "launch": launch, **values})


def llama(ranks: int, lora: bool = False, offload: bool = False) -> RunConfig:
    """Settings of the release's scripts run_llama2_7b.sh and run_llama2_7b_lora.sh, step 3."""
    role = {
        "zero_stage": 3,
        "offload": offload,
        "gradient_checkpointing": True,
        # The release's LoRA froze the layers that it was put into.
        "lora": {"rank": 64 if lora else 0, "only": lora},
    }
    return configuration(
        ranks,
        actor=role,
        critic=role,
        ref={"offload": True, "share_actor": False},
        hybrid_engine={"enabled": True},
        ppo={"batch_size": ranks, "rollout_batch_size": ranks},
    )


@pytest.mark.parametrize(
    ("ranks", "lora", "offload", "fits"),
    [
        (16, False, False, True),
        (8, False, False, False),
        (4, True, False, True),
        (2, True, False, False),
        (1, True, True, True),
        (1, True, False, False),
    ],
)
def test_llama_2_7b_on_v100_as_released(ranks, lora, offload, fits):
    """DeepSpeed-Chat of 2023-08-31, figure 4: V100-32GB needed are 16, with LoRA 4, offload 1."""
    config = llama(ranks, lora, offload)
    plan = plan_memory(config, LLAMA_2_7B, dtype="fp16")
    assert not check(config)
    assert plan.fits(32 * GIB) == fits


def test_opt_13b_on_eight_40_gb_devices_as_released():
    """Settings of the release's run_13b.sh for eight A100-40GB."""
    config = configuration(
        8,
        actor={
            "zero_stage": 3,
            "gradient_checkpointing": True,
            "lora": {"rank": 128, "only": True},
        },
        critic={"zero_stage": 3},
        hybrid_engine={"enabled": True},
        ppo={"batch_size": 128, "rollout_batch_size": 128},
    )
    assert plan_memory(config, OPT_13B, OPT_350M, dtype="fp16").fits(40 * GIB)
    replicated = config.model_copy(deep=True)
    replicated.actor.zero_stage = 0
    assert not plan_memory(replicated, OPT_13B, OPT_350M, dtype="fp16").fits(40 * GIB)


def opt_1_3b(**values) -> int:
    """Device bytes of a smaller run on two devices, in which each feature shows."""
    shape = dataclasses.replace(OPT_350M, layers=60)
    return plan_memory(configuration(2, **values), shape, dtype="bf16").device_bytes


def test_each_feature_moves_memory_its_way():
    plain = opt_1_3b()
    sharded = [opt_1_3b(actor={"zero_stage": stage}) for stage in (1, 2, 3)]
    assert plain > sharded[0] > sharded[1]
    offloaded = opt_1_3b(actor={"zero_stage": 2, "offload": True})
    assert offloaded < sharded[1]
    lora = {"rank": 16, "only": True}
    assert opt_1_3b(actor={"lora": lora}) < opt_1_3b(actor={"lora": {"rank": 16}})
    shared = opt_1_3b(actor={"lora": lora})
    separate = opt_1_3b(actor={"lora": lora}, ref={"share_actor": False})
    shape = dataclasses.replace(OPT_350M, layers=60)
    assert separate - shared == 2 * shape.parameters
    assert opt_1_3b(ppo={"batch_size": 64, "rollout_batch_size": 64}) > plain


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_the_average_of_the_actor_is_a_slice_per_rank_that_lies_with_its_optimizer(stage, offload):
    def figures(enabled: bool) -> tuple[int, int, int]:
        role = {"zero_stage": stage, "offload": offload}
        config = configuration(4, actor=role, ema={"enabled": enabled})
        plan = plan_memory(config, OPT_350M, dtype="bf16")
        (step,) = plan.steps
        # What is held between the updates, without what saving takes for a moment.
        on_device, on_host = step.phases()["train critic"]
        return on_device, on_host, step.node_phases(4)["train critic"]

    device, host, node = (a - b for a, b in zip(figures(True), figures(False), strict=True))
    # Each of four ranks has four bytes for a quarter of the parameters.
    expected = (0, OPT_350M.parameters) if offload else (OPT_350M.parameters, 0)
    assert (device, host) == expected
    assert node == 4 * host


def test_only_the_first_rank_holds_a_file_of_the_model_that_is_saved():
    step = plan_memory(llama(8), LLAMA_2_7B, dtype="fp16").steps[0]
    _, between = step.phases()["update actor"]
    _, saving = step.phases()["save actor"]
    # 13.5 GB of weights are written in files of 5 GB.
    assert saving - between == 5 * 10**9
    assert step.node_phases(8)["save actor"] == 8 * between + 5 * 10**9
    small = plan_memory(configuration(8), OPT_350M, dtype="fp16").steps[0]
    assert small.phases()["save actor"][1] == 2 * OPT_350M.parameters


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("option", "model"), [("offload", "reference"), ("offload_reward", "reward")]
)
def test_an_offloaded_frozen_model_lies_on_the_host(option, model, stage):
    def weights(offload: bool) -> tuple[int, int]:
        role = {"zero_stage": stage}
        config = configuration(2, actor=role, critic=role, ref={option: offload})
        items = plan_memory(config, OPT_350M, dtype="bf16").steps[0].items
        (item,) = (i for i in items if (i.model, i.what) == (model, "weights"))
        return item.device_bytes, item.host_bytes

    # Offloaded it is sharded too, whatever the stage of the model that trains.
    shard = weights(offload=False)[0] // (1 if stage == 3 else 2)
    assert weights(offload=False)[1] == 0
    assert weights(offload=True) == (0, shard)


def test_checkpointing_trades_activations_alone():
    def items(checkpointing: bool) -> dict[tuple[str, str, str], int]:
        config = configuration(critic={"gradient_checkpointing": checkpointing})
        step = plan_memory(config, OPT_350M, dtype="bf16").steps[-1]
        return {(i.model, i.what, i.phase): i.device_bytes for i in step.items}

    without, with_it = items(False), items(True)
    changed = {key for key in without if without[key] != with_it[key]}
    assert changed == {("critic", "activations", "train critic")}
    (key,) = changed
    assert with_it[key] < without[key] / 4


def test_mixz_halves_the_frozen_weights():
    def weights(enabled: bool) -> int:
        lora = {"rank": 8, "only": True}
        config = configuration(2, actor={"zero_stage": 3, "lora": lora}, mixz={"enabled": enabled})
        step = plan_memory(config, OPT_13B, OPT_350M, dtype="bf16").steps[-1]
        return next(i.device_bytes for i in step.items if (i.model, i.what) == ("actor", "weights"))

    assert weights(True) == pytest.approx(weights(False) / 2, rel=0.02)


def test_steps_follow_the_models_that_are_there():
    config = RunConfig()
    assert [s.step for s in plan_memory(config, OPT_350M, dtype="bf16").steps] == [
        "sft",
        "reward",
        "ppo",
    ]
    assert [s.step for s in plan_memory(configuration(), OPT_350M, dtype="bf16").steps] == ["ppo"]


def test_without_a_critic_none_is_counted_and_nothing_of_its_states():
    """Every other item is there as it was."""

    def items(algorithm):
        rlhf = {"algorithm": algorithm}
        step = plan_memory(configuration(rlhf=rlhf), OPT_350M, dtype="bf16").steps[-1]
        return {(i.model, i.what, i.phase): i.device_bytes for i in step.items}

    ppo, grpo = items("ppo"), items("grpo")
    gone = ppo.keys() - grpo.keys()
    assert {model for model, _, _ in grpo} == {"process", "actor", "reference", "reward"}
    assert all(model == "critic" or phase == "train critic" for model, _, phase in gone)
    # of 0.331 billion parameters: in bf16, and in fp32 with both of Adam's moments
    saved = sum(ppo[key] for key in gone if key[0] == "critic" and key[2] == "always")
    assert saved == pytest.approx((2 + 12) * 0.331e9, rel=0.01)
    assert {key: grpo[key] for key in grpo} == {key: ppo[key] for key in grpo}


def test_a_cpu_holds_everything_on_the_host_of_all_its_ranks():
    plan = plan_memory(configuration(2), OPT_350M, dtype="fp32", device="cpu")
    assert plan.device_bytes == 0
    assert plan.node_host_bytes == 2 * plan.steps[0].host_bytes
    assert plan.fits(plan.node_host_bytes)
    assert not plan.fits(plan.node_host_bytes - 1)


def test_offload_is_bound_by_the_host_too():
    plan = plan_memory(llama(1, lora=True, offload=True), LLAMA_2_7B, dtype="fp16")
    assert plan.fits(32 * GIB, host_memory_bytes=64 * GIB)
    assert not plan.fits(32 * GIB, host_memory_bytes=16 * GIB)


def test_a_single_change_is_found_and_fits():
    config = configuration(
        actor={"gradient_checkpointing": True},
        critic={"gradient_checkpointing": True},
        ppo={"batch_size": 64, "rollout_batch_size": 64},
    )
    memory = 14 * GIB
    assert not plan_memory(config, OPT_350M, dtype="bf16").fits(memory)
    change = smallest_change(config, OPT_350M, memory_bytes=memory, dtype="bf16")
    assert change is not None
    assert change.plan.fits(memory)
    assert len(change.assignments) == 1
    assert str(change) == " and ".join(f"{k}={v}" for k, v in change.assignments.items())


def test_what_fits_needs_no_change():
    change = smallest_change(configuration(), OPT_350M, memory_bytes=80 * GIB, dtype="bf16")
    assert change is not None
    assert change.assignments == {}


def test_a_pair_is_found_where_no_single_change_is_enough():
    config = llama(1)
    change = smallest_change(config, LLAMA_2_7B, memory_bytes=32 * GIB, dtype="fp16")
    assert change is not None
    assert set(change.assignments) == {"actor.offload", "critic.offload"}


def test_no_proposal_breaks_a_rule():
    """ZeRO-2 with offload, hybrid engine and no LoRA is refused, so it is not proposed."""
    config = configuration(
        2,
        actor={"zero_stage": 2},
        critic={"zero_stage": 2},
        hybrid_engine={"enabled": True},
        ppo={"batch_size": 2, "rollout_batch_size": 2},
    )
    current = plan_memory(config, LLAMA_2_7B, OPT_350M, dtype="fp16").device_bytes
    for share in (0.9, 0.7, 0.5):
        change = smallest_change(
            config, LLAMA_2_7B, OPT_350M, memory_bytes=int(current * share), dtype="fp16"
        )
        assert change is not None
        assert change.plan.fits(int(current * share))
        proposed = config.model_copy(deep=True)
        for key, value in change.assignments.items():
            *groups, field = key.split(".")
            owner = proposed
            for group in groups:
                owner = getattr(owner, group)
            setattr(owner, field, value)
        assert not check(proposed)


def test_nothing_is_proposed_where_nothing_helps():
    config = configuration()
    assert smallest_change(config, LLAMA_2_7B, memory_bytes=GIB, dtype="fp16") is None


@pytest.mark.parametrize(("dtype", "least", "most"), [("fp32", 0, 32), ("bf16", 186, 310)])
def test_holes_of_a_large_model_are_those_of_blocks_that_lie_in_the_heap(dtype, least, most):
    """Step 1 of run_llama2_7b_lora.sh, 2,048 tokens at once: MiB of holes per block and rank.

    In fp32 hidden states take 32 MiB, which glibc maps: of all that a block frees, halves of
    queries and keys alone, 16 MiB each, come from the heap. In bf16 four such blocks, run with
    transformers and peft, left 991 MiB free in the heap.
    """
    lora = {"rank": 64, "only": True}
    config = RunConfig.model_validate(
        {
            "launch": {"deployment": "single_node", "num_accelerators": 8},
            "actor": {"zero_stage": 3, "gradient_checkpointing": True, "lora": lora},
            "sft": {"batch_size": 32, "micro_batch_size": 4, "max_length": 512},
        }
    )
    step = plan_memory(config, LLAMA_2_7B, dtype=dtype, device="cpu").steps[0]
    holes = sum(item.host_bytes for item in step.items if "holes" in item.what)
    assert step.step == "sft"
    assert least * 2**20 <= holes / LLAMA_2_7B.layers <= most * 2**20


def test_planning_brings_in_no_torch():
    code = "import sys, engine.planning; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
