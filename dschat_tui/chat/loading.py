"""From a checked path to a session: the one place that brings in the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dschat_tui.chat.paths import ModelPath, find_model, relatives
from dschat_tui.chat.session import Generator, Judge, Relatives, Session
from dschat_tui.chat.settings import Settings
from engine.config.loading import load_config
from engine.config.placement import Placement, refusals
from engine.models.names import resolve_model

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoadOptions:
    """How models are loaded.

    Attributes:
        dtype: auto, fp32, bf16 or fp16.
        tokenizer: folder or Hub id of the tokenizer, where the first model has none.
        trust_remote_code: run Python code that comes with a model.
        placement: where weights and cache are kept.
    """

    dtype: str
    tokenizer: str | None
    trust_remote_code: bool
    placement: Placement


def load_session(
    path: str,
    found: ModelPath | None,
    settings: Settings,
    system: str,
    against: Sequence[str],
    options: LoadOptions,
    note: Callable[[str], None],
) -> Session:
    """Load a model, and prepare to load those to compare it with.

    Args:
        path: what the person gave.
        found: the local model it means; None where it is a name.
        settings: how to generate.
        system: the system message.
        against: paths of more models to compare with.
        options: how to load all of them.
        note: called with what is being loaded.

    Raises:
        ValueError: the placement cannot be had here, or a model cannot be found or loaded, with
            the reason.
    """
    note("Loading PyTorch ...")
    with _quiet():
        from transformers.utils.logging import disable_progress_bar

        from engine.generation.chat import divergence
        from engine.precision import resolve_dtype
        from engine.serving import load_generator, this_machine

        # Downloads are announced with their size; reading a folder takes seconds.
        disable_progress_bar()
        dtype, placement = resolve_dtype(options.dtype), options.placement
        reasons = refusals(placement, this_machine()) if placement != Placement() else []
    if reasons:
        raise ValueError("\n".join(reasons))

    def load(model: ModelPath, tokenizer: str | None) -> Generator:
        return load_generator(
            model.location, model.name, dtype, tokenizer, options.trust_remote_code, placement
        )

    def loader(name: str, place: str, tokenizer: str | None) -> Callable[[], Generator]:
        return lambda: load(ModelPath(resolve_model(place), name), tokenizer)

    if found is None:
        location = resolve_model(path)
        if not Path(location).is_dir():
            _announce_download(location, note)
        found = ModelPath(location, path)
    note(f"Loading {found.name} from {found.location} ...")
    generator = load(found, options.tokenizer)
    generators = {name: loader(name, *place) for name, place in _others(found, against).items()}
    generators.setdefault(found.name, lambda: generator)
    # DeepSpeed-Inference returns the logits of the last token alone.
    compare = None if placement.engine == "deepspeed" else divergence
    others = Relatives(
        generators if len(generators) > 1 else {}, _judge_of(found.run, dtype), compare
    )
    return Session(generator, settings, others, system)


def _others(found: ModelPath, against: Sequence[str]) -> dict[str, tuple[str, str | None]]:
    """Model and tokenizer of each model to compare with, by name: of its run, then `against`."""
    places: dict[str, tuple[str, str | None]] = {}
    if found.run is not None:
        if (found.run / "run.yaml").is_file():
            base = load_config(found.run / "run.yaml").models.actor
            # The base model may come without the template; the run's tokenizer has it.
            places["base"] = (base, found.location)
        places |= {name: (place, None) for name, place in relatives(found.run).items()}
        places.pop("reward", None)
    for other in against:
        place = find_model(other)
        places[other] = (place.location if place else resolve_model(other), None)
    return places


def _judge_of(run: Path | None, dtype: torch.dtype) -> Callable[[], Judge] | None:
    """What loads the reward model of a run, or None where there is none."""
    reward = None if run is None else relatives(run).get("reward")
    if reward is None:
        return None

    def load() -> Judge:
        from engine.generation.chat import ChatJudge

        judge: Judge = ChatJudge.from_pretrained(reward, dtype)
        return judge

    return load


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DeepSpeed from logging at its import which device it found."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _announce_download(name: str, note: Callable[[str], None]) -> None:
    """Say what will be downloaded from the Hub, and how large it is, before it happens."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    note(f"There is no folder {name}; looking for it on the Hugging Face Hub.")
    try:
        files = HfApi().model_info(name, files_metadata=True, timeout=10).siblings or []
    except Exception as error:  # of whichever library is used to reach the Hub
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name} is neither a folder here nor reachable on the Hub ({reason}); check the "
            "spelling, or give a local folder."
        ) from None
    weights = [file for file in files if file.rfilename.endswith(".safetensors")] or files
    size = sum(file.size or 0 for file in weights) / 1e6
    note(f"Downloading {name} from the Hugging Face Hub, {size:.0f} MB.")
