"""Profiles of DeepSpeed-Chat's scripts against the facts of those scripts.

Batch sizes there are of a device, here of an optimizer step: rows x accumulation x devices. With
LoRA `lora.only` stands for the base weights that LoRA froze there (only_optimize_lora or not).
"""

from __future__ import annotations

import pytest

from engine.config.loading import load_profile
from engine.config.schema import RunConfig

# profile, model, devices, rows a device, accumulation, learning rate, weight decay, epochs, ZeRO,
# LoRA rank, checkpointing, offload, dropout (- the model's own), rows a device in evaluation
SFT = """
opt-1.3b-one-gpu       facebook/opt-1.3b          1 16  8 1e-3    0.0  1 0 128 no  no - 16
opt-6.7b-lora-one-gpu  facebook/opt-6.7b          1  8 16 1e-3    0.0 16 0 128 yes no - 8
opt-1.3b               facebook/opt-1.3b          8  8  1 9.65e-6 0.0 16 2   0 no  no - 8
opt-1.3b-lora          facebook/opt-1.3b          8  8  1 1e-3    0.1 16 0 128 no  no - 8
opt-6.7b               facebook/opt-6.7b          8  6  1 9.65e-6 0.0 16 3   0 yes no - 6
opt-13b                facebook/opt-13b           8  4  1 1e-4    0.0 16 3 128 yes no - 4
opt-30b-lora           facebook/opt-30b           8  4  1 9.65e-6 0.0 16 3 128 yes no - 4
opt-66b                facebook/opt-66b          64  4  1 1e-4    0.1  2 3 128 yes no - 4
llama2-7b              meta-llama/Llama-2-7b-hf   8  4  1 9.65e-6 0.0  4 3   0 yes no - 4
llama2-7b-lora         meta-llama/Llama-2-7b-hf   8  4  1 9.65e-6 0.0  4 3 128 yes no - 4
llama2-7b-mixz         meta-llama/Llama-2-7b-hf   8  4  1 9.65e-6 0.0  4 3 128 yes no - 4
llama2-7b-dpo          meta-llama/Llama-2-7b-hf   8  4  1 9.65e-6 0.0  4 3   0 yes no - 4
llama2-7b-lora-dpo     meta-llama/Llama-2-7b-hf   8  4  1 9.65e-6 0.0  4 3 128 yes no - 4
bloom-1b1-chinese      bigscience/bloom-1b1       8  8  1 9.65e-6 0.0 16 2   0 no  no - 8
mgpt-japanese          ai-forever/mGPT            8  2  1 9.65e-6 0.0 16 2   0 no  no - 2
"""
REWARD = """
opt-1.3b-one-gpu       facebook/opt-350m          1 16  4 5e-5    0.1  1 0   0 no  no  0.0 16
opt-6.7b-lora-one-gpu  facebook/opt-350m          1 16  4 5e-5    0.1  1 0   0 no  no  0.0 16
opt-1.3b               facebook/opt-350m          8  4  1 5e-5    0.1  1 0   0 no  no  0.0 4
opt-1.3b-lora          facebook/opt-350m          8  4  1 5e-5    0.1  1 0   0 no  no  0.0 4
opt-6.7b               facebook/opt-350m          8  4  1 5e-5    0.1  1 0   0 no  no  0.0 4
opt-13b                facebook/opt-350m          8  4  1 5e-5    0.1  1 0   0 no  no  0.0 4
opt-30b-lora           facebook/opt-350m          8  4  1 5e-5    0.1  1 0   0 no  no  0.0 4
opt-66b                facebook/opt-350m         64  2  1 5e-5    0.1  1 0   0 no  no  0.0 2
llama2-7b              meta-llama/Llama-2-7b-hf   8  8  1 9.65e-6 0.1  1 3   0 yes yes - 8
llama2-7b-lora         meta-llama/Llama-2-7b-hf   8  8  1 9.65e-6 0.1  1 3 128 yes yes - 8
llama2-7b-mixz         meta-llama/Llama-2-7b-hf   8  8  1 9.65e-6 0.1  1 3 128 yes yes - 8
"""
DPO = """
opt-350m-dpo-one-gpu   facebook/opt-350m          1 16  4 5e-5    0.1  1 0   0 no  no  0.0 16
opt-350m-dpo           facebook/opt-350m          8  4  1 5e-5    0.1  1 0   0 no  no  0.0 4
opt-350m-dpo-nodes     facebook/opt-350m         64  2  1 5e-5    0.1  1 0   0 no  no  0.0 2
llama2-7b-dpo          meta-llama/Llama-2-7b-hf   8  8  1 9.65e-6 0.1  1 3   0 yes yes - 8
llama2-7b-lora-dpo     meta-llama/Llama-2-7b-hf   8  8  1 9.65e-6 0.1  1 3 128 yes yes - 8
"""
# profile, devices, prompts a device in generation, rows a device in training, accumulation, then of
# actor and critic: learning rate, weight decay, ZeRO, LoRA rank, checkpointing; then hybrid engine,
# reference offloaded, EMA, MixZ
PPO = """
opt-1.3b-one-gpu       1 16 16  2 9.65e-6      5e-6 0.0 0 0 128  0 yes no  yes no  no  no
opt-6.7b-lora-one-gpu  1  8  8 16 5e-4         5e-6 0.0 0 0 128  0 yes yes yes no  no  no
opt-1.3b               8  4  4  1 9.65e-6      5e-6 0.0 2 2   0  0 no  no  yes no  yes no
opt-1.3b-lora          8  4  4  1 9.65e-6      5e-6 0.0 2 2 128  0 no  no  yes no  no  no
opt-6.7b               8  4  4  1 9.65e-6      5e-6 0.1 3 3   0  0 yes no  yes no  no  no
opt-13b                8 16 16  1 5e-4         5e-6 0.0 3 3 128  0 yes no  yes no  no  no
opt-30b-lora           8  4  4  1 5e-4         5e-6 0.0 3 3 128  0 yes no  yes no  no  no
opt-66b               64  4  4  1 5e-4         5e-6 0.1 3 3 128  0 yes no  off no  no  no
llama2-7b              8  1  1  1 9.65e-6      5e-6 0.1 3 3   0  0 yes yes yes yes no  no
llama2-7b-lora         8  1  1  1 9.65e-6      5e-6 0.1 3 3  64 64 yes yes yes yes no  no
llama2-7b-mixz         8  1  1  1 9.65e-6      5e-6 0.1 3 3  64 64 yes yes no  yes no  yes
"""


