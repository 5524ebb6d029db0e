"""A Ray to place workers in: one of our own on this machine, or a cluster that runs already.

A local Ray is lean (no dashboard, no idle workers started ahead, a small object store that is a file); its files lie in one
temporary folder, and its processes carry a mark by which they can be found.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

import ray
import ray._private.worker as ray_worker
from ray._private import services
from ray._private.state import available_resources_per_node
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayError

from disagg.config import Topology
from disagg.errors import ConfigError, EngineError, PlacementError
from disagg.launch.check import this_host
from disagg.launch.placement import ACCELERATOR, Host, WorkerSpec, place, worker_specs
from disagg.launch.processes import MARK, end, find_marked

log = logging.getLogger(__name__)

NAMESPACE = "disagg"
LOCAL_HOST = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20  # Ray's floor is 75 MiB; nothing of ours goes through it
CONNECT_TIMEOUT_S = 5.0
START_ATTEMPTS = 2
ROOM_TIMEOUT_S = 3.0
ATTEMPT_TIMEOUT_S = 120.0
BROKEN_CHECK_S = 0.5
_VITAL = ("gcs_server", "raylet")
_LONGEST_TEMP_DIR = 40  # Ray's socket paths below it must stay under the kernel's 107 bytes
_SYSTEM_CONFIG = {
    "enable_worker_prestart": False,
    # Ray's 15 would leave an engine what the machine's other processes do not want.
    "worker_niceness": 0,
    # A worker process that is killed takes its children (an engine's processes) with it.
    "kill_child_processes_on_worker_exit_with_raylet_subreaper": True,
}


class RaySession:
    """This process's connection to Ray; at most one at a time. Use it in a `with`, or call `close`.

    A local Ray ends with the thread that started it: call `start` from a thread that lives as long as the session.
    """

    def __init__(self, mark: str | None, temp_dir: Path | None, undo: contextlib.ExitStack) -> None:
        self.address = ""
        self.mark = mark
        self.temp_dir = temp_dir
        self.was_broken = False
        self._undo = undo

    @property
    def is_local(self) -> bool:
        """True when this session started its Ray and ends it."""
        return self.mark is not None

    @classmethod
    def start(cls, topologies: Sequence[Topology], address: str | None = None, *, token: str | None = None) -> RaySession:
        """Connect to the Ray at `address` ("auto" or HOST:PORT), or start one here with cores for all `topologies` together.

        `token`: what the Ray at `address` wants to see; default: what Ray finds in this user's settings. A local Ray's is its `mark`.
        Each topology alone must fit this machine: arms of a comparison share its cores. Raises PlacementError when one does
        not, ConfigError when no Ray answers or this process has a session already, EngineError when Ray does not start.
        """
        if ray.is_initialized():
            raise ConfigError("this process has a Ray session already; close it first", key="address", value=address)
        if address is None:
            for topology in topologies:
                place(topology, [this_host(topology)], there="this machine has")
        mark, temp_dir = (None, None) if address else (secrets.token_hex(16), _make_temp_dir())
        undo = contextlib.ExitStack()
        session = cls(mark, temp_dir, undo)
        try:
            if secret := mark or token:
                undo.enter_context(_ray_environment(secret, mark is not None))
            if address:
                _connect(address)
            else:
                _start_local([spec for topology in topologies for spec in worker_specs(topology)], str(temp_dir), mark or "")
            # Ray prints every death of a worker on our terminal, and has no switch for that; we report those in our own words.
            ray_worker.print_to_stdstream = lambda data, ignore_prefix=False: log.debug("ray: %s", data.get("lines"))
            session.address = str(ray.get_runtime_context().gcs_address)
        except BaseException:
            session.close()
            raise
        return session

    def hosts(self, *, used: bool = False) -> tuple[Host, ...]:
        """Live machines by address and what is free on each, by Ray's resource names; with `used`, also what is taken.

        Ray learns of freed resources a little late (well under a second).
        """
        free = available_resources_per_node()
        return tuple(
            Host(node["NodeManagerAddress"], tuple(sorted((k, float(v)) for k, v in amounts.items())))
            for node in sorted(ray.nodes(), key=lambda n: (n["NodeManagerAddress"], n["NodeID"]))
            if node["Alive"]
            for amounts in [node["Resources"] if used else free.get(node["NodeID"], {})]
        )

    def check_room(self, topology: Topology) -> None:
        """Raise PlacementError unless the topology fits: at once when the cluster is too small, else what runs here gets
        ROOM_TIMEOUT_S to have ended, as it may have just been taken down.
        """
        place(topology, self.hosts(used=True))
        deadline_s = time.monotonic() + ROOM_TIMEOUT_S
        while True:
            try:
                place(topology, self.hosts(), there="the cluster has free")
            except PlacementError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)  # Ray tells nobody when resources come free
            else:
                return

    @property
    def is_broken(self) -> bool:
        """True once the local Ray itself has died (a signal to the whole process group, say): calls to it may then wait for minutes."""
        node = ray_worker._global_node
        return self.is_local and node is not None and any(kind in _VITAL for kind, _ in node.dead_processes())

    def attempt(self, work: Callable[[], object], timeout_s: float = ATTEMPT_TIMEOUT_S) -> bool:
        """Run `work` in a thread until it returns, raising what it raises. False when it was given up: Ray broke, or the time is over."""
        outcome: Future[object] = Future()

        def run() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:  # noqa: BLE001 -- raised again in the caller
                outcome.set_exception(error)

        threading.Thread(target=run, name="disagg-attempt", daemon=True).start()
        deadline_s = time.monotonic() + timeout_s
        while not self.is_broken and time.monotonic() < deadline_s:
            with contextlib.suppress(TimeoutError):
                outcome.result(timeout=BROKEN_CHECK_S)
                return True
        return False

    def close(self) -> None:
        """Leave the cluster; a local Ray is ended, with every process of it, and its files are removed. Idempotent.

        After a Ray that broke, this process should end soon (by `os._exit`): Ray's library may wait for it for ever.
        """
        if self.is_broken:
            self.was_broken = True
            end(find_marked(self.mark or ""), grace_s=1.0)
        else:
            ray.shutdown(wait_for_processes=True)
        if self.mark is not None:
            if left := end(find_marked(self.mark)):
                log.warning("processes survive: %s", [process.pid for process in left])
            self.mark = None
        self._undo.close()
        if self.temp_dir is not None:
            shutil.rmtree(self.temp_dir, ignore_errors=True)
            self.temp_dir = None

    def __enter__(self) -> RaySession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _connect(address: str) -> None:
    try:
        found = services.canonicalize_bootstrap_address(address)
        _check_ray_answers(found)
        ray.init(address=found, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        _heed_children()
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        raise ConfigError(
            f"address: no Ray to join at {address!r} ({_first_line(error)}); expected: `auto` or HOST:PORT of a cluster that this machine "
            "is part of (`ray start --address=HOST:PORT`), or no address to start a local one",
            key="address",
            value=address,
        ) from error


def _start_local(specs: Sequence[WorkerSpec], temp_dir: str, mark: str) -> None:
    """Start a Ray. It gives itself 30 s, which a machine that is busy may miss, so it gets a second chance. Raises EngineError."""
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            _init_local(specs, temp_dir)
        except Exception as error:
            ray.shutdown()
            end(find_marked(mark))
            if attempt == START_ATTEMPTS:
                raise EngineError(f"Ray does not start on this machine: {_first_line(error)}; `disagg doctor` may say why") from error
            log.warning("Ray did not start (%s); trying once more", _first_line(error))
        else:
            return


def _init_local(specs: Sequence[WorkerSpec], temp_dir: str) -> None:
    resources: dict[str, float] = {}
    for spec in specs:
        for name, value in spec.resources:
            if name.startswith(ACCELERATOR):
                continue  # Ray finds out by itself which GPUs there are
            resources[name] = resources.get(name, 0.0) + value
    ray.init(
        num_cpus=max(1, sum(spec.cores for spec in specs)),
        num_gpus=None if any(spec.gpus for spec in specs) else 0,
        resources={name: math.ceil(value) for name, value in resources.items()} or None,  # Ray wants whole numbers
        namespace=NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
        _plasma_directory=temp_dir,
        _temp_dir=temp_dir,
        _system_config=_SYSTEM_CONFIG,
    )
    _heed_children()


def _heed_children() -> None:
    """Undo what Ray's process clean-up does to this process: with SIGCHLD ignored, every child's exit status would read as 0."""
    ctypes.CDLL(None).signal(signal.SIGCHLD, 0)  # 0 is SIG_DFL; `signal.signal` works in the main thread only


def _check_ray_answers(address: str) -> None:
    """Raise OSError or RayError unless a Ray's control service is at HOST:PORT; `ray.init` would end this process instead."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    GcsClient(address=address)


def _make_temp_dir() -> Path:
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="disagg-", dir=base if len(base) <= _LONGEST_TEMP_DIR - 16 else "/tmp"))


@contextlib.contextmanager
def _ray_environment(token: str, is_own: bool) -> Iterator[None]:
    """Settings that Ray reads from the environment only. A token of its own closes a local Ray to everybody else."""
    values = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    if is_own:
        values |= {MARK: token, "RAY_USAGE_STATS_ENABLED": "0"}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    _reread_environment()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _reread_environment()


def _reread_environment() -> None:
    """Ray keeps what it read of the token and its mode for the life of the process."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
