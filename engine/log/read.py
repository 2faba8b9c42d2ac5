"""Reads training.log: the lines of any DeepSpeed-Chat log, of any year, and our own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from engine.config.steps import BY_NAME
from engine.log.causes import Cause
from engine.log.foreign import (
    CONTROL,
    LONGEST_LINE,
    Surroundings,
    clean_parts,
    head_of,
    torn_parts,
    without_stamps,
)
from engine.log.write import METRIC_NAME, SEPARATOR


def _number(name: str) -> str:
    # Loose, for speed: what is not a number fails when it is converted.
    return rf"(?P<{name}>[-+.0-9aefinNA]+)"


def _last_number(name: str) -> str:
    # Strict at the end of a line, where a torn line may leave half a number.
    return rf"(?P<{name}>[-+]?(?:[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|nan|inf)|NA)"


def _count(name: str) -> str:
    return rf"(?P<{name}>[0-9]+)"


class _Form:
    """One kind of line: a pattern whose groups are the numbers by name."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        compiled = re.compile(pattern)
        self._match = compiled.fullmatch
        self._names = list(compiled.groupindex)
        counts = re.findall(r"\(\?P<(\w+)>\[0-9\]\+\)", pattern)
        self._counts = [index for index, name in enumerate(self._names) if name in counts]

    def read(self, line: str, record: dict[str, Any]) -> bool:
        """Add the line's numbers to `record`; False, and nothing added, for any other line.

        Raises:
            ValueError: the line has the form, but something else is where a number should be.
        """
        match = self._match(line)
        if match is None:
            return False
        texts = match.groups()
        values: list[float | None]
        try:
            # Usually all are present, and this path saves 5 % of reading a log.
            values = list(map(float, texts))
        except (TypeError, ValueError):
            values = [None if text is None or text == "NA" else float(text) for text in texts]
        for index in self._counts:
            values[index] = int(texts[index])
        record.update(zip(self._names, values, strict=True))
        return True


