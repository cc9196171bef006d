"""`convert(..., engine="ray")`: many workers give the bytes and the report of one process, and a lost one loses nothing."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray_faults
from paths import ROOT
from program import Run
from web import serving

import breccia
from breccia.bridges import convert, save_safetensors
from breccia.internal import measuring
from breccia_bridges import convert_file, engines, ray_engine
from breccia_bridges.convert_file import Step, Task
from breccia_bridges.engines import StoppedError, WorkerError
from breccia_bridges.staging import staging_folder

pytestmark = [pytest.mark.long, pytest.mark.alone]
ray: Any = pytest.importorskip("ray", reason="the engine is Ray")

NAMES = [f"model.layers.{n}.self_attn.{x}_proj.weight" for n in range(2) for x in "qkvo"]
#: Tensors of each file. The layers that engines compute as one, q, k and v, are in two.
FILES = (NAMES[:2], NAMES[2:6], NAMES[6:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of faults of a Ray with two CPUs."""
    folder = tmp_path_factory.mktemp("faults")
    paths = os.pathsep.join([str(ROOT / "tests" / "tools"), os.environ.get("PYTHONPATH", "")])
    hook = {
        "worker_process_setup_hook": "ray_faults.install",
        "env_vars": {ray_faults.FOLDER: str(folder), "PYTHONPATH": paths},
    }
    options = {"include_dashboard": False, "object_store_memory": 80 << 20, "log_to_driver": False, "runtime_env": hook}
    ray.init(num_cpus=2, _memory=4 << 30, **options)
    yield folder
    ray.shutdown()


@pytest.fixture
def faults(folder: Path) -> Path:
    for file in folder.iterdir():
        file.unlink()
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three files and others."""
    rng = np.random.default_rng(0)
    source = tmp_path / "m"
    source.mkdir()
    for n, names in enumerate(FILES):
        weights = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in names}
        save_safetensors({**weights, f"bias.{n}": np.ones(8, np.float32)}, source / f"model-{n}.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "notes.txt").write_text("notes")
    return source


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def listed(file: Path) -> list[tuple[str, int]]:
    """The tensors and processes of a list of `ray_faults`."""
    pairs = (line.split() for line in file.read_text().splitlines())
    return [(name, int(process)) for name, process in pairs]


def has_ended(process: int) -> bool:
    """Within a minute: Ray hears of a killed process while the system still ends it, which a busy machine does late."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if "State:\tZ" in Path(f"/proc/{process}/status").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("verify", ["full", "none"])
@pytest.mark.parametrize("options", [{}, {"dialect": "compressed_tensors"}, {"max_shard_size": "5kB"}], ids=str)
def test_two_workers_finish_with_the_bytes_and_the_report_of_one_process(
    options: dict[str, Any], verify: str, source: Path, tmp_path: Path, faults: Path
) -> None:
    recipe = "nvfp4,global_sense=divisor"
    whole = convert(source, tmp_path / "whole", recipe, verify=verify, **options)
    for names in FILES:
        (faults / names[0]).write_text("meet")
    done: list[tuple[str, int]] = []
    report = convert(
        source, tmp_path / "out", recipe, engine="ray", verify=verify, advance=lambda *step: done.append(step), **options
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert report.tensors == whole.tensors and report.to_dict()["counts"] == whole.to_dict()["counts"]
    assert sorted(done) == sorted(2 * [(one.name, one.bytes_in) for one in whole.tensors])
    casts = listed(faults / "casts")
    assert sorted(name for name, _ in casts) == sorted(NAMES) and len({process for _, process in casts}) == 2


def test_a_worker_that_is_killed_is_replaced_and_finished_tensors_stay(source: Path, tmp_path: Path, faults: Path) -> None:
    whole = convert(source, tmp_path / "whole", "nvfp4")
    name = FILES[1][2]
    (faults / name).write_text("kill once")
    done: list[str] = []
    with pytest.warns(
        UserWarning,
        match=rf"^a worker of Ray was lost while writing {name} of model-1\.safetensors \(.+\); another one goes on from "
        r"there\.$",
    ):
        report = convert(source, tmp_path / "out", "nvfp4", engine="ray", advance=lambda name, size: done.append(name))
    ((killed, process),) = listed(faults / "killed")
    assert killed == name and has_ended(process)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole") and report.tensors == whole.tensors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out", "whole"]
    casts = listed(faults / "casts")
    assert sorted(cast for cast, _ in casts) == sorted([*NAMES, name]), "what was finished is not cast again"
    assert len({process for cast, process in casts if cast == name}) == 2
    assert sorted(done) == sorted(2 * [one.name for one in whole.tensors]), "each step counts once"


