"""Why a step failed: the root cause among the lines of its log, and the change that fixes it.

`EXCEPTIONS`, `LINES` and `RETURN_CODES` hold all of it: pattern, id of the cause, advice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypedDict

# Other ranks may finish some steps after one has failed; training survived any older error.
_RECORDS_UNTIL_SURVIVED = 20
_LONGEST_LINE = 400

_MEMORY = (
    "Lower the micro_batch_size or the lengths of the step, set gradient_checkpointing, raise "
    "actor.zero_stage (critic.zero_stage), or set actor.offload."
)
_KILLED = (
    "SIGKILL, mostly the host running out of memory: free host memory, use fewer ranks "
    "(launch.num_accelerators), or set actor.offload=false; `dmesg` says whether it was the kernel."
)
_STOPPED = "The step was stopped from outside; resume it when you like."
_SHARED_MEMORY = "Give /dev/shm more room (in a container: --shm-size=8g, or --ipc=host)."
_PORT = "Set launch.master_port to a free port, or leave it unset so that one is chosen."
_BUILD = (
    "Install a compiler and the CUDA toolkit of the version torch was built with, or set "
    "actor.offload=false so that no operator needs compiling."
)
_DEVICE = "Set dtype=bf16 or dtype=fp32, or run on a device that supports the operation named here."
_SHAPES = (
    "Actor and reward models must share one tokenizer and vocabulary (models.actor, "
    "models.reward), and prompt + answer must fit the position embeddings (ppo.max_prompt_length)."
)
_LOADED_SHAPES = (
    "The saved weights have another shape than the model: config.json and weights must belong "
    "together, actor and reward models must share one tokenizer and vocabulary (models.actor, "
    "models.reward), and a resumed step keeps the lora.rank it began with."
)
_DIVERGED = (
    "Lower actor.learning_rate (critic.learning_rate), set dtype=bf16, or ppo.align_overflow=true "
    "with fp16; then resume from the last checkpoint."
)
_PERMISSION = "Make the path writable for this user, or log in where a model or host is private."
_NETWORK = (
    "Check the connection, or name local folders in models.actor, models.reward, data.sources."
)
_RENDEZVOUS = (
    "Check that all hosts of launch.hostfile reach the first one, that none has died, and that "
    "launch.master_port is open between them."
)
_FILE = "Check the path named here: models.actor, models.reward or data.sources."
_PROGRAM = "Install the program or package named here, into the environment that runs the ranks."
_DISK = (
    "Free some space, or set checkpoint.keep_last=1 and a larger checkpoint.interval; the newest "
    "whole checkpoint is kept."
)
_UNKNOWN = "Read the lines above this one in the log."


class Cause(TypedDict):
    """Why a step failed.

    Attributes:
        id: such as `out_of_memory`.
        line: of the log, which says it.
        advice: what to do.
    """

    id: str
    line: str
    advice: str


@dataclass(frozen=True)
class Symptom:
    """Lines that show a kind of failure: the id of the cause, the pattern, and what to do."""

    id: str
    pattern: re.Pattern[str]
    advice: str


def _symptom(id: str, pattern: str, advice: str) -> Symptom:
    return Symptom(id, re.compile(pattern), advice)


# Last lines of tracebacks; the first pattern that fits decides.
EXCEPTIONS = (
    _symptom("bus_error", r"[Bb]us error|shared memory|/dev/shm", _SHARED_MEMORY),
    _symptom(
        "out_of_memory",
        r"OutOfMemoryError|out of memory|^MemoryError|ArrayMemoryError|bad_alloc"
        r"|(?:can't|[Cc]annot|Unable to) allocate|STATUS_ALLOC_FAILED",
        _MEMORY,
    ),
    _symptom("port_in_use", r"[Aa]ddress already in use|EADDRINUSE|failed to listen", _PORT),
    _symptom(
        "build_failed",
        r"Error building extension|CUDAMismatch|MissingCUDA|CUDA_HOME|Ninja is required"
        r"|Unable to JIT load|\bnvcc\b|\.so: |does not match the version torch was compiled",
        _BUILD,
    ),
    _symptom(
        "missing_program",
        r"ModuleNotFoundError|library but it was not found|launcher '\w+' not installed"
        r"|No such file or directory: '(?:ninja|[gc]\+\+|gcc|cc|git|ssh|pdsh|numactl|mpirun|srun"
        r"|deepspeed|nvidia-smi)'",
        _PROGRAM,
    ),
    _symptom(
        "not_supported_on_device",
        r"not been implemented on|not implemented for '|Could not run '|not compiled with CUDA"
        r"|no kernel image|not supported on your|cannot compute in|FlashAttention only supports"
        r"|No CUDA GPUs|Found no NVIDIA driver|requires? (?:a )?(?:Ampere|CUDA|GPU)",
        _DEVICE,
    ),
    _symptom("shape_mismatch", r"size mismatch for |ignore_mismatched_sizes", _LOADED_SHAPES),
    _symptom(
        "shape_mismatch",
        r"size mismatch|[Ss]hape mismatch|shapes cannot be multiplied|must match the size of"
        r"|Sizes of tensors must match|index out of range in self|device-side assert"
        r"|mismatch in shape|shape '.*' is invalid for input",
        _SHAPES,
    ),
    _symptom(
        "diverged",
        r"loss scale already at minimum|probability tensor contains|FloatingPointError"
        r"|[Ll]oss is (?:nan|inf|not finite)|non-?finite",
        _DIVERGED,
    ),
    _symptom(
        "disk_full",
        r"No space left on device|\bENOSPC\b|Disk quota exceeded|PytorchStreamWriter failed writing"
        r"|inline_container.*unexpected pos",
        _DISK,
    ),
    _symptom(
        "permission",
        r"PermissionError|Permission denied|Read-only file system|[Gg]ated ?[Rr]epo",
        _PERMISSION,
    ),
    _symptom(
        "network",
        r"[Cc]ouldn't (?:connect to|reach)|HTTPS?Connection|Max retries exceeded"
        r"|^(?:requests|urllib3|httpx|aiohttp)\.|name resolution|Name or service not known"
        r"|getaddrinfo|etwork is unreachable"
        r"|No route to host|LocalEntryNotFound|[Oo]ffline ?[Mm]ode|ConnectionError"
        r"|ConnectionRefused|ConnectTimeout|ReadTimeout|ProxyError|SSLError",
        _NETWORK,
    ),
    _symptom(
        "rendezvous_timeout",
        r"DistStoreError|Rendezvous\w*Error|RendezvousTimeout|collective operation timeout"
        r"|socket has timed out|[Tt]imed out|wait timeout|store based barrier"
        r"|failed to connect to any network address",
        _RENDEZVOUS,
    ),
    _symptom(
        "missing_file",
        r"FileNotFoundError|NotADirectoryError|IsADirectoryError|No such file or directory"
        r"|does not appear to have a file|not a local folder|Can't load|Repo id must"
        r"|RepositoryNotFound|DatasetNotFound|Incorrect path|no file named",
        _FILE,
    ),
    _symptom("killed", r"^KeyboardInterrupt", _STOPPED),
)

# Lines that are no exception but say the same.
LINES = (
    _symptom(
        "killed", r"^(?:.*: line \d+: +)?(?:\d+ +)?Killed\b|oom-kill|^Out of memory: K", _KILLED
    ),
    _symptom("killed", r"Main process received SIG(?:INT|TERM)", _STOPPED),
    _symptom(
        "bus_error",
        r"^(?:.*: line \d+: +)?(?:\d+ +)?Bus error|^ERROR: Unexpected bus error",
        _SHARED_MEMORY,
    ),
    _symptom("out_of_memory", r"^ *what\(\): .*(?:out of memory|bad_alloc)", _MEMORY),
    # NCCL names the reason some lines below its exception.
    _symptom("out_of_memory", r"^Cuda failure (?:\d+ )?'out of memory'", _MEMORY),
    _symptom("bus_error", r"^Error while creating shared memory segment", _SHARED_MEMORY),
    _symptom("port_in_use", r"^\[E.*socket\.cpp.*failed to listen", _PORT),
    _symptom(
        "rendezvous_timeout",
        r"^\[E.*(?:collective operation timeout|socket has timed out)",
        _RENDEZVOUS,
    ),
    _symptom("shape_mismatch", r"^\S+\.cu:\d+: .*Assertion .* failed", _SHAPES),
    _symptom("network", r"^ssh: (?:connect to|Could not resolve)", _NETWORK),
    _symptom("permission", r"Permission denied \(publickey", _PERMISSION),
)

# Scripts may survive such failures: used only if nothing better is found.
_HINTS = (
    _symptom("missing_program", r"^(?:\S+: )*(?:line \d+: )?[\w./+-]+: (?:command )?not found$",
           _PROGRAM),
    _symptom("permission", r"^(?:\S+: )*(?:line \d+: )?\S+: Permission denied$", _PERMISSION),
    _symptom("build_failed", r"^nvcc fatal|^\S+:\d+:(?:\d+:)? (?:fatal )?error: ", _BUILD),
)  # fmt: skip

RETURN_CODES = {
    -9: ("killed", _KILLED),
    247: ("killed", _KILLED),
    137: ("killed", _KILLED),
    -7: ("bus_error", _SHARED_MEMORY),
    249: ("bus_error", _SHARED_MEMORY),
    135: ("bus_error", _SHARED_MEMORY),
    126: ("permission", _PERMISSION),
    127: ("missing_program", _PROGRAM),
    -15: ("killed", _STOPPED),
    143: ("killed", _STOPPED),
    -2: ("killed", _STOPPED),
    130: ("killed", _STOPPED),
}

_EXCEPTION = re.compile(
    r"(?:Exception|[A-Za-z_][\w.]{0,120}(?:Error|Exception|Interrupt|Timeout|Exit|IsEnabled))"
    r"(?:: |:?$)"
)
# What ranks, wrappers and launchers print because another process failed.
_FOLLOW_UP = re.compile(
    r"(?:closed|reset) by peer|[Bb]roken pipe|communicator was aborted|nccl(?:Remote|System)Error"
    r"|ChildFailedError|CalledProcessError|exited with non-zero status|SystemExit|connectFullMesh"
)
_LINE_MARKS = (
    "Killed", "kill", "us error", "what()", "[E", "Assertion", "ssh: ", "denied", "not found",
    "rror: ", "fatal", "received SIG", "Cuda failure", "shared memory segment",
)  # fmt: skip
_HANDLING = "During handling of the above exception"
_END_OF_MESSAGE = ("Traceback (most recent", "  File ", _HANDLING, "The above exception was")
# transformers prints a table of what it loaded above an exception that only refers to it.
_MISMATCHED_WEIGHT = "Reinit due to size mismatch"
_LOADING_REPORT = "the above report"


@dataclass
class _Candidate:
    id: str
    line: str
    advice: str
    records_before: int

    def document(self) -> Cause:
        return {"id": self.id, "line": self.line, "advice": self.advice}


@dataclass
class CauseFinder:
    """Finds the root cause while reading a log line by line, in constant memory."""

    _found: dict[str, _Candidate] = field(default_factory=dict)
    _records: int = 0
    _handling: bool = False
    # The lines before belong to an exception whose cause none of them names, up to one that
    # announces the next by a colon.
    _message_open: bool = False
    _announced: bool = False
    _mismatched_weight: str = ""

    def read(self, line: str, records: int) -> None:
        """Read a line that is not about training, without prefixes and escapes.

        `records` is how many records the log has given so far: training that went on for long after
        an error has survived it.
        """
        self._records = records
        if _EXCEPTION.match(line):
            self._read_exception(line)
            return
        if self._read_message(line):
            return
        if line.startswith(_HANDLING):
            self._handling = True
        elif _MISMATCHED_WEIGHT in line:
            self._mismatched_weight = line
        elif any(map(line.__contains__, _LINE_MARKS)):
            for strength, causes in (("specific", LINES), ("hint", _HINTS)):
                cause = _first(causes, line)
                if cause:
                    self._keep(strength if strength == "specific" else cause.id, cause, line)
                    return

    def _read_message(self, line: str) -> bool:
        """Look for the cause in a further line of an exception's message; True if it is there.

        A message continues in lines that are indented or announced by a colon before them.
        """
        continues = self._announced or line[:1].isspace()
        if line.startswith(_END_OF_MESSAGE) or not continues:
            self._message_open = self._announced = False
        if not self._message_open:
            return False
        self._announced = line.endswith(":")
        cause = _first(EXCEPTIONS, line)
        if cause:
            self._keep("specific", cause, line)
        return cause is not None

    def _read_exception(self, line: str) -> None:
        self._message_open = self._announced = False
        if _FOLLOW_UP.search(line):
            self._keep("follow-up", Symptom("unknown", _FOLLOW_UP, _UNKNOWN), line)
            return
        cause = _first(EXCEPTIONS, line)
        if cause:
            if _LOADING_REPORT in line and self._mismatched_weight:
                line = self._mismatched_weight
            self._keep("specific", cause, line)
            return
        self._message_open, self._announced = True, line.endswith(":")
        if self._handling:
            # The exception raised while handling another says more than that other one.
            self._found.pop("exception", None)
        self._keep("exception", Symptom("unknown", _EXCEPTION, _UNKNOWN), line)
        self._handling = False

    def _keep(self, slot: str, cause: Symptom, line: str) -> None:
        if self._alive(slot) is None:
            line = line.strip()[:_LONGEST_LINE]
            self._found[slot] = _Candidate(cause.id, line, cause.advice, self._records)

    def _alive(self, slot: str) -> _Candidate | None:
        candidate = self._found.get(slot)
        if candidate and self._records - candidate.records_before <= _RECORDS_UNTIL_SURVIVED:
            return candidate
        return None

    def raised(self, records: int) -> Cause | None:
        """The cause by its exceptions only, for a log that does not record how it ended."""
        self._records = records
        candidate = self._alive("specific") or self._alive("exception")
        return candidate.document() if candidate else None

    def cause(self, returncode: int | None, exit_line: str, records: int) -> Cause:
        """Cause of a failure that ended with a return code, reported by `exit_line`."""
        self._records = records
        specific = self._alive("specific")
        compiler = self._alive("build_failed")
        if specific and specific.id == "build_failed" and compiler:
            specific = compiler
        by_code = None
        if returncode in RETURN_CODES:
            id, advice = RETURN_CODES[returncode]
            hint = self._alive(id)
            by_code = hint or _Candidate(id, exit_line[-_LONGEST_LINE:], advice, 0)
        chosen = specific or by_code or self._alive("exception")
        for slot in ("missing_program", "permission", "build_failed", "follow-up"):
            chosen = chosen or self._alive(slot)
        chosen = chosen or _Candidate("unknown", exit_line[-_LONGEST_LINE:], _UNKNOWN, 0)
        return chosen.document()


def _first(causes: tuple[Symptom, ...], line: str) -> Symptom | None:
    return next((cause for cause in causes if cause.pattern.search(line)), None)