def rows(table: str):
    return [pytest.param(line.split(), id=line.split()[0]) for line in table.strip().splitlines()]


def told(flag: bool) -> str:
    return "yes" if flag else "no"


def devices_of(config: RunConfig) -> int:
    return config.launch.num_accelerators * (config.launch.num_nodes or 1)


@pytest.mark.parametrize(
    ("step", "facts"),
    [pytest.param("sft", *row.values, id=f"sft-{row.id}") for row in rows(SFT)]
    + [pytest.param("reward", *row.values, id=f"reward-{row.id}") for row in rows(REWARD)]
    + [pytest.param("dpo", *row.values, id=f"dpo-{row.id}") for row in rows(DPO)],
)
def test_steps_1_and_2_have_the_settings_of_the_script(step, facts):
    profile, model, devices, micro, accumulation, rate, decay, epochs, *layout = facts
    zero, rank, checkpointing, offload, dropout, evaluated = layout
    config = load_profile(profile).for_step(step)
    options = getattr(config, step)
    role = config.critic if step == "reward" else config.actor
    assert (config.models.reward if step == "reward" else config.models.actor) == model
    assert config.alignment == ("dpo" if profile.partition("-dpo")[1] else "ppo")
    assert devices_of(config) == int(devices)
    assert options.micro_batch_size == int(micro)
    assert options.batch_size == int(micro) * int(accumulation) * int(devices)
    assert options.eval_batch_size == int(evaluated)
    assert (options.learning_rate, options.weight_decay) == (float(rate), float(decay))
    assert options.epochs == int(epochs)
    assert role.zero_stage == int(zero)
    assert (role.lora.rank, role.lora.only) == (int(rank), int(rank) > 0)
    assert role.lora.learning_rate == 5e-4
    assert told(role.gradient_checkpointing) == checkpointing
    assert told(role.offload) == offload
    assert role.dropout == (None if dropout == "-" else float(dropout))