def test_a_tensor_that_always_kills_is_named_and_one_process_goes_on(source: Path, tmp_path: Path, faults: Path) -> None:
    convert(source, tmp_path / "whole", "nvfp4")
    out, name = tmp_path / "out", FILES[1][2]
    (faults / name).write_text("kill")
    with warnings.catch_warnings(record=True) as said, pytest.raises(WorkerError) as failed:
        warnings.simplefilter("always")
        convert(source, out, "nvfp4", engine="ray")
    assert str(failed.value).startswith(
        f"3 workers of Ray were lost one after the other while writing {name} of model-1.safetensors ("
    )
    assert str(failed.value).endswith("The same call goes on from what is finished.")
    assert failed.value.found == {"file": "model-1.safetensors", "name": name} and len(said) == 2
    assert len({process for _, process in listed(faults / "killed")}) == 3 and not out.exists()
    finished = (staging_folder(out) / "journal").read_text()
    assert FILES[1][1] in finished and name not in finished
    with pytest.warns(UserWarning, match="goes on with what an interrupted run has left in"):
        convert(source, out, "nvfp4")
    assert contents(out) == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out", "whole"]


def test_ray_goes_on_with_what_one_process_has_begun(source: Path, tmp_path: Path, faults: Path) -> None:
    whole, out = convert(source, tmp_path / "whole", "nvfp4"), tmp_path / "out"

    def stop(name: str, size: int) -> None:
        if name == FILES[1][0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, "nvfp4", advance=stop)
    with pytest.warns(UserWarning, match="goes on with what an interrupted run has left in"):
        report = convert(source, out, "nvfp4", engine="ray")
    assert contents(out) == contents(tmp_path / "whole") and report.tensors == whole.tensors
    assert {cast for cast, _ in listed(faults / "casts")} == {*FILES[1][1:], *FILES[2]}