_RUNNING = re.compile(r"\*{5} Running training(?P<ppo> \(total_iters=[0-9]+\))? \*{5}")
_BEGINNING = re.compile(
    rf"Beginning of Epoch {_count('epoch')}/{_count('epochs')}, "
    rf"Total (?:Micro|(?P<generation>Generation)) Batches (?P<batches>[0-9]+)"
)
_OPTIMIZER = re.compile(
    r"step=([0-9]{1,15}), skipped=([0-9]{1,15}), lr=\[([^\]]*)\], mom=(?:\[[^\]]*\]|None)"
)
_LEARNING_RATE = re.compile(r"(?<![\w.])[-+]?(?:[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|nan|inf)")
_EVALUATING = re.compile(
    rf"\*{{5}} Evaluating (?P<what>perplexity|rewards?), "
    rf"Epoch {_count('epoch')}/{_count('epochs')} \*{{5}}"
)
_PERPLEXITY = _Form(rf"ppl: {_last_number('ppl')}(?:, loss: {_last_number('loss')})?")
_STEP_LOSS = _Form(
    rf"Epoch: {_count('epoch')}, Step: {_count('step')}, Rank: {_count('rank')}, "
    rf"loss = {_last_number('loss')}"
)
_THROUGHPUT = _Form(
    rf"Model Parameters: [^,]*, Latency: {_number('latency_s')}s, TFLOPs: {_number('tflops')}, "
    rf"Samples/sec: {_number('samples_per_s')}, Time/seq [^,]*, "
    rf"Batch Size: {_count('batch_size')}, Sequence Length: {_count('sequence_length')}"
)
_REWARD_SCORES = _Form(
    rf"chosen_last_scores \(higher is better\) : {_number('chosen')}, "
    rf"(?:reject(?:ed)?_last_scores \((?:lower|higher) is better\) : {_number('rejected')}, )?"
    rf"acc \(higher is better\) : {_last_number('accuracy')}"
)
_REWARD_SCORES_AT = _Form(
    rf"Iter {_count('step')}: c_scores: {_number('chosen')}, r_scores: {_number('rejected')}, "
    rf"diff: [^,]+, acc: {_last_number('accuracy')}"
)
_EPOCH_LOSS = _Form(rf"Epoch {_count('epoch')}/[0-9]+ with loss {_last_number('loss')}")
_DPO_SCORES = _Form(
    rf"chosen: {_number('chosen')}, rejected: {_number('rejected')}, loss: {_last_number('loss')}"
)
_PPO_LOSSES = _Form(
    rf"Epoch: {_count('epoch')} \| Step: {_count('step')} \| PPO Epoch: {_count('ppo_epoch')} \| "
    rf"Actor Loss: {_number('actor_loss')} \| Critic Loss: {_number('critic_loss')} \| "
    rf"Unsupervised Loss: {_last_number('unsupervised_loss')}"
)
_PPO_LOSSES_APRIL_2023 = _Form(
    rf"epoch: {_count('epoch')}\|step: {_count('step')}\|ppo_ep: {_count('ppo_epoch')}\|"
    rf"act_loss: {_number('actor_loss')}\|cri_loss: {_number('critic_loss')}\|"
    rf"unsuper_loss: {_last_number('unsupervised_loss')}"
)
_END_TO_END = _Form(
    rf"End-to-End => Latency: {_number('e2e_s')}s, TFLOPs: {_number('tflops')}, "
    rf"Samples/sec: {_number('samples_per_s')}, Time/seq {_number('time_per_sequence_s')}s, "
    rf"Batch Size: {_count('batch_size')}, Total Seq\. Length: {_count('sequence_length')}"
)
_GENERATION = _Form(
    rf"Generation => Latency: {_number('generate_s')}s, "
    rf"Per-token Latency {_number('per_token_ms')} ms, TFLOPs: {_number('generate_tflops')}, "
    rf"BW: {_number('bandwidth_gb_s')} GB/sec, "
    rf"Answer Seq\. Length: {_count('answer_length_limit')}"
)
_TRAINING = _Form(
    rf"Training   => Latency: {_number('train_s')}s, TFLOPs: {_last_number('train_tflops')}"
)
_PARAMETERS = _Form(
    rf"Actor Model Parameters => {_number('actor_parameters_b')}(?: B)?, "
    rf"Critic Model Parameters => {_number('critic_parameters_b')}(?: B)?"
)
_REWARD = _Form(
    rf"[Aa]verage reward score: {_last_number('reward')}"
    rf"(?: \| EMA reward score: {_last_number('reward_ema')})?"
)
_PPO_BLOCK = (_PPO_LOSSES, _END_TO_END, _GENERATION, _TRAINING, _PARAMETERS, _REWARD)
# A long history is mostly such blocks, and one match costs less than six: with it the dashboard has
# 200,000 lines on the screen after 1.32 s of a core, without it after 1.50 s.
_WHOLE_PPO_BLOCK = _Form("\n".join(form.pattern for form in _PPO_BLOCK))
# DeepSpeed's hybrid engine prints it when it begins to generate again; we never do.
_HYBRID_TIMER = _Form(
    rf"\|E2E latency={_number('e2e_s')}s \|Gather latency={_number('gather_s')}s \([^)]*\) "
    rf"\|Generate time={_number('generate_s')}s \([^)]*\) "
    rf"\|Training time={_number('train_s')}s \([^)]*\) "
    rf"\|Others={_number('others_s')} \([^)]*\)"
    rf"(?: ?\|CurSamplesPerSec={_number('samples_per_s')})?"
    rf"(?: ?\|AvgSamplesPerSec={_last_number('average_samples_per_s')})?"
)
_PHASE = re.compile(r"Phase => (.*?)(?: ([0-9]{1,3}) %)?")
_TIMER = _Form(
    rf"epoch=[0-9]+/micro_step=[0-9]+/global_step={_count('step')}, "
    rf"RunningAvgSamplesPerSec={_number('samples_per_s')}, CurrSamplesPerSec=[^,]+, "
    rf"MemAllocated={_number('memory_gb')}GB, MaxMemAllocated={_number('peak_memory_gb')}GB"
)

Record = dict[str, Any]
_Records = Sequence[Record]
_NOTHING: _Records = ()


