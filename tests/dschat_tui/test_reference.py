"""The documentation of options is current, and the original's flags lead to real options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dschat_tui.cli.options_report import as_markdown, as_text, find_options
from dschat_tui.logs import quantities
from engine.config.loading import ConfigError, options
from engine.log.entries import PairStep, PPOStep, SFTStep, quantity_names

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_options_is_current():
    current = (DOCS / "options.md").read_text(encoding="utf-8")
    assert current == as_markdown(), "run: dschat options --markdown > docs/options.md"


def test_the_page_of_metrics_is_current():
    current = (DOCS / "metrics.md").read_text(encoding="utf-8")
    command = "python -m dschat_tui.logs.quantities > docs/metrics.md"
    assert current == quantities.as_markdown(), f"run: {command}"


@pytest.mark.parametrize("kind", [SFTStep, PairStep, PPOStep])
def test_every_quantity_that_a_step_writes_is_described(kind):
    """Or it would stand in no help, in no page, and under its bare name in a chart."""
    counts = {"total_steps"}
    assert set(quantity_names(kind)) - counts - set(quantities.QUANTITIES) == set()


def test_every_option_is_described():
    text = as_text(find_options(""))
    for option in options():
        assert f"\n{option.key}  (" in f"\n{text}"
        assert option.help
        assert option.title


def test_a_group_and_an_option_can_be_asked_for():
    assert {o.key.split(".")[0] for o in find_options("ppo")} == {"ppo"}
    assert [o.key for o in find_options("ppo.kl_coef")] == ["ppo.kl_coef"]
    with pytest.raises(ConfigError, match=r"ppo\.no"):
        find_options("ppo.no")


def test_every_flag_of_the_original_names_an_existing_option_or_says_why_it_is_gone():
    known = {option.key for option in options()}
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (DOCS / "original-flags.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `--")
    ]
    assert len(rows) > 80
    for flag, _, fields, remark in rows:
        named = re.findall(r"`([^`]+)`", fields)
        assert set(named) <= known, flag
        assert named or remark.startswith("gone: "), flag
