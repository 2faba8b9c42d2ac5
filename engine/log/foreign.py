"""What is not ours in training.log: lines that are not clean, DeepSpeed, its launcher, wrappers.

Ranks interleave their lines, launchers put the host before a line, tqdm redraws bars, rich draws
boxes, and there are terminal escapes. `clean_parts` and `torn_parts` recover the intended lines;
`Surroundings` keeps what launchers, wrappers and DeepSpeed say.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.config.steps import BY_NAME, PIPELINES
from engine.log.causes import Cause, CauseFinder

# Longer lines are cut, so that a hostile log takes bounded time.
LONGEST_LINE = 64 * 1024
# At most a host, a rank, a bar and a box precede a line, sometimes twice.
_MOST_PREFIXES = 8

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])?")
_PROGRESS_BAR = re.compile(
    r".{0,200}?[0-9]{1,3}%\|[^|]{0,400}\| *[0-9.]+[kMG]?/[0-9.]+[kMG]? \[[^\]]{0,100}\](?P<rest>.*)"
)
_RANK_PREFIX = re.compile(r"\[rank[0-9]{1,5}\]: ?(?P<rest>.*)")
_BOX = re.compile(r"[│┃|] (?P<rest>.*?) *[│┃|]")
_HOST_PREFIX = re.compile(r"([\w.-]{1,255}): (?P<rest>.*)")
_STAMPS = re.compile(r"(?:\[[^\]]{0,100}\] ?){1,6}")
_HEAD = re.compile(r"[^\s:=!]{0,100}")
# What a line of ours or theirs may begin with, to separate lines that ranks interleaved.
_HEADS = re.compile(
    r"(?<!PPO )Epoch: [0-9]|Epoch [0-9]+/|epoch: [0-9]+\||Iter [0-9]+: c_"
    r"|(?:ppl|chosen): (?:[-+0-9]|nan|inf|NA)|End-to-End => |Generation => |Training   => "
    r"|(?<!Actor )(?<!Critic )Model Parameters: |Actor Model Parameters => "
    r"|[Aa]verage reward score: |-{85}|\|E2E latency=|\*{5} [ER]"
    r"|Beginning of Epoch |chosen_last_scores |\[20[0-9]{2}-|\[deepspeed\] "
    r"|\[launch\.py:|(?:Metrics|Phase|Note|Warning|Step finished) => |Traceback \(most"
)

_STEP_OF_COMMAND = re.compile(rf"engine\.steps\.({'|'.join(BY_NAME)}|rlhf)\b")
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


def head_of(message: str) -> str:
    """The word before the first space, colon, equals sign or exclamation mark."""
    match = _HEAD.match(message)
    return match[0] if match else ""


def clean_parts(line: str, hosts: set[str]) -> list[str]:
    """The lines that a line was meant to be: itself if it is clean, none if it holds no text.

    Without escapes, control characters, progress bars, boxes, and the ranks and `hosts` before it.
    """
    text = line[:LONGEST_LINE].rstrip()
    if not text.isprintable() and CONTROL.search(text):
        parts = [CONTROL.sub("", part) for part in _ESCAPE.sub("", text).split("\r")]
    else:
        parts = [_without_prefixes(text, hosts)]
    return [part for part in parts if part]


def _without_prefixes(text: str, hosts: set[str]) -> str:
    """The text after hosts, ranks, progress bars and the border of a box; empty after too many."""
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


def without_stamps(line: str) -> str:
    """A line without times, levels, files and ranks in brackets before it."""
    stamps = _STAMPS.match(line) if line[:1] == "[" else None
    return line[stamps.end() :] if stamps else line


def torn_parts(line: str) -> list[str]:
    """The lines that ranks interleaved into this one; none if it is a single line."""
    if not _HEADS.match(line):
        return []
    starts = [match.start() for match in _HEADS.finditer(line)]
    if len(starts) == 1:
        return []
    return [line[i:j] for i, j in zip(starts, [*starts[1:], len(line)], strict=True)]


@dataclass
class _Launch:
    """What the launcher reported about the processes of one launch."""

    spawned: int = 0
    world_size: int = 0
    processes_of_node: dict[str, int] = field(default_factory=dict)
    ranks_seen: int = 1
    exits: int = 0
    returncode: int | None = None
    exit_line: str = ""
    is_killed: bool = False
    causes: CauseFinder = field(default_factory=CauseFinder)

    def expected(self) -> int:
        here = max(self.spawned, sum(self.processes_of_node.values()))
        return here or self.world_size or self.ranks_seen

    def exit(self, returncode: int, line: str) -> None:
        if self.returncode is None:
            self.returncode = returncode
            self.exit_line = line


class Surroundings:
    """What launchers, wrappers and DeepSpeed print around the training's own lines.

    Args:
        learn_step: called with the step that a command or a wrapper names.
    """

    def __init__(self, learn_step: Callable[[str], None]) -> None:
        self.hosts: set[str] = set()
        self._learn_step = learn_step
        self._launch = _Launch()
        self._overflow_events = 0
        self._overflow_iterations = 0
        self._overflow_iteration = ""
        self._scale_change = ""
        self._events = {"loss_scale_floor": 0, "skipped_both": 0, "dropped_answers": 0}
        self._readers: dict[str, Callable[[str, str], bool]] = {
            "OVERFLOW": self._read_overflow,
            "Grad": self._read_overflow_iteration,
            "Reducing": self._read_scale_change,
            "Overflow": self._read_overflow_detected,
            "Dropping": self._read_dropped_answer,
            "---": self._read_wrapper,
            "Step": self._read_wrapper_status,
            "RuntimeError": self._read_wrapper_status,
            "Running": self._read_workers,
            "cmd": self._read_command,
            "WORLD": self._read_world,
            "nnodes": self._read_processes,
            "dist_world_size": self._read_processes,
            "process": self._read_processes,
            "Process": self._read_processes,
            "Killing": self._read_processes,
        }

    def read(self, head: str, message: str, line: str) -> bool:
        """Read a line, whose message follows its stamps; False if it is unknown."""
        read = self._readers.get(head)
        return read is not None and read(message, line)

    def read_unknown(self, line: str, records: int) -> None:
        """Read a line that nothing else has recognised, after so many records."""
        if "exits with return code" in line and line[0] == "[":
            match = _RETURN_CODE.search(line)
            if match:
                self._launch.exit(int(match[1]), line)
        else:
            self._launch.causes.read(line, records)

    def saw_rank(self, rank: int) -> None:
        """Count the ranks of a log whose launcher did not report them."""
        self._launch.ranks_seen = max(self._launch.ranks_seen, rank + 1)

    @staticmethod
    def ends_well(line: str) -> bool:
        """Whether a launcher's last words are whole, though no newline follows them."""
        return line.endswith("exits successfully.") or bool(_RETURN_CODE.search(line))

    @property
    def state(self) -> str:
        """`ok`, `failed`, or `unknown` while the log still grows."""
        launch = self._launch
        if launch.is_killed or launch.returncode not in (None, 0):
            return "failed"
        return "ok" if launch.exits >= launch.expected() else "unknown"

    @property
    def returncode(self) -> int | None:
        """The launcher's exit code, if the log has it."""
        return 0 if self.state == "ok" else self._launch.returncode

    def cause(self, records: int) -> Cause | None:
        """Root cause of a failure, after so many records."""
        if self.state == "ok":
            return None
        launch = self._launch
        if self.state == "unknown":
            return launch.causes.raised(records)
        return launch.causes.cause(launch.returncode, launch.exit_line, records)

    @property
    def events(self) -> dict[str, int]:
        """How often events without a record happened, counted once for all ranks."""
        return {"overflow": self._overflow_events or self._overflow_iterations, **self._events}

    # fp16: each of these is an overflow in one of DeepSpeed's optimizers.

    def _read_overflow(self, message: str, line: str) -> bool:
        if message.endswith("skipping both actor and critic steps"):
            self._events["skipped_both"] += 1
            return True
        match = _OVERFLOW.fullmatch(message) if "[deepspeed]" in line else None
        if match is None:
            return False
        if match[1] in (None, "0"):  # Otherwise another rank reports the same event.
            self._overflow_events += 1
            self._count_floor(match[2], match[3])
        return True

    def _read_overflow_iteration(self, message: str, line: str) -> bool:
        match = _OVERFLOW_ITERATION.fullmatch(message)
        if match is None:
            return False
        if match[1] != self._overflow_iteration:  # Otherwise it is another rank's.
            self._overflow_iteration = match[1]
            self._overflow_iterations += 1
            self._scale_change = ""
        return True

    def _read_scale_change(self, message: str, line: str) -> bool:
        match = _SCALE_CHANGE.fullmatch(message)
        if match is None:
            return False
        if message != self._scale_change:  # Otherwise it is another rank's.
            self._scale_change = message
            self._count_floor(match[1], match[2])
        return True

    def _read_overflow_detected(self, message: str, line: str) -> bool:
        if "[Rank 0]" not in line or not message.startswith("Overflow detected. Skipping step"):
            return False
        self._overflow_events += 1
        self._overflow_iteration = self._scale_change = ""
        return True

    def _count_floor(self, scale: str | None, reduced_to: str | None) -> None:
        if scale is not None and scale == reduced_to:
            self._events["loss_scale_floor"] += 1

    def _read_dropped_answer(self, message: str, line: str) -> bool:
        if not message.startswith("Dropping too short generated answer"):
            return False
        self._events["dropped_answers"] += 1
        return True

    # Which processes run, and how they end.

    def _read_wrapper(self, message: str, line: str) -> bool:
        match = _STEP_OF_WRAPPER.match(message)
        if match:
            self._learn_step(PIPELINES["ppo"][int(match[1]) - 1])
        return match is not None

    def _read_wrapper_status(self, message: str, line: str) -> bool:
        match = _WRAPPER_STATUS.match(message)
        if match:
            self._launch.exit(int(match[1]), line)
        return match is not None

    def _read_command(self, message: str, line: str) -> bool:
        if not message.startswith("cmd =") or (
            message == line and "deepspeed.launcher" not in message
        ):
            return False
        # A resumed step is launched again into the same log: the last launch counts.
        self._launch = _Launch()
        if match := _STEP_OF_COMMAND.search(message):
            self._learn_step({"rlhf": "ppo"}.get(match[1], match[1]))
        elif "--actor_model_name_or_path" in message:
            self._learn_step("ppo")
        return True

    def _read_workers(self, message: str, line: str) -> bool:
        match = _WORKERS.fullmatch(message)
        if match is None:
            return False
        # Before their first line, since each begins with the host's name, without a domain.
        names = [name.rpartition("@")[2] for name in match[1].split(",")]
        self.hosts.update(names, (name.partition(".")[0] for name in names))
        return True

    def _read_world(self, message: str, line: str) -> bool:
        hosts = _DEVICES_OF_HOST.findall(message)
        if not message.startswith("WORLD INFO DICT") or not hosts:
            return False
        self.hosts.update(name for name, _ in hosts)
        self._launch.world_size = sum(len(devices.split(",")) for _, devices in hosts)
        return True

    def _read_processes(self, message: str, line: str) -> bool:
        launch = self._launch
        if match := _NODE.fullmatch(message):
            launch.processes_of_node[match[2]] = int(match[1])
        elif match := _WORLD_SIZE.fullmatch(message):
            launch.world_size = int(match[1])
        elif _SPAWNED.match(message):
            launch.spawned += 1
        elif _EXIT.fullmatch(message):
            launch.exits += 1
        elif _KILLING.fullmatch(message):
            launch.is_killed = True
            launch.exit_line = launch.exit_line or line
        else:
            return False
        return True
