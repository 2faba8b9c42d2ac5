"""Where weights and cache lie: what is refused with which reason, and that answers stay."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dschat_tui.cli.main import app
from engine.config.placement import Machine, Placement, refusals
from engine.generation.chat import ChatGenerator
from engine.generation.decode import DecodeSession
from engine.generation.ragged import RaggedDecoder
from engine.generation.sampling import Sampling
from engine.models.folders import ModelError
from engine.serving import load_generator, this_machine

NOTHING = Machine(cuda=False, bitsandbytes=False, async_io=False, inference_kernels=False)
EVERYTHING = Machine(cuda=True, bitsandbytes=True, async_io=True, inference_kernels=True)
SINGLE = [
    Placement(load_in="8bit"),
    Placement(load_in="4bit"),
    Placement(offload="cpu"),
    Placement(offload="nvme:/disk"),
    Placement(offload_cache=True),
    Placement(engine="deepspeed"),
]


def named(placement: Placement) -> str:
    """The option of a placement of one option."""
    named = {"--load-in": placement.load_in, "--offload ": placement.offload}
    named |= {"--offload-cache": placement.offload_cache}
    return next((option for option, value in named.items() if value), "--engine deepspeed")


@pytest.mark.parametrize("placement", SINGLE)
def test_a_machine_that_has_all_takes_each_option(placement: Placement) -> None:
    assert refusals(placement, EVERYTHING) == []


@pytest.mark.parametrize("placement", SINGLE)
def test_what_a_machine_lacks_is_named_with_the_way_out(placement: Placement) -> None:
    reasons = refusals(placement, NOTHING)
    if placement.offload == "cpu":
        assert reasons == []
        return
    (reason,) = reasons
    assert reason.startswith(named(placement))
    assert "; " in reason


@pytest.mark.parametrize(
    ("placement", "missing", "told"),
    [
        (Placement(load_in="4bit"), "bitsandbytes", "pip install bitsandbytes"),
        (Placement(offload="nvme:/disk"), "async_io", "libaio"),
        (Placement(engine="deepspeed"), "inference_kernels", "deepspeed-kernels"),
    ],
)
def test_a_gpu_alone_is_not_enough(placement: Placement, missing: str, told: str) -> None:
    machine = Machine(**{**vars(EVERYTHING), missing: False})
    (reason,) = refusals(placement, machine)
    assert told in reason


def test_only_the_cache_goes_with_another_option() -> None:
    for bits, offload in product(("8bit", "4bit"), ("cpu", "nvme:/disk")):
        (reason,) = refusals(Placement(load_in=bits, offload=offload), EVERYTHING)
        assert bits in reason
        assert offload in reason
    for other in SINGLE[:5]:
        both = Placement(**{**vars(other), "engine": "deepspeed"})
        assert "--engine hf" in refusals(both, EVERYTHING)[0]
    assert refusals(Placement(load_in="4bit", offload_cache=True), EVERYTHING) == []


@pytest.mark.parametrize("text", ["disk", "nvme", "nvme:", ""])
def test_offload_is_cpu_or_a_folder(text: str) -> None:
    with pytest.raises(ValueError, match="cpu or nvme:FOLDER"):
        Placement(offload=text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_gpu_refuses_what_needs_one() -> None:
    machine = this_machine()
    for placement in (SINGLE[0], SINGLE[4], SINGLE[5]):
        assert refusals(placement, machine)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_chat_is_refused_before_its_model_is_loaded(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr("engine.serving.load_generator", lambda *arguments: 1 / 0)
    options = ["--load-in", "4bit", "--offload-cache", "--prompt", "hi"]
    told = CliRunner().invoke(app, ["chat", "--path", tiny_model("llama"), *options])
    assert (told.exit_code, told.stdout) == (2, "")
    reasons = [line for line in told.stderr.splitlines() if line.startswith("dschat chat: ")]
    assert [reason.split()[2] for reason in reasons] == ["--load-in", "--offload-cache:"]


def talk(generator: ChatGenerator) -> list[str]:
    """Two rounds, the second after a change of the first, greedy."""
    answers = []
    for questions in (["one"], ["one", "two"], ["ten", "two"]):
        messages = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            answers.append("".join(generator.stream(messages, max_new_tokens=6)))
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_offloaded_weights_answer_as_whole_ones(family: str, tiny_model, group) -> None:
    path = tiny_model(family)
    whole = load_generator(path, "whole", torch.float32)
    offloaded = load_generator(path, "off", torch.float32, placement=Placement(offload="cpu"))
    sharded = list(offloaded.model.parameters())
    assert all(hasattr(parameter, "ds_id") for parameter in sharded)
    expected = talk(whole)
    assert any(expected)
    assert talk(offloaded) == expected


def test_an_offloaded_cache_holds_what_a_near_one_holds(tiny_model) -> None:
    path = tiny_model("llama")
    near = load_generator(path, "near", torch.float32)
    far = load_generator(path, "far", torch.float32, placement=Placement(offload_cache=True))
    assert talk(far) == talk(near)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("placement", SINGLE[:5])
def test_a_gpu_answers_wherever_weights_and_cache_lie(
    placement: Placement, tiny_model, tmp_path, group
) -> None:
    if placement.nvme_folder:
        placement = Placement(offload=f"nvme:{tmp_path}")
    reasons = refusals(placement, this_machine())
    if reasons:
        pytest.skip(reasons[0])
    path = tiny_model("llama")
    answers = talk(load_generator(path, "placed", torch.float32, placement=placement))
    whole = talk(load_generator(path, "whole", torch.float32))
    assert len(answers) == len(whole)
    if not placement.load_in:
        assert answers == whole


@pytest.mark.parametrize("error", [MissingCUDAException, CUDAMismatchException, ValueError])
def test_kernels_that_do_not_build_are_an_answer_and_no_crash(
    error: type[Exception], tiny_model, monkeypatch, group
) -> None:
    def fail(*arguments: object) -> None:
        raise error("CUDA_HOME does not exist")

    monkeypatch.setattr("engine.serving.build_ragged_decoder", fail)
    placement = Placement(engine="deepspeed")
    with pytest.raises(ModelError, match=r"CUDA_HOME does not exist.*use --engine hf"):
        load_generator(tiny_model("llama"), "kernels", torch.bfloat16, placement=placement)


class Appending:
    """An engine as DeepSpeed-Inference's: takes tokens, keeps them, forgets all or nothing."""

    def __init__(self, model) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.taken: list[int] = []

    def put(self, uids, tokens):
        """Logits after the last token."""
        self.taken.append(len(tokens[0]))
        self.tokens += tokens[0].tolist()
        return self.model(input_ids=torch.tensor([self.tokens])).logits[:, -1]

    def flush(self, uid) -> None:
        """Forget the sequence."""
        self.tokens = []


def test_an_engine_that_only_appends_follows_a_conversation(tiny_model) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval()
    engine = Appending(model)
    session = DecodeSession(RaggedDecoder(engine, torch.device("cpu")))
    sampling = Sampling(max_new_tokens=3, eos_ids=(), pad_id=1, greedy=True)

    def answer(*tokens: int) -> list[int]:
        session.feed(list(tokens))
        return [token for token, _ in session.stream(sampling)]

    def alone(*tokens: int) -> list[int]:
        ids = torch.tensor([tokens])
        for _ in range(3):
            ids = torch.cat((ids, model(input_ids=ids).logits[:, -1:].argmax(dim=-1)), dim=1)
        return ids[0, len(tokens) :].tolist()

    first = answer(5, 6, 7)
    assert first == alone(5, 6, 7)
    assert engine.taken == [3, 1, 1]
    following = (5, 6, 7, *first, 8)
    assert answer(*following) == alone(*following)
    # The last token of the first answer and the new one.
    assert engine.taken[3] == 2
    assert answer(5, 9) == alone(5, 9)
    assert engine.tokens[:2] == [5, 9]
