"""Reads training.log: the lines of any DeepSpeed-Chat log, of any year, and our own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.config.steps import PIPELINES
from engine.log.causes import CauseFinder
from engine.log.write import SEPARATOR


def _number(name: str) -> str:
    # loose, for speed: what is no number fails when it is converted
    return rf"(?P<{name}>[-+.0-9aefinNA]+)"


def _last_number(name: str) -> str:
    # strict at the end of a line, where a torn line may leave half a number
    return rf"(?P<{name}>[-+]?(?:[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|nan|inf)|NA)"


def _count(name: str) -> str:
    return rf"(?P<{name}>[0-9]+)"


class _Form:
    """A form of line: one pattern, whose groups are the numbers by name."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        compiled = re.compile(pattern)
        self._match = compiled.fullmatch
        self._names = list(compiled.groupindex)
        whole = set(re.findall(r"\(\?P<(\w+)>\[0-9\]\+\)", pattern))
        self._whole = [index for index, name in enumerate(self._names) if name in whole]

    def read(self, line: str, record: dict[str, Any]) -> bool:
        """Add the line's numbers to `record`; False, and nothing added, for any other line.

        Raises:
            ValueError: the line has the form, but something else stands where a number should.
        """
        match = self._match(line)
        if match is None:
            return False
        texts = match.groups()
        values: list[float | None]
        try:
            values = list(map(float, texts))
        except (TypeError, ValueError):
            values = [None if text is None or text == "NA" else float(text) for text in texts]
        for index in self._whole:
            values[index] = int(texts[index])
        record.update(zip(self._names, values))  # noqa: B905 (speed)
        return True


_RUNNING = re.compile(r"\*{5} Running training(?P<ppo> \(total_iters=[0-9]+\))? \*{5}")


_BEGINNING = re.compile(
    rf"Beginning of Epoch {_count('epoch')}/{_count('epochs')}, "
    rf"Total (?:Micro|(?P<generation>Generation)) Batches (?P<batches>[0-9]+)"
)