class LogReader:
    """Reads the lines of a log as they come, in constant memory, and never raises.

    A `ppo` record is returned after the line that follows its block; if the hybrid engine's times
    come later still, they are added to the returned record.
    """

    def __init__(self) -> None:
        self.step: str | None = None
        self.epochs: int | None = None
        self.batches_per_epoch: int | None = None
        self._step_is_certain = False
        self._offset: int | None = None
        self._epoch: int | None = None
        self._awaited: tuple[str, int] | None = None
        self._header_seen = False
        self._throughput_lines = 0
        self._records_given = 0
        self._ppo_open: Record | None = None
        self._ppo_closed: Record | None = None
        self._ppo_untimed: Record | None = None
        self._optimizer: Record | None = None
        self._surroundings = Surroundings(self._learn_step)
        # By the first word of a line.
        self._readers: dict[str, Callable[[str], _Records | None]] = {
            "Epoch:": self._read_step,
            "Epoch": self._read_epoch_loss,
            "epoch:": partial(self._read_ppo_losses, _PPO_LOSSES_APRIL_2023),
            "End-to-End": partial(self._read_ppo_part, _END_TO_END),
            "Generation": partial(self._read_ppo_part, _GENERATION),
            "Training": partial(self._read_ppo_part, _TRAINING),
            "Actor": partial(self._read_ppo_part, _PARAMETERS),
            "Average": self._read_reward,
            "average": self._read_reward,
            "|E2E": self._read_hybrid_timer,
            SEPARATOR: self._read_separator,
            "Model": self._read_throughput,
            "ppl:": self._read_perplexity,
            "chosen_last_scores": self._read_scores,
            "chosen:": self._read_dpo_scores,
            "Iter": self._read_scores_at,
            "*****": self._read_header,
            "Beginning": self._read_beginning,
            "Metrics": self._read_metrics,
            "Phase": self._read_phase,
            "Note": partial(self._read_text, "Note => ", "note", "text"),
            "Warning": partial(self._read_text, "Warning => ", "warning", "text"),
            "Step": partial(self._read_text, "Step finished => model: ", "finished", "model"),
            "---": self._read_printed,
        }
        # DeepSpeed's lines that are records, by the head of what follows their stamps.
        self._message_readers: dict[str, Callable[[str, str], _Records | None]] = {
            "step": self._read_optimizer,
            "epoch": self._read_engine_timer,
        }

    def feed(self, line: str, offset: int | None = None) -> _Records:
        """Read the next line, as `feed_all` does."""
        return self.feed_all((line,), None if offset is None else (offset,))

    def feed_all(
        self, lines: Sequence[str], offsets: Sequence[int] | None = None
    ) -> Sequence[Record]:
        """Read the next lines, without newlines, and return the records that they complete.

        With the byte at which each line begins in the log, each record gets an `offset`: that of
        its own first line.
        """
        records: list[Record] = []
        self._offset = None
        first_unread = 0
        for index, line in enumerate(lines):
            if index < first_unread:
                continue
            if offsets is not None:
                self._offset = offsets[index]
            if line[:6] == "Epoch:" and self._read_ppo_block(lines, index, records):
                first_unread = index + len(_PPO_BLOCK)
            else:
                records += self._read_line(line)
        return records

    def _read_line(self, line: str) -> _Records:
        closed = self._ppo_closed
        read = self._readers.get(line.partition(" ")[0])
        try:
            records = None if read is None else read(line)
        except ValueError:
            records = None
        if records is None:
            records = self._read_foreign(line)
        if closed is not None and closed is self._ppo_closed and line and line[:5] != "-----":
            self._ppo_closed = None
            return [closed, *records]
        return records

    def finish(self, unfinished: str = "") -> _Records:
        """Return what was held back, at the end of the log.

        A last line without a newline counts only if it is the launcher's: a number may be cut.
        """
        unfinished = unfinished[-LONGEST_LINE:].strip()
        if Surroundings.ends_well(unfinished):
            self.feed(unfinished)
        held = [record for record in (self._ppo_closed, self._ppo_open) if record is not None]
        self._ppo_closed = self._ppo_open = None
        return held

    @property
    def state(self) -> str:
        """`ok`, `failed`, or `unknown` while the log still grows."""
        return self._surroundings.state

    @property
    def returncode(self) -> int | None:
        """The launcher's exit code, if the log has it."""
        return self._surroundings.returncode

    @property
    def cause(self) -> Cause | None:
        """Root cause of a failure: its id, the line that says it, and what to do."""
        return self._surroundings.cause(self._records_given)

    @property
    def events(self) -> dict[str, int]:
        """How often events without a record happened, counted once for all ranks."""
        return self._surroundings.events

    def _give(self, record: Record) -> _Records:
        if self._offset is not None:
            record["offset"] = self._offset
        self._records_given += 1
        return (record,)

    def _learn_step(self, step: str, certain: bool = True) -> None:
        if certain or not self._step_is_certain:
            self.step = step
            self._step_is_certain = certain

    # PPO: a block of lines is one record

    def _read_step(self, line: str) -> _Records | None:
        if " | Step: " in line:
            return self._read_ppo_losses(_PPO_LOSSES, line)
        record: Record = {"kind": "loss", "epoch": None, "step": None, "rank": None}
        if not _STEP_LOSS.read(line, record):
            return None
        self._learn_step("sft", certain=False)
        self._surroundings.saw_rank(record["rank"])
        return self._give(record)

    def _read_ppo_block(self, lines: Sequence[str], start: int, records: list[Record]) -> bool:
        """Read a whole block that begins there; False, and nothing done, if it is not one."""
        record = _new_ppo_record()
        try:
            block = "\n".join(lines[start : start + len(_PPO_BLOCK)])
            if not _WHOLE_PPO_BLOCK.read(block, record):
                return False
        except ValueError:
            return False
        _forget_unknown_bandwidth(record)
        records += [held for held in (self._ppo_closed, self._ppo_open) if held is not None]
        self._give(record)
        self._ppo_open = None
        self._ppo_closed = self._ppo_untimed = record
        self._learn_step("ppo")
        return True

    def _read_ppo_losses(self, form: _Form, line: str) -> _Records | None:
        record = _new_ppo_record()
        if not form.read(line, record):
            return None
        unfinished = self._ppo_open
        self._give(record)
        self._ppo_open = record
        self._ppo_untimed = None
        self._learn_step("ppo")
        return _NOTHING if unfinished is None else (unfinished,)

    def _read_ppo_part(self, form: _Form, line: str) -> _Records | None:
        record = {} if self._ppo_open is None else self._ppo_open
        if not form.read(line, record):
            return None
        _forget_unknown_bandwidth(record)
        return _NOTHING

    def _read_reward(self, line: str) -> _Records | None:
        record = {} if self._ppo_open is None else self._ppo_open
        if not _REWARD.read(line, record):
            return None
        if self._ppo_open is not None:
            self._ppo_closed = self._ppo_untimed = self._ppo_open
            self._ppo_open = None
        return _NOTHING

    def _read_hybrid_timer(self, line: str) -> _Records | None:
        times: Record = {}
        if not _HYBRID_TIMER.read(line, times):
            return None
        # With several generations per step, only the first timer is about the step before.
        record, self._ppo_untimed = self._ppo_untimed, None
        if record is not None:
            for name, value in times.items():
                own = record.get(name)
                record[name if own is None else f"hybrid_{name}"] = value
        return _NOTHING

    def _read_separator(self, line: str) -> _Records | None:
        return _NOTHING if line == SEPARATOR else None

    # Steps 1 and 2, and DPO.

    def _read_epoch_loss(self, line: str) -> _Records | None:
        record: Record = {"kind": "loss", "epoch": None, "step": None, "rank": None}
        return self._give(record) if _EPOCH_LOSS.read(line, record) else None

    def _read_throughput(self, line: str) -> _Records | None:
        record: Record = {"kind": "throughput", "index": self._throughput_lines}
        if not _THROUGHPUT.read(line, record):
            return None
        self._throughput_lines += 1
        if self.step is None:
            self._learn_step("sft", certain=False)
        return self._give(record)

    def _read_header(self, line: str) -> _Records | None:
        if match := _EVALUATING.fullmatch(line):
            what = match["what"]
            self.epochs = int(match["epochs"])
            self._awaited = (what, int(match["epoch"]))
            self._header_seen = True
            self._learn_step({"perplexity": "sft", "reward": "reward", "rewards": "dpo"}[what])
            return _NOTHING
        if match := _RUNNING.fullmatch(line):
            if match["ppo"]:
                self._learn_step("ppo")
            return _NOTHING
        return None

    def _give_result(self, what: str, record: Record) -> _Records:
        # People and models print such text too: a result without its header counts only at the top
        # of a log whose beginning was cut off.
        awaited, self._awaited = self._awaited, None
        if awaited is not None and awaited[0] == what:
            record["epoch"] = awaited[1]
            return self._give(record)
        return _NOTHING if self._header_seen else self._give(record)

    def _read_perplexity(self, line: str) -> _Records | None:
        record: Record = {"kind": "eval", "epoch": None}
        if not _PERPLEXITY.read(line, record):
            return None
        self._learn_step("sft", certain=False)
        return self._give_result("perplexity", record)

    def _read_scores(self, line: str) -> _Records | None:
        record: Record = {"kind": "reward_eval", "epoch": None}
        if not _REWARD_SCORES.read(line, record):
            return None
        self._learn_step("reward", certain=False)
        return self._give_result("reward", record)

    def _read_dpo_scores(self, line: str) -> _Records | None:
        record: Record = {"kind": "reward_eval", "epoch": None}
        if not _DPO_SCORES.read(line, record):
            return None
        record["accuracy"] = None
        return self._give_result("rewards", record)

    def _read_scores_at(self, line: str) -> _Records | None:
        record: Record = {"kind": "reward_eval", "epoch": self._epoch}
        if not _REWARD_SCORES_AT.read(line, record):
            return None
        self._learn_step("reward")
        return self._give(record)

    def _read_beginning(self, line: str) -> _Records | None:
        match = _BEGINNING.fullmatch(line)
        if match is None:
            return None
        epoch, epochs, batches = (int(match[name]) for name in ("epoch", "epochs", "batches"))
        self._epoch, self.epochs, self.batches_per_epoch = epoch, epochs, batches
        if match["generation"]:
            self._learn_step("ppo")
        return _NOTHING

    # Our own lines.

    def _read_metrics(self, line: str) -> _Records | None:
        if not line.startswith("Metrics => step: "):
            return None
        record: Record = {"kind": "metrics"}
        words = line[len("Metrics => ") :].replace(": ", ", ").split(", ")
        names, texts = words[::2], words[1::2]
        if len(names) != len(texts) or not all(map(METRIC_NAME.fullmatch, names)):
            return None
        values = [
            int(text) if text.isdigit() else None if text == "NA" else float(text) for text in texts
        ]
        record.update(zip(names, values, strict=True))
        return self._give(record)

    def _read_phase(self, line: str) -> _Records | None:
        match = _PHASE.fullmatch(line)
        if match is None or CONTROL.search(line):
            return None
        percent = None if match[2] is None else int(match[2])
        return self._give({"kind": "phase", "name": match[1], "percent": percent})

    def _read_text(self, head: str, kind: str, name: str, line: str) -> _Records | None:
        if not line.startswith(head) or len(line) > LONGEST_LINE or CONTROL.search(line):
            return None
        return self._give({"kind": kind, name: line[len(head) :]})

    def _read_printed(self, line: str) -> _Records | None:
        """Text of people and models: ignored, whatever it looks like."""
        return _NOTHING if line.startswith(("--- prompt -->", "--- ans    -->")) else None

    # Everything else: DeepSpeed, the launcher, the wrapper, and lines that are not clean.

    def _read_foreign(self, line: str) -> _Records:
        parts = clean_parts(line, self._surroundings.hosts)
        if parts != [line]:
            return self._read_parts(parts)
        message = without_stamps(line)
        head = head_of(message)
        read = self._message_readers.get(head)
        try:
            records = None if read is None else read(message, line)
        except ValueError:
            records = None
        if records is not None:
            return records
        if self._surroundings.read(head, message, line):
            return _NOTHING
        if parts := torn_parts(line):
            return self._read_parts(parts)
        self._surroundings.read_unknown(line, self._records_given)
        return _NOTHING

    def _read_parts(self, parts: Sequence[str]) -> _Records:
        return [record for part in parts for record in self._read_line(part)]

    def _read_optimizer(self, message: str, line: str) -> _Records | None:
        match = _OPTIMIZER.fullmatch(message)
        if match is None or "[Rank 0]" not in line:
            return None
        step, skipped = int(match[1]), int(match[2])
        if step == 0:  # Printed while the engine starts.
            return _NOTHING
        previous = self._optimizer or {}
        second = previous.get("step") == step and previous.get("engine") == "actor"
        engine = "critic" if second or self.step == "reward" else "actor"
        if self.step and BY_NAME[self.step].roles == ("actor",):
            engine = "actor"
        rates = [float(rate) for rate in _LEARNING_RATE.findall(match[3])]
        self._optimizer = {
            "kind": "optimizer",
            "engine": engine,
            "step": step,
            "skipped": skipped,
            "lr": rates,
        }
        return self._give(self._optimizer)

    def _read_engine_timer(self, message: str, line: str) -> _Records | None:
        timer: Record = {}
        if not _TIMER.read(message, timer):
            return None
        if self._optimizer is not None and self._optimizer["step"] == timer["step"]:
            self._optimizer.update(timer)
        return _NOTHING


def _new_ppo_record() -> Record:
    names = ("reward", "reward_ema", "e2e_s", "generate_s", "train_s", "tflops")
    return {"kind": "ppo", **dict.fromkeys(names)}


def _forget_unknown_bandwidth(record: Record) -> None:
    # In bf16 the original prints -1.00 for an unknown value.
    if record.get("bandwidth_gb_s") == -1.0:
        record["bandwidth_gb_s"] = None