@pytest.mark.parametrize("facts", rows(PPO))
def test_step_3_has_the_settings_of_the_script(facts):
    profile, devices, generated, trained, accumulation, actor_rate, critic_rate, decay, *rest = (
        facts
    )
    actor_zero, critic_zero, actor_rank, critic_rank, actor_saves, critic_saves, *features = rest
    hybrid, ref_offload, ema, mixz = features
    config = load_profile(profile).for_step("ppo")
    ppo, actor, critic = config.ppo, config.actor, config.critic
    assert devices_of(config) == int(devices)
    assert (ppo.generation_batch_size, ppo.micro_batch_size) == (int(generated), int(trained))
    assert ppo.batch_size == int(trained) * int(accumulation) * int(devices)
    # several generation batches there are one rollout batch here, if one optimizer step takes them
    assert ppo.rollout_batch_size == ppo.batch_size
    assert ppo.inner_epochs == ppo.epochs == 1
    assert actor.learning_rate == float(actor_rate)
    assert critic.learning_rate == float(critic_rate)
    assert actor.weight_decay == critic.weight_decay == float(decay)
    assert (actor.zero_stage, critic.zero_stage) == (int(actor_zero), int(critic_zero))
    assert (actor.lora.rank, critic.lora.rank) == (int(actor_rank), int(critic_rank))
    assert told(actor.gradient_checkpointing) == actor_saves
    assert told(critic.gradient_checkpointing) == critic_saves
    assert not actor.offload
    assert not critic.offload
    # off, for want of memory, where the original cut the weights over devices to generate
    assert told(config.hybrid_engine.enabled) == ("no" if hybrid == "off" else hybrid)
    assert told(config.ref.offload) == ref_offload
    assert told(config.ema.enabled) == ema
    assert told(config.mixz.enabled) == mixz
    assert [source.path for source in config.data.sources] == ["Dahoas/rm-static"]
    assert not actor.dropout


PROFILES = sorted({row.id for row in rows(SFT) + rows(DPO)})


@pytest.mark.parametrize("profile", PROFILES)
def test_what_all_scripts_share(profile):
    config = load_profile(profile)
    assert config.dtype == "fp16"
    assert config.seed == 1234
    assert {config.sft.scheduler, config.reward.scheduler, config.ppo.scheduler} == {"cosine"}
    assert (config.sft.warmup_steps, config.reward.warmup_steps, config.ppo.warmup_steps) == (
        0,
        0,
        100,
    )
    assert config.sft.max_length == config.reward.max_length == config.dpo.max_length == 512
    assert (config.dpo.beta, config.dpo.label_smoothing) == (0.1, 0.0)
    assert config.ppo.max_prompt_length == config.ppo.max_answer_length == 256
    assert (config.ppo.kl_coef, config.ppo.clip, config.ppo.value_clip) == (0.1, 0.2, 0.2)
    assert (config.ppo.gamma, config.ppo.gae_lambda, config.ppo.reward_clip) == (1.0, 0.95, 5.0)
    assert config.actor.lora.targets == config.critic.lora.targets == []
    split = (10, 0, 0) if profile in ("bloom-1b1-chinese", "mgpt-japanese") else (2, 4, 4)
    assert config.data.split == split
    deployments = {1: "single_gpu", 8: "single_node", 64: "multi_node"}
    assert config.launch.deployment == deployments[devices_of(config)]