_OPTIMIZER = re.compile(
    r"step=([0-9]{1,15}), skipped=([0-9]{1,15}), lr=\[([^\]]*)\], mom=(?:\[[^\]]*\]|None)"
)
# as DeepSpeed's first rank writes it, with nothing before or after
_OPTIMIZER_LINE = re.compile(
    r"\[[^\]]{1,30}\] \[INFO\] \[logging\.py:[0-9]{1,5}:log_dist\] \[Rank 0\] " + _OPTIMIZER.pattern
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


_THROUGHPUT = re.compile(
    r"Model Parameters: [^,]*, Latency: ([^,s]*)s, TFLOPs: ([^,]*), Samples/sec: ([^,]*), "
    r"Time/seq [^,]*, Batch Size: ([0-9]{1,9}), Sequence Length: ([0-9]{1,9})"
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
# read at once, since six matches cost three times one: a long history is mostly such blocks
_WHOLE_PPO_BLOCK = _Form("\n".join(form.pattern for form in _PPO_BLOCK))
# DeepSpeed's hybrid engine prints it when it begins to generate again; we never do
_HYBRID_TIMER = _Form(
    rf"\|E2E latency={_number('e2e_s')}s \|Gather latency={_number('gather_s')}s \([^)]*\) "
    rf"\|Generate time={_number('generate_s')}s \([^)]*\) "
    rf"\|Training time={_number('train_s')}s \([^)]*\) "
    rf"\|Others={_number('others_s')} \([^)]*\)"
    rf"(?: ?\|CurSamplesPerSec={_number('samples_per_s')})?"
    rf"(?: ?\|AvgSamplesPerSec={_last_number('average_samples_per_s')})?"
)


_PHASE = re.compile(r"Phase => (.*?)(?: ([0-9]{1,3}) %)?")


# what a line of ours or theirs may begin with, to part the lines that ranks tore into one
_HEADS = re.compile(
    r"(?<!PPO )Epoch: [0-9]|Epoch [0-9]+/|epoch: [0-9]+\||Iter [0-9]+: c_"
    r"|(?:ppl|chosen): (?:[-+0-9]|nan|inf|NA)|End-to-End => |Generation => |Training   => "
    r"|(?<!Actor )(?<!Critic )Model Parameters: |Actor Model Parameters => "
    r"|[Aa]verage reward score: |-{85}|\|E2E latency=|\*{5} [ER]"
    r"|Beginning of Epoch |chosen_last_scores |\[20[0-9]{2}-|\[deepspeed\] "
    r"|\[launch\.py:|(?:Metrics|Phase|Note|Warning|Step finished) => |Traceback \(most"
)
# one of these is in every head: much faster to look for than the pattern
_HEAD_MARKS = (
    "poch", "=> ", "Iter ", "ppl: ", "Parameters", "reward score", "-----", "|E2E ", "*****",
    "chosen", "[20", "[deepspeed]", "[launch.py", "Traceback",
)  # fmt: skip
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PROGRESS_BAR = re.compile(
    r".{0,200}?[0-9]{1,3}%\|[^|]{0,400}\| *[0-9.]+[kMG]?/[0-9.]+[kMG]? \[[^\]]{0,100}\](?P<rest>.*)"
)
_RANK_PREFIX = re.compile(r"\[rank[0-9]{1,5}\]: ?(?P<rest>.*)")
_BOX = re.compile(r"[│┃|] (?P<rest>.*?) *[│┃|]")
_HOST_PREFIX = re.compile(r"([\w.-]{1,255}): (?P<rest>.*)")
_STAMPS = re.compile(r"(?:\[[^\]]{0,100}\] ?){1,6}")
_STEP_OF_COMMAND = re.compile(r"engine\.steps\.(sft|reward|ppo|rlhf|dpo)\b")
_STEP_OF_WRAPPER = re.compile(r"---=== Running Step ([123]) ===---")
_WRAPPER_STATUS = re.compile(
    r"(?:RuntimeError: )?Step [0-9] exited with non-zero status (-?[0-9]{1,10})"
)
_RETURN_CODE = re.compile(r"exits with return code = (-?[0-9]{1,10})$")
_SPAWNED = re.compile(r"process [0-9]+ spawned with command: ")
_NODE = re.compile(r"nnodes=[0-9]+, num_local_procs=([0-9]{1,6}), node_rank=([0-9]+)")
_WORLD_SIZE = re.compile(r"dist_world_size=([0-9]{1,6})")
_DEVICES_OF_HOST = re.compile(r"'([\w.-]{1,255})': \[([0-9, ]*)\]")
_WORKERS = re.compile(r"Running on the following workers: ([\w.,@:-]{1,60000})")
_EXIT = re.compile(r"Process [0-9]+ exits successfully\.")
_KILLING = re.compile(r"Killing subprocess [0-9]+")
_OVERFLOW = re.compile(
    r"OVERFLOW! (?:Rank ([0-9]+) )?Skipping step\."
    r"(?: Attempted loss scale: ([0-9.e+]+), reducing to ([0-9.e+]+)|[^\[]*)"
)
_OVERFLOW_ITERATION = re.compile(r"Grad overflow on iteration:? ([0-9]+)")
_SCALE_CHANGE = re.compile(r"Reducing dynamic loss scale from ([0-9.e+]+) to ([0-9.e+]+)")
_TIMER = _Form(
    rf"epoch=[0-9]+/micro_step=[0-9]+/global_step={_count('step')}, "
    rf"RunningAvgSamplesPerSec={_number('samples_per_s')}, CurrSamplesPerSec=[^,]+, "
    rf"MemAllocated={_number('memory_gb')}GB, MaxMemAllocated={_number('peak_memory_gb')}GB"
)
_LONGEST_LINE = 64 * 1024
# a host, a rank, a bar and a box stand before a line at most, now and then twice
_MOST_PREFIXES = 8

Record = dict[str, Any]
_Records = Sequence[Record]
_NOTHING: _Records = ()


@dataclass
class _Launch:
    """What the launcher said of the processes of one launch."""

    spawned: int = 0
    world_size: int = 0
    processes_of_node: dict[str, int] = field(default_factory=dict)
    ranks_seen: int = 1
    ended_well: int = 0
    returncode: int | None = None
    exit_line: str = ""
    killed: bool = False
    causes: CauseFinder = field(default_factory=CauseFinder)

    def expected(self) -> int:
        here = max(self.spawned, sum(self.processes_of_node.values()))
        return here or self.world_size or self.ranks_seen

    def exit(self, returncode: int, line: str) -> None:
        if self.returncode is None:
            self.returncode = returncode
            self.exit_line = line


class LogReader:
    """Reads the lines of a log as they come, in constant memory, and never raises.

    A `ppo` record is given once the line after its block has come; should the hybrid engine's times
    come later still, they are added to the record that was given.
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
        self._metric_names: list[str] = []
        self._records_given = 0
        self._ppo_open: Record | None = None
        self._ppo_closed: Record | None = None
        self._ppo_untimed: Record | None = None
        self._optimizer: Record | None = None
        self._hosts: set[str] = set()
        self._launch = _Launch()
        self._overflow_events = 0
        self._overflow_iterations = 0
        self._overflow_iteration = ""
        self._scale_change = ""
        self._events = {"loss_scale_floor": 0, "skipped_both": 0, "dropped_answers": 0}
        self._forms: dict[str, Callable[[str], _Records | None]] = {
            "Epoch": self._read_epoch,
            "epoch": partial(self._read_ppo_losses, _PPO_LOSSES_APRIL_2023),
            "End-t": partial(self._read_ppo_part, _END_TO_END),
            "Gener": partial(self._read_ppo_part, _GENERATION),
            "Train": partial(self._read_ppo_part, _TRAINING),
            "Actor": partial(self._read_ppo_part, _PARAMETERS),
            "Avera": self._read_reward,
            "avera": self._read_reward,
            "|E2E ": self._read_hybrid_timer,
            "-----": self._read_separator,
            "Model": self._read_throughput_alone,
            "ppl: ": self._read_perplexity,
            "chose": self._read_scores,
            "Iter ": self._read_scores_at,
            "*****": self._read_header,
            "Begin": self._read_beginning,
            "Metri": self._read_metrics,
            "Phase": self._read_phase,
            "Note ": partial(self._read_text, "Note => ", "note", "text"),
            "Warni": partial(self._read_text, "Warning => ", "warning", "text"),
            "Step ": partial(self._read_text, "Step finished => model: ", "finished", "model"),
            # text of people and models, whatever it looks like
            "--- p": lambda line: _NOTHING,
            "--- a": lambda line: _NOTHING,
        }
        self._messages: dict[str, Callable[[str, str], _Records | None]] = {
            "step=": self._read_optimizer,
            "epoch": self._read_engine_timer,
            "OVERF": self._read_overflow,
            "Grad ": self._read_overflow_iteration,
            "Reduc": self._read_scale_change,
            "Overf": self._read_overflow_detected,
            "Dropp": self._read_dropped_answer,
            "---==": self._read_wrapper,
            "Step ": self._read_wrapper_status,
            "Runti": self._read_wrapper_status,
            "Runni": self._read_workers,
            "cmd =": self._read_command,
            "WORLD": self._read_world,
            "nnode": self._read_processes,
            "dist_": self._read_processes,
            "proce": self._read_processes,
            "Proce": self._read_processes,
            "Killi": self._read_processes,
        }

    def feed(self, line: str, offset: int | None = None) -> _Records:
        """Read the next line, as `feed_all` does."""
        return self.feed_all((line,), None if offset is None else (offset,))

    def feed_all(
        self, lines: Sequence[str], offsets: Sequence[int] | None = None
    ) -> Sequence[Record]:
        """Read the next lines, without newlines, and give the records that they made whole.

        With the byte at which each line begins in the log, each record gets an `offset`: that of
        its own first line.
        """
        records: list[Record] = []
        self._offset = None
        to_skip = 0
        for index, line in enumerate(lines):
            if to_skip:
                to_skip -= 1
                continue
            if offsets is not None:
                self._offset = offsets[index]
            # long histories are mostly these
            head = line[:6]
            if head == "Epoch:" and self._read_ppo_block(lines, index, records):
                to_skip = len(_PPO_BLOCK) - 1
            elif head == "Model " and self._read_throughput(line, records):
                pass
            elif head[:1] == "[" and (match := _OPTIMIZER_LINE.fullmatch(line)):
                self._close_ppo(records)
                records += self._read_rates(match)
            else:
                records += self._read_line(line)
        return records

    def _read_line(self, line: str) -> _Records:
        closed = self._ppo_closed
        read = self._forms.get(line[:5])
        try:
            records = None if read is None else read(line)
        except ValueError:
            records = None
        if records is None:
            records = self._read_unusual(line)
        if closed is not None and closed is self._ppo_closed and line and line[:5] != "-----":
            self._ppo_closed = None
            return [closed, *records]
        return records

    def finish(self, unfinished: str = "") -> _Records:
        """Give what was held back, at the end of the log.

        Of a last line without its newline only the launcher's words count: a number may be cut.
        """
        unfinished = unfinished[-_LONGEST_LINE:].strip()
        if unfinished.endswith("exits successfully.") or _RETURN_CODE.search(unfinished):
            self.feed(unfinished)
        held = [record for record in (self._ppo_closed, self._ppo_open) if record is not None]
        self._ppo_closed = self._ppo_open = None
        return held

    @property
    def state(self) -> str:
        """ok, failed, or unknown: a log that still grows has not told either."""
        launch = self._launch
        if launch.killed or launch.returncode not in (None, 0):
            return "failed"
        return "ok" if launch.ended_well >= launch.expected() else "unknown"

    @property
    def returncode(self) -> int | None:
        """The exit of the launcher, as far as the log tells it."""
        return 0 if self.state == "ok" else self._launch.returncode

    @property
    def cause(self) -> dict[str, str] | None:
        """Root cause of a failure: its id, the line that tells it, and what to do."""
        if self.state == "ok":
            return None
        launch = self._launch
        if self.state == "unknown":
            return launch.causes.raised(self._records_given)
        return launch.causes.cause(launch.returncode, launch.exit_line, self._records_given)

    @property
    def events(self) -> dict[str, int]:
        """How often something happened that is no record, once for all ranks."""
        return {"overflow": self._overflow_events or self._overflow_iterations, **self._events}

    def _give(self, record: Record) -> _Records:
        if self._offset is not None:
            record["offset"] = self._offset
        self._records_given += 1
        return (record,)

    def _close_ppo(self, records: list[Record]) -> None:
        """Give the record of a block that nothing follows any more."""
        if self._ppo_closed is not None:
            records.append(self._ppo_closed)
            self._ppo_closed = None

    def _learn_step(self, step: str, certain: bool = True) -> None:
        if certain or not self._step_is_certain:
            self.step = step
            self._step_is_certain = certain

    # PPO: a block of lines is one record

    def _read_epoch(self, line: str) -> _Records | None:
        if " | Step: " in line:
            return self._read_ppo_losses(_PPO_LOSSES, line)
        record: Record = {"kind": "loss", "epoch": None, "step": None, "rank": None}
        if _STEP_LOSS.read(line, record):
            self._learn_step("sft", certain=False)
            self._launch.ranks_seen = max(self._launch.ranks_seen, record["rank"] + 1)
            return self._give(record)
        return self._give(record) if _EPOCH_LOSS.read(line, record) else None

    def _read_ppo_block(self, lines: Sequence[str], start: int, records: list[Record]) -> bool:
        """Read a whole block that begins there; False, and nothing done, if it is none."""
        record = self._new_ppo_record()
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

    def _new_ppo_record(self) -> Record:
        names = ("reward", "reward_ema", "e2e_s", "generate_s", "train_s", "tflops")
        return {"kind": "ppo", **dict.fromkeys(names)}

    def _read_ppo_losses(self, form: _Form, line: str) -> _Records | None:
        record = self._new_ppo_record()
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
        # with several generations a step, only the first timer tells of the step before
        record, self._ppo_untimed = self._ppo_untimed, None
        if record is not None:
            for name, value in times.items():
                own = record.get(name)
                record[name if own is None else f"hybrid_{name}"] = value
        return _NOTHING

    def _read_separator(self, line: str) -> _Records | None:
        return _NOTHING if line == SEPARATOR else None

    # steps 1 and 2, and DPO

    def _read_throughput(self, line: str, records: list[Record]) -> bool:
        """Read a line of that form; False, and nothing done, for any other."""
        match = _THROUGHPUT.fullmatch(line)
        if match is None:
            return False
        latency, tflops, samples, batch_size, length = match.groups()
        try:
            record: Record = {
                "kind": "throughput",
                "index": self._throughput_lines,
                "latency_s": float(latency),
                "tflops": None if tflops == "NA" else float(tflops),
                "samples_per_s": float(samples),
                "batch_size": int(batch_size),
                "sequence_length": int(length),
            }
        except ValueError:
            return False
        self._close_ppo(records)
        if self._offset is not None:
            record["offset"] = self._offset
        records.append(record)
        self._records_given += 1
        self._throughput_lines += 1
        if self.step is None:
            self._learn_step("sft", certain=False)
        return True

    def _read_throughput_alone(self, line: str) -> _Records | None:
        records: list[Record] = []
        return records if self._read_throughput(line, records) else None

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
        if _REWARD_SCORES.read(line, record):
            self._learn_step("reward", certain=False)
            return self._give_result("reward", record)
        if _DPO_SCORES.read(line, record):
            record["accuracy"] = None
            return self._give_result("rewards", record)
        return None

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

    # lines of our own

    def _read_metrics(self, line: str) -> _Records | None:
        if not line.startswith("Metrics => step: "):
            return None
        record: Record = {"kind": "metrics"}
        words = line[len("Metrics => ") :].replace(": ", ", ").split(", ")
        names, texts = words[::2], words[1::2]
        if names != self._metric_names:  # mostly those of the step before
            if len(names) != len(texts) or not all(map(str.isidentifier, names)):
                return None
            self._metric_names = names
        values = [
            int(text) if text.isdigit() else None if text == "NA" else float(text) for text in texts
        ]
        record.update(zip(names, values))  # noqa: B905 (speed)
        return self._give(record)

    def _read_phase(self, line: str) -> _Records | None:
        match = _PHASE.fullmatch(line)
        if match is None or _CONTROL.search(line):
            return None
        percent = None if match[2] is None else int(match[2])
        return self._give({"kind": "phase", "name": match[1], "percent": percent})

    def _read_text(self, head: str, kind: str, name: str, line: str) -> _Records | None:
        if not line.startswith(head) or len(line) > _LONGEST_LINE or _CONTROL.search(line):
            return None
        return self._give({"kind": kind, name: line[len(head) :]})

    # everything else: DeepSpeed, the launcher, the wrapper, and lines that are not clean

    def _read_unusual(self, line: str) -> _Records:
        text = line[:_LONGEST_LINE].rstrip()
        if not text.isprintable() and _CONTROL.search(text):
            parts = _ESCAPE.sub("", text).split("\r")
            return self._read_parts([_CONTROL.sub("", part) for part in parts])
        text = _without_prefixes(text, self._hosts)
        if not text:
            return _NOTHING
        if text != line:
            return self._read_line(text)
        stamps = _STAMPS.match(text) if text[0] == "[" else None
        message = text[stamps.end() :] if stamps else text
        read = self._messages.get(message[:5])
        try:
            records = None if read is None else read(message, text)
        except ValueError:
            records = None
        if records is None:
            records = self._read_torn(text)
        if records is not None:
            return records
        if "exits with return code" in text and text[0] == "[":
            match = _RETURN_CODE.search(text)
            if match:
                self._launch.exit(int(match[1]), text)
        else:
            self._launch.causes.read(text, self._records_given)
        return _NOTHING

    def _read_torn(self, text: str) -> _Records | None:
        """Read what several ranks wrote into one line; None for any other line."""
        if not any(map(text[1:].__contains__, _HEAD_MARKS)) or not _HEADS.match(text):
            return None
        starts = [match.start() for match in _HEADS.finditer(text)]
        if len(starts) == 1:
            return None
        ends = [*starts[1:], len(text)]
        return self._read_parts([text[i:j] for i, j in zip(starts, ends, strict=True)])

    def _read_parts(self, parts: Sequence[str]) -> _Records:
        return [record for part in parts if part for record in self._read_line(part)]

    def _read_optimizer(self, message: str, text: str) -> _Records | None:
        match = _OPTIMIZER.fullmatch(message)
        return None if match is None or "[Rank 0]" not in text else self._read_rates(match)

    def _read_rates(self, match: re.Match[str]) -> _Records:
        step, skipped = int(match[1]), int(match[2])
        if step == 0:  # printed while the engine starts
            return _NOTHING
        previous = self._optimizer or {}
        second = previous.get("step") == step and previous.get("engine") == "actor"
        engine = "critic" if second or self.step == "reward" else "actor"
        if self.step in ("sft", "dpo"):
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

    def _read_engine_timer(self, message: str, text: str) -> _Records | None:
        timer: Record = {}
        if not _TIMER.read(message, timer):
            return None
        if self._optimizer is not None and self._optimizer["step"] == timer["step"]:
            self._optimizer.update(timer)
        return _NOTHING

    def _read_overflow(self, message: str, text: str) -> _Records | None:
        if message.endswith("skipping both actor and critic steps"):
            self._events["skipped_both"] += 1
            return _NOTHING
        match = _OVERFLOW.fullmatch(message) if "[deepspeed]" in text else None
        if match is None:
            return None
        if match[1] in (None, "0"):  # else another rank tells of the same event
            self._overflow_events += 1
            self._count_floor(match[2], match[3])
        return _NOTHING

    def _read_overflow_iteration(self, message: str, text: str) -> _Records | None:
        match = _OVERFLOW_ITERATION.fullmatch(message)
        if match is None:
            return None
        if match[1] != self._overflow_iteration:  # else another rank's
            self._overflow_iteration = match[1]
            self._overflow_iterations += 1
            self._scale_change = ""
        return _NOTHING

    def _read_scale_change(self, message: str, text: str) -> _Records | None:
        match = _SCALE_CHANGE.fullmatch(message)
        if match is None:
            return None
        if message != self._scale_change:  # else another rank's
            self._scale_change = message
            self._count_floor(match[1], match[2])
        return _NOTHING

    def _read_overflow_detected(self, message: str, text: str) -> _Records | None:
        if "[Rank 0]" not in text or not message.startswith("Overflow detected. Skipping step"):
            return None
        self._overflow_events += 1
        self._overflow_iteration = self._scale_change = ""
        return _NOTHING

    def _count_floor(self, scale: str | None, reduced_to: str | None) -> None:
        if scale is not None and scale == reduced_to:
            self._events["loss_scale_floor"] += 1

    def _read_dropped_answer(self, message: str, text: str) -> _Records | None:
        if not message.startswith("Dropping too short generated answer"):
            return None
        self._events["dropped_answers"] += 1
        return _NOTHING

    def _read_wrapper(self, message: str, text: str) -> _Records | None:
        match = _STEP_OF_WRAPPER.match(message)
        if match is None:
            return None
        self._learn_step(PIPELINES["ppo"][int(match[1]) - 1])
        return _NOTHING

    def _read_wrapper_status(self, message: str, text: str) -> _Records | None:
        match = _WRAPPER_STATUS.match(message)
        if match is None:
            return None
        self._launch.exit(int(match[1]), text)
        return _NOTHING

    def _read_command(self, message: str, text: str) -> _Records | None:
        if message == text and "deepspeed.launcher" not in message:
            return None
        # a resumed step is launched again into the same log: the last launch counts
        self._launch = _Launch()
        if match := _STEP_OF_COMMAND.search(message):
            self._learn_step({"rlhf": "ppo"}.get(match[1], match[1]))
        elif "--actor_model_name_or_path" in message:
            self._learn_step("ppo")
        return _NOTHING

    def _read_workers(self, message: str, text: str) -> _Records | None:
        match = _WORKERS.fullmatch(message)
        if match is None:
            return None
        # before their first line: each line of theirs begins with the host's name, without a domain
        names = [name.rpartition("@")[2] for name in match[1].split(",")]
        self._hosts.update(names, (name.partition(".")[0] for name in names))
        return _NOTHING

    def _read_world(self, message: str, text: str) -> _Records | None:
        hosts = _DEVICES_OF_HOST.findall(message)
        if not message.startswith("WORLD INFO DICT") or not hosts:
            return None
        self._hosts.update(name for name, _ in hosts)
        self._launch.world_size = sum(len(devices.split(",")) for _, devices in hosts)
        return _NOTHING

    def _read_processes(self, message: str, text: str) -> _Records | None:
        launch = self._launch
        if match := _NODE.fullmatch(message):
            launch.processes_of_node[match[2]] = int(match[1])
        elif match := _WORLD_SIZE.fullmatch(message):
            launch.world_size = int(match[1])
        elif _SPAWNED.match(message):
            launch.spawned += 1
        elif _EXIT.fullmatch(message):
            launch.ended_well += 1
        elif _KILLING.fullmatch(message):
            launch.killed = True
            launch.exit_line = launch.exit_line or text
        else:
            return None
        return _NOTHING


def _forget_unknown_bandwidth(record: Record) -> None:
    # in bf16 the original prints -1.00 for what it does not know
    if record.get("bandwidth_gb_s") == -1.0:
        record["bandwidth_gb_s"] = None


def _without_prefixes(text: str, hosts: set[str]) -> str:
    """What follows hosts, ranks, progress bars and the border of a box; nothing after too many."""
    for _ in range(_MOST_PREFIXES):
        match = None
        if text.startswith("[rank"):
            match = _RANK_PREFIX.match(text)
        elif "%|" in text:
            match = _PROGRESS_BAR.match(text)
        elif text.startswith(("│", "┃", "|")):
            match = _BOX.fullmatch(text)
        elif hosts:
            match = _HOST_PREFIX.match(text)
            match = match if match and match[1] in hosts else None
        if match is None:
            return text
        text = match["rest"].rstrip()
    return ""