def test_an_interrupted_conversion_leaves_no_task_that_writes(
    source: Path, tmp_path: Path, faults: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the interrupt and the end of the process are lost, as Ray may lose them on a busy machine."""
    monkeypatch.setattr(ray_engine, "_STOPPING", 0.1)
    monkeypatch.setattr(ray, "cancel", lambda *_, **__: None)
    out, waits = tmp_path / "out", FILES[1][2]
    (faults / waits).write_text("wait")

    def stop(name: str, size: int) -> None:
        if name == FILES[1][1]:
            while waits not in [cast for cast, _ in listed(faults / "casts")]:
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, "nvfp4", engine="ray", advance=stop)
    stage = staging_folder(out) / "new"
    before = contents(stage / "out")
    assert not list(stage.glob("run-*")) and waits not in (staging_folder(out) / "journal").read_text()
    (faults / "go").touch()
    worker, end = dict(listed(faults / "casts"))[waits], time.monotonic() + 60
    stopped = faults / f"stopped {worker}"
    while not stopped.is_file() and time.monotonic() < end:
        time.sleep(0.01)
    assert stopped.is_file(), "the task has found that its run has ended"
    assert contents(stage / "out") == before
    whole = convert(source, tmp_path / "whole", "nvfp4")
    with pytest.warns(UserWarning, match="goes on with what an interrupted run has left in"):
        assert convert(source, out, "nvfp4", engine="ray").tensors == whole.tensors
    assert contents(out) == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out", "whole"]


def test_a_task_stops_where_another_run_has_begun(tmp_path: Path) -> None:
    """As where the process that started it was killed."""
    killed = ray_engine.Run(tmp_path).__enter__()
    task = pickle.loads(pickle.dumps(killed.check))
    task()
    with ray_engine.Run(tmp_path) as run:
        run.check()
        with pytest.raises(
            StoppedError,
            match=r"^the run that wrote in .+ has ended, so that this task of Ray ends and writes nothing more\. The same "
            r"call goes on from what is finished\.$",
        ):
            task()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("fault", "kind"), [("system", OSError), ("breccia", breccia.UnsupportedError)])
def test_an_error_in_a_worker_is_that_of_one_process(
    fault: str, kind: type[Exception], source: Path, tmp_path: Path, faults: Path
) -> None:
    (faults / FILES[1][2]).write_text(f"fail {fault}")
    with pytest.raises(kind) as failed:
        convert(source, tmp_path / "out", "nvfp4", engine="ray")
    if fault == "system":
        assert str(failed.value) == "[Errno 28] No space left on device: 'model-1.safetensors'"
        assert staging_folder(tmp_path / "out").is_dir(), "the same call goes on"
    else:
        assert str(failed.value) == f"{FILES[1][2]}: a value that nothing holds"
        assert not staging_folder(tmp_path / "out").exists()


def test_a_file_that_this_process_does_not_see_is_an_error(source: Path, tmp_path: Path, faults: Path) -> None:
    """As where a worker has written to a disk of its own under the same path."""
    hidden = staging_folder(tmp_path / "out") / "new" / "out" / "model-1.safetensors"

    def advance(name: str, size: int) -> None:
        hidden.unlink(missing_ok=True)

    with pytest.raises(WorkerError, match=r"^the program that started the conversion does not see .*model-1\.safetensors\. So"):
        convert(source, tmp_path / "out", "nvfp4", engine="ray", verify="none", advance=advance)
    assert not (tmp_path / "out").exists()


def test_a_task_for_which_no_machine_is_large_enough_is_refused(source: Path, tmp_path: Path, faults: Path) -> None:
    (faults / FILES[1][2]).write_text("fail system")
    with pytest.raises(OSError, match="No space left"):
        convert(source, tmp_path / "out", "nvfp4", engine="ray")
    with (
        pytest.warns(UserWarning, match="goes on with"),
        pytest.raises(
            WorkerError,
            match=r"^a task takes 1 CPU and 1\.10 TB of the resource 'memory', and the most that a machine of the Ray cluster "
            r"has is 4\.29 GB\. Give a smaller max_memory= \(--max-memory\), or start Ray with more\.$",
        ),
    ):
        convert(source, tmp_path / "out", "nvfp4", engine="ray", max_memory="1TiB")
    assert (staging_folder(tmp_path / "out") / "journal").is_file(), "what is finished stays"


def test_the_command_converts(source: Path, tmp_path: Path, faults: Path, run: Run) -> None:
    convert(source, tmp_path / "whole", "nvfp4")
    words = ("--recipe", "nvfp4", "--engine", "ray", "--max-memory", "640MiB")
    code, _, err = run("convert", source, tmp_path / "out", *words)
    assert code == 0, err
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert json.loads((faults / "assigned").read_text()) == {"threads": 1, "CPU": 1.0, "memory": 640 << 20}


# ------------------------------------------------------------------------------------------------ memory, and URLs


def test_the_slabs_of_a_worker_are_those_of_the_limit(tmp_path: Path, faults: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its metrics are sums over slabs, so they are the same, too."""
    source, limit, name = tmp_path / "m", "144MiB", NAMES[0]
    source.mkdir()
    x = np.random.default_rng(0).standard_normal((1024, 1024), dtype=np.float32)
    save_safetensors({name: x}, source / "model.safetensors")
    given: list[int] = []

    def noted(task: Task) -> Generator[Step]:
        given.append(task.slab)
        return convert_file.convert_file(task)

    monkeypatch.setattr(engines, "convert_file", noted)
    whole = convert(source, tmp_path / "whole", "nvfp4", max_memory=limit)
    assert len(given) == 1 and given[0] < x.size <= measuring.SLAB
    report = convert(source, tmp_path / "out", "nvfp4", max_memory=limit, engine="ray")
    assert listed(faults / "slabs") == [(name, given[0] // 1024)]
    assert report.tensors == whole.tensors and contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The filesystem of memory:// in this process, empty; workers have others."""
    fsspec = pytest.importorskip("fsspec", reason="fsspec comes with breccia-bridges[remote]")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name)
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    return fs


def test_workers_read_a_source_at_a_url(source: Path, tmp_path: Path, faults: Path, store: Any) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp comes with breccia-bridges[remote]")
    whole = convert(source, tmp_path / "whole", "nvfp4")
    with serving(tmp_path) as web:
        report = convert(f"{web.url}/m", tmp_path / "out", "nvfp4", engine="ray")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole") and report.tensors == whole.tensors
    casts = listed(faults / "casts")
    assert sorted(name for name, _ in casts) == sorted(NAMES) and os.getpid() not in {process for _, process in casts}


def test_a_store_that_workers_do_not_have_is_named(source: Path, tmp_path: Path, faults: Path, store: Any) -> None:
    for name, data in contents(source).items():
        store.pipe_file(f"memory://m/{name}", data)
    with pytest.raises(
        WorkerError,
        match=r"^the worker on .+ does not see the source: there is nothing at memory://m/model-\d\.safetensors\. Give a URL "
        r"of a server, which all machines of the Ray cluster reach; memory:// is another store in each process\.$",
    ):
        convert("memory://m", tmp_path / "out", "nvfp4", engine="ray")
    assert not (tmp_path / "out").exists()


def test_files_of_tasks_are_uploaded_when_these_have_ended(
    source: Path, tmp_path: Path, faults: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a file whose worker was lost, and in a run that goes on after an upload."""
    whole = convert(source, tmp_path / "whole", "nvfp4")
    expected = contents(tmp_path / "whole")
    (faults / FILES[1][2]).write_text("kill once")
    real, uploaded = store.put_file, list[str]()

    def put_file(path: str, key: str, **_: Any) -> None:
        if len(uploaded) == 1:
            uploaded.append("stop")
            raise KeyboardInterrupt
        real(path, key)
        uploaded.append(Path(path).name)

    monkeypatch.setattr(store, "put_file", put_file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a lost worker, and of what the second run goes on with
        with pytest.raises(KeyboardInterrupt):
            convert(source, "memory://out", "nvfp4", engine="ray")
        assert not store.exists("/out/config.json")
        report = convert(source, "memory://out", "nvfp4", engine="ray")
    files = sorted(name for name in uploaded if name.startswith("model-") and name.endswith(".safetensors"))
    assert files == [f"model-{n}.safetensors" for n in range(3)], "what was uploaded is not uploaded again"
    assert len(listed(faults / "killed")) == 1
    assert {name: store.cat_file(f"/out/{name}") for name in expected} == expected and report.tensors == whole.tensors
    assert not any((tmp_path / "cache").rglob("*staging*"))


STOPPED = """
import signal, sys
from breccia_bridges.journal import Journal
real = Journal.write

def write(self, *arguments):
    real(self, *arguments)
    signal.raise_signal(signal.SIGTERM)

Journal.write = write
from breccia.cli.main import run
run(sys.argv[1:])
"""


def test_without_a_cluster_the_command_starts_one_and_a_signal_ends_both(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["convert", str(source), str(out), "--recipe", "nvfp4", "--engine", "ray"]
    done = subprocess.run([sys.executable, "-c", STOPPED, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    said = f"interrupted; nothing is written to {out} yet; the same command goes on from what is finished\n"
    assert done.stderr.endswith(said) and not done.stdout
    with pytest.warns(UserWarning, match="goes on with what an interrupted run has left in"):
        convert(source, out, "nvfp4")
