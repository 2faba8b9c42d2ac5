"""From a checked path to a session: the one place that brings in the engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dschat_tui.chat.paths import ModelPath, find_model, relatives
from dschat_tui.chat.session import Generator, Judge, Relatives, Session
from dschat_tui.chat.settings import Settings
from engine.config.loading import load_config
from engine.config.placement import Placement, refusals


def load_session(
    path: str,
    found: ModelPath | None,
    settings: Settings,
    system: str,
    dtype: str,
    tokenizer: str | None,
    trust_remote_code: bool,
    against: Sequence[str],
    placement: Placement,
) -> Session:
    """Load a model and make its relatives loadable; says on stderr what it loads.

    Args:
        path: what the person gave.
        found: the local model it means; None where it is a name.
        settings: how to generate.
        system: the system message.
        dtype: auto, fp32, bf16 or fp16.
        tokenizer: folder or Hub id of the tokenizer, where the model has none.
        trust_remote_code: run Python code that comes with the model.
        against: paths of more models to compare with.
        placement: where weights and cache lie, of those models too.

    Raises:
        ValueError: the placement cannot be had here, or a model cannot be found or loaded, with
            the reason.
    """
    _note("Loading PyTorch ...")
    with _quiet():
        from transformers.utils.logging import disable_progress_bar

        from engine.generation.chat import ChatJudge, divergence
        from engine.models.names import resolve_model
        from engine.precision import resolve_dtype
        from engine.serving import load_generator, this_machine

        # What is downloaded is told with its size; reading a folder takes seconds.
        disable_progress_bar()
        format = resolve_dtype(dtype)
        reasons = refusals(placement, this_machine()) if placement != Placement() else []
    if reasons:
        raise ValueError("\n".join(reasons))

    def load(model: ModelPath, tokenizer: str | None) -> Generator:
        return load_generator(
            model.location, model.name, format, tokenizer, trust_remote_code, placement
        )

    def loader(name: str, place: str, tokenizer: str | None = None) -> Callable[[], Generator]:
        return lambda: load(ModelPath(resolve_model(place), name), tokenizer)

    if found is None:
        location = resolve_model(path)
        if not Path(location).is_dir():
            _announce_hub(location)
        found = ModelPath(location, path)
    _note(f"Loading {found.name} from {found.location} ...")
    generator = load(found, tokenizer)

    generators = {}
    judge = None
    if found.run is not None:
        places = relatives(found.run)
        reward = places.pop("reward", None)
        generators = {name: loader(name, place) for name, place in places.items()}
        if (found.run / "run.yaml").is_file():
            base = load_config(found.run / "run.yaml").models.actor
            # The base model may come without the template; the run's tokenizer has it.
            generators = {"base": loader("base", base, found.location), **generators}
        if reward is not None:

            def judge() -> Judge:
                scorer: Judge = ChatJudge.from_pretrained(reward, format)
                return scorer

    generators.setdefault(found.name, lambda: generator)
    for other in against:
        place = find_model(other)
        generators[other] = loader(other, place.location if place else resolve_model(other))
    if len(generators) == 1:
        generators = {}
    # DeepSpeed-Inference gives the logits of the last token alone.
    compare = None if placement.engine == "deepspeed" else divergence
    return Session(generator, settings, Relatives(generators, judge, compare), system)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DeepSpeed from telling at import which device it found."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _announce_hub(name: str) -> None:
    """Say what will be downloaded from the Hub, and how large it is, before it happens."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    _note(f"There is no folder {name}; looking for it on the Hugging Face Hub.")
    try:
        files = HfApi().model_info(name, files_metadata=True, timeout=10).siblings or []
    except Exception as error:  # of whichever library stands between here and the Hub
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name} is neither a folder here nor reachable on the Hub ({reason}); check the "
            "spelling, or give a local folder."
        ) from None
    weights = [file for file in files if file.rfilename.endswith(".safetensors")] or files
    size = sum(file.size or 0 for file in weights) / 1e6
    _note(f"Downloading {name} from the Hugging Face Hub, {size:.0f} MB.")


def _note(text: str) -> None:
    print(text, file=sys.stderr)
