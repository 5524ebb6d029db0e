"""The process that holds a deployment: brings it up, waits to be told to end, and leaves nothing behind.

`run` is what `disagg up` does in the foreground. `start_background` does the same in a process of its own (its own session, no terminal),
which tells its progress through a pipe until it is ready; `python -m disagg.launch.supervisor` is that process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from disagg.config import Topology
from disagg.errors import DisaggError, EngineError, from_wire, to_wire
from disagg.launch.deployment import Deployment
from disagg.launch.ending import clear_abandoned
from disagg.launch.records import Record, log_dir
from disagg.launch.report import DeploymentStatus
from disagg.launch.session import RaySession

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WATCH_S = 2.0


@dataclass(frozen=True, slots=True)
class UpRequest:
    """What `disagg up` was asked. `address`: of a Ray that runs already, or None. `detach`: outlive the caller."""

    topology: Topology
    base_dir: Path
    address: str | None = None
    detach: bool = False

    @property
    def name(self) -> str:
        return self.topology.name


class Stopped(BaseException):
    """A signal asked the deployment to end. Not an Exception: nothing but `run` may catch it."""


def run(request: UpRequest, progress: Callable[[str], None], ready: Callable[[str], None], log_file: str = "") -> None:
    """Bring it up, call `ready(endpoint)`, hold it until a signal comes, take it down. Detached on a cluster: returns once it is up.

    Call it from the main thread. Raises what RaySession.start and Deployment.up raise, and ConfigError when the name is in use.
    """
    topology = request.topology
    clear_abandoned(request.name)
    record = Record.claim(request.name, "cluster" if request.address else "local", log_file)
    stays = False
    session: RaySession | None = None
    try:
        with _signals_stop() as stop, RaySession.start([topology], request.address) as session:
            stop.install()  # Ray has put a handler of its own
            record = record.update(address=session.address, mark=session.mark or "", temp_dir=str(session.temp_dir or ""))
            deployment = _up(session, request, progress)
            detached = request.detach and not session.is_local
            record = record.update(endpoint=deployment.endpoint, owner=None if detached else record.owner)
            ready(deployment.endpoint)
            if detached:
                stays = True
                return
            ended = threading.Event()
            threading.Thread(target=tell_changes, args=(deployment.status, progress, ended), daemon=True).start()
            try:
                stop.wait()
            except Stopped:
                progress("taking it down")
            ended.set()
            stop.ignore()
            deployment.down(topology.gateway.drain_s)
    except Stopped:
        progress("stopped before it was up; nothing is left")
    finally:
        if not stays:
            record.remove()
        if session is not None and session.was_broken:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # all is clean, but Ray's library would wait at exit for the Ray that was killed


def tell_changes(status: Callable[[], DeploymentStatus], progress: Callable[[str], None], ended: threading.Event) -> None:
    """A line for each worker that is lost, or serves again, until `ended`. Blocks."""
    told: dict[str, str] = {}
    while not ended.wait(WATCH_S):
        try:
            workers = status().workers
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait for the end of the deployment learn it there
            log.info("no status: %s", error)
            continue
        for worker in workers:
            now = "serves again" if worker.is_live else worker.trouble
            key = f"{worker.restarts}, {now}"  # a restart may be over between two looks
            if key != told.setdefault(worker.name, "0, serves again") and not ended.is_set():
                progress(f"worker {worker.name}: {now} (restarts: {worker.restarts})")
            told[worker.name] = key


def _up(session: RaySession, request: UpRequest, progress: Callable[[str], None]) -> Deployment:
    detached = request.detach and not session.is_local
    try:
        return Deployment.up(session, request.topology, request.name, progress, base_dir=request.base_dir, detached=detached)
    except EngineError as error:
        if (kept := _keep_logs(session, request.name)) is None:
            raise
        raise EngineError(f"{error.message} (the workers' output is in {kept})") from error


def _keep_logs(session: RaySession, name: str) -> Path | None:
    """Copy what the actors wrote out of the local Ray's folder, which is about to go."""
    if session.temp_dir is None:
        return None
    target = log_dir(name)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in session.temp_dir.glob("session_latest/logs/worker-*"):
        if file.stat().st_size:
            shutil.copy(file, target)
    return target


class _Stop:
    """Turns signals into `Stopped`, raised in the main thread wherever it waits."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    def install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def ignore(self) -> None:
        """From now on nothing interrupts the taking down."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def wait(self) -> None:
        """Until a signal comes: raises Stopped."""
        self._asked.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ignore()
        raise Stopped(signal.Signals(number).name)


@contextlib.contextmanager
def _signals_stop() -> Iterator[_Stop]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stop = _Stop()
    stop.install()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_background(request: UpRequest, progress: Callable[[str], None]) -> str:
    """Run a local deployment in a process of its own; returns the endpoint once it is up. Raises as `run` does.

    Ctrl-C while it starts ends that process, which then leaves nothing behind.
    """
    folder = log_dir(request.name)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "supervisor.log"
    arguments = {"topology": request.topology.model_dump(mode="json"), "base_dir": str(request.base_dir), "log": str(log)}
    read_fd, write_fd = os.pipe()
    with log.open("w") as output, os.fdopen(read_fd) as events:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "disagg.launch.supervisor", str(write_fd)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[write_fd],
                start_new_session=True,
                text=True,
            )
        finally:
            os.close(write_fd)
        assert child.stdin is not None
        with child.stdin:
            json.dump(arguments, child.stdin)
        try:
            return _follow(events, progress, log)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
            child.wait(timeout=120)
            raise


def _follow(events: IO[str], progress: Callable[[str], None], log: Path) -> str:
    """Read the child's events until it is ready or has failed."""
    for line in events:
        event = json.loads(line)
        if "endpoint" in event:
            return str(event["endpoint"])
        if "error" in event:
            raise from_wire(event["error"].encode())
        progress(event["progress"])
    raise EngineError(f"the background process ended before it was up; its output is in {log}")


def _background_main(write_fd: int) -> None:
    arguments = json.load(sys.stdin)
    events = os.fdopen(write_fd, "w")

    def tell(**event: Any) -> None:
        sys.stdout.write(f"{' '.join(map(str, event.values()))}\n")
        sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more
            events.write(f"{json.dumps(event)}\n")
            events.flush()

    def ready(endpoint: str) -> None:
        tell(endpoint=endpoint)
        with contextlib.suppress(OSError):
            events.close()

    request = UpRequest(Topology.model_validate(arguments["topology"]), Path(arguments["base_dir"]), detach=True)
    try:
        run(request, lambda line: tell(progress=line), ready, arguments["log"])
    except DisaggError as error:
        tell(error=to_wire(error).decode())
        sys.exit(1)


if __name__ == "__main__":
    _background_main(int(sys.argv[1]))
