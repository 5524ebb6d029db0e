"""Status and end of deployments that other processes hold, whatever became of those."""

from __future__ import annotations

import contextlib
import shutil
import signal

from disagg.errors import ConfigError, DisaggError, EngineError
from disagg.launch.deployment import Deployment, names
from disagg.launch.processes import end, find_marked, wait_gone
from disagg.launch.records import Record, all_records, read_record
from disagg.launch.report import DeploymentStatus
from disagg.launch.session import RaySession

DOWN_TIMEOUT_S = 120.0


def statuses(name: str | None = None, address: str | None = None) -> list[DeploymentStatus | Record]:
    """Deployments of this user, or of the Ray at `address`: their status, or the bare record of one that starts or was abandoned.

    Raises ConfigError when `name` is not among them.
    """
    if address is not None:
        return list(_statuses_at(address, name))
    records = all_records() if name is None else [_known(name)]
    found: list[DeploymentStatus | Record] = []
    for record in records:
        if record.is_abandoned or not record.endpoint:
            found.append(record)
            continue
        try:
            found += _statuses_at(record.address, record.name, record.mark or None)
        except DisaggError:
            found.append(record)
    return found


def _statuses_at(address: str, name: str | None, token: str | None = None) -> list[DeploymentStatus]:
    with RaySession.start([], address, token=token) as session:
        wanted = names(session) if name is None else [name]
        found = [Deployment.find(session, each) for each in wanted]
        if name is not None and found == [None]:
            raise ConfigError(
                key="name", value=name, expected=f"a deployment of the Ray at {address}: {', '.join(names(session)) or 'none'}"
            )
        return [deployment.status() for deployment in found if deployment is not None]


def down(name: str | None = None, address: str | None = None) -> str:
    """End one deployment and return its name; returns when nothing of it is left. Without a name: the only one there is.

    Raises ConfigError when there is none, or more than one to choose from; EngineError when something survives.
    """
    if address is not None:
        return _down_at(address, name)
    if name is None:
        known = all_records()
        if len(known) != 1:
            listed = ", ".join(record.name for record in known)
            message = f"several deployments are up; choose one with --name: {listed}" if known else "no deployment is up"
            raise ConfigError(message, key="name", expected=listed or "a deployment")
        record = known[0]
    else:
        record = _known(name)
    if record.kind == "cluster":
        _down_cluster(record)
    else:
        _down_local(record)
    record.remove()
    return record.name


def clear_abandoned(name: str) -> None:
    """Clean up after a deployment of that name whose owner was killed, if there is one."""
    record = read_record(name)
    if record is not None and record.is_abandoned:
        down(name)


def _down_cluster(record: Record) -> None:
    if record.owner is not None and record.owner.is_alive:
        record.owner.send(signal.SIGTERM)
        wait_gone([record.owner], DOWN_TIMEOUT_S)
    if record.address:
        with contextlib.suppress(ConfigError), RaySession.start([], record.address) as session:  # a Ray that is gone took its actors along
            Deployment.remove(session, record.name)


def _down_local(record: Record) -> None:
    """Ask the owner, and clean up after one that was killed."""
    if record.owner is not None and record.owner.is_alive:
        record.owner.send(signal.SIGTERM)
        if wait_gone([record.owner], DOWN_TIMEOUT_S):
            end([record.owner], grace_s=0.0)
    if record.mark and (left := end(find_marked(record.mark), grace_s=2.0)):
        raise EngineError(f"processes of {record.name} survive SIGKILL: {', '.join(str(process.pid) for process in left)}")
    if record.temp_dir:
        shutil.rmtree(record.temp_dir, ignore_errors=True)


def _down_at(address: str, name: str | None) -> str:
    with RaySession.start([], address) as session:
        known = names(session)
        if name is None and len(known) == 1:
            name = known[0]
        if name is None or name not in known:
            raise ConfigError(key="name", value=name, expected=f"a deployment of the Ray at {address}: {', '.join(known) or 'none'}")
        Deployment.remove(session, name)
    if (record := read_record(name)) is not None and record.kind == "cluster":
        record.remove()
    return name


def _known(name: str) -> Record:
    record = read_record(name)
    if record is None:
        listed = ", ".join(record.name for record in all_records())
        raise ConfigError(
            f"no deployment named {name!r} is up here; {f'there is: {listed}' if listed else 'none is'}",
            key="name",
            value=name,
            expected=listed,
        )
    return record
