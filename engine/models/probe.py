"""What can be done with a model, found out from its config alone.

`python -m engine.models.probe FOLDER` is a process of its own, since who asks before a run must not
import torch. It is for families that the planner does not know; the known ones are tested.
"""

from __future__ import annotations

import argparse
import json
from typing import TypedDict

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from engine.models.folders import ModelError
from engine.models.load import load_config
from engine.models.reward import check_classifier, score_head


class Abilities(TypedDict):
    """Why a model cannot be an actor or a reward model, None where it can be.

    `linear_layers` are the names of those that adapters may go into.
    """

    causal_lm: str | None
    reward_model: str | None
    linear_layers: list[str]


def probe(path: str, trust_remote_code: bool = False) -> Abilities:
    """Build a model of this disk without weights, as a language model and as a reward model."""
    found = Abilities(causal_lm=None, reward_model=None, linear_layers=[])
    try:
        config = load_config(path, trust_remote_code=trust_remote_code)
    except ModelError as error:
        found["causal_lm"] = found["reward_model"] = str(error)
        return found
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        except ValueError as error:
            found["causal_lm"] = str(error).partition("\n")[0]
        else:
            found["linear_layers"] = [
                name
                for name, module in model.named_modules()
                if isinstance(module, (nn.Linear, Conv1D))
            ]
        try:
            check_classifier(config)
            classifier = AutoModelForSequenceClassification.from_config(
                config, trust_remote_code=trust_remote_code
            )
            score_head(classifier)
        except ValueError as error:
            found["reward_model"] = str(error).partition("\n")[0]
    return found


def main() -> None:
    """Print what `probe` finds as JSON, the last line of the output."""
    parser = argparse.ArgumentParser(description="What a model's class can do, as JSON.")
    parser.add_argument("folder")
    parser.add_argument("--trust-remote-code", action="store_true")
    arguments = parser.parse_args()
    print(json.dumps(probe(arguments.folder, arguments.trust_remote_code)))


if __name__ == "__main__":
    main()
