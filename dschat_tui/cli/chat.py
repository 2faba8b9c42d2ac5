"""`dschat chat`: talk with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

PathOption = Annotated[
    str, typer.Option(help="Folder of a run or of a model, or the id of a model on the Hub.")
]
LoadIn = Annotated[
    Literal["8bit", "4bit"] | None,
    typer.Option(help="Quantise the weights while loading (bitsandbytes, CUDA)."),
]
Offload = Annotated[
    str | None,
    typer.Option(
        metavar="cpu|nvme:FOLDER",
        help="Keep the weights in host memory or on disk, a layer at a time on the device.",
    ),
]
Engine = Annotated[
    Literal["hf", "deepspeed"],
    typer.Option(help="hf, or deepspeed for DeepSpeed-Inference (CUDA)."),
]
EvalFile = Annotated[
    Path | None,
    typer.Option("--eval", help="Ask the prompts of this file of every model, show a table."),
]


def chat(
    path: PathOption,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Of sampling; 0 always takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens with this share.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from so many likeliest tokens; 0 is off.")
    ] = 0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 makes used tokens less likely.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Makes sampled answers repeatable.")
    ] = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    load_in: LoadIn = None,
    offload: Offload = None,
    offload_cache: Annotated[
        bool,
        typer.Option("--offload-cache", help="Keep keys and values in host memory (CUDA)."),
    ] = False,
    engine: Engine = "hf",
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the tokenizer, if the model has none.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    against: Annotated[
        list[str] | None, typer.Option(help="Another model to compare with; several times.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Answer this one question and end.")] = None,
    eval_file: EvalFile = None,
    output: Annotated[
        Path | None, typer.Option(help="Write that table here: CSV if it ends so, else JSONL.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line on stdout.")
    ] = False,
) -> None:
    """Talk with a model."""
    from dschat_tui.chat.loading import LoadOptions
    from dschat_tui.chat.settings import Settings
    from dschat_tui.cli import repl
    from engine.config.placement import Placement

    try:
        settings = Settings(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed)
        placement = Placement(load_in, offload, offload_cache, engine)
    except ValueError as error:
        raise typer.Exit(repl.refuse(error)) from None
    options = LoadOptions(dtype, tokenizer, trust_remote_code, placement)
    raise typer.Exit(
        repl.main(
            path, settings, options, system, against or [], prompt, eval_file, output, as_json
        )
    )
