"""What DVC is given is whole, and made from what `dvc.lock` will say: or one line, and nothing is given."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Project, make_project, set_params, wait_until
from test_resume import flip_a_byte

from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.inputs import hash_of, inputs_stay
from swap_pipeline.runtime.job_folder import JobFolder

LONG = {"phase1.max_epochs": 30, "phase2.epochs": 30, "workers.seeds": [0, 1]}


def during_repro(
    project: Project, stage: str, act: Callable[[], object], *arguments: str, jobs: int = 1
) -> tuple[int, str]:
    """Run `dvc repro` and act once so many jobs of a stage have trained for two epochs; returns code and output."""
    before = set((project.root / ".swap" / stage).glob("*"))
    process = subprocess.Popen(
        ["dvc", "repro", *arguments],
        cwd=project.root,
        env=project.full_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    folder = project.root / ".swap" / stage
    wait_until(
        lambda: (
            process.poll() is not None
            or len({path.parent for path in folder.glob("*/snapshot_00000[2-9].safetensors")} - before) >= jobs
        )
    )
    act()
    output = process.communicate(timeout=600)[0]
    return process.returncode, output


def errors_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error: ")]


@pytest.mark.long
def test_params_that_are_edited_while_workers_train_end_in_one_line_and_never_in_a_mixture(
    finished: Project, tmp_path: Path
) -> None:
    finished.set_params({"phase2.epochs": 30, "workers.seeds": [0, 1]})
    expected = finished.copy_to(tmp_path / "expected")
    expected.set_params({"phase2.peak_lr": 0.01})
    expected.dvc("repro", "phase3")

    code, output = during_repro(
        finished, "phase2", lambda: finished.set_params({"phase2.peak_lr": 0.01}), "phase3", jobs=2
    )

    assert code != 0
    (error,) = errors_in(output)
    assert "params.yaml: phase2.peak_lr changed while it ran" in error and "its result stays in " in error
    assert "Traceback" not in output
    assert "peak_lr: 0.01" not in (finished.root / "dvc.lock").read_text()
    finished.dvc("repro", "phase3")
    for model in ("phase2/seed_0", "phase2/seed_1", "phase3"):
        file = f"checkpoints/{model}/model.safetensors"
        assert finished.bytes_of(file) == expected.bytes_of(file)
    finished.set_params({"phase2.peak_lr": 0.05})
    assert "already trained, taken from" in finished.dvc("repro", "phase2")


def test_code_that_is_edited_while_phase_1_trains_ends_in_one_line(project: Project) -> None:
    project.set_params(LONG)
    code_file = project.root / "swap_pipeline" / "training" / "loop.py"
    text = code_file.read_text()

    code, output = during_repro(project, "phase1", lambda: code_file.write_text(f"{text}# edited\n"), "phase1")

    assert code != 0
    (error,) = errors_in(output)
    assert "swap_pipeline/training/loop.py changed while it ran" in error
    assert not (project.root / "checkpoints" / "phase1" / "model.safetensors").exists()
    code_file.write_text(text)
    assert "already trained, taken from" in project.dvc("repro", "phase1")


def test_code_that_was_another_for_a_moment_while_a_rank_started_trains_nothing(finished: Project) -> None:
    """As `git stash; git stash pop` leaves it: the same bytes as before, but the rank may have imported others."""
    finished.set_params({"phase1.peak_lr": 0.3})
    sleepy = finished.root / "sleepy"
    sleepy.mkdir()
    # torch is imported once a rank has read its own modules: time enough to go back.
    (sleepy / "sitecustomize.py").write_text(
        "import os, pathlib, sys\n"
        "if 'SWAP_JOB' in os.environ:\n"
        "    code = pathlib.Path('stages/phase1.py')\n"
        "    code.write_bytes(code.read_bytes())\n"
    )

    done = finished.stage("phase1", PYTHONPATH=str(sleepy))

    assert done.returncode == 1
    assert "phase1: code or params were written to while it started: run `dvc repro` again" in done.stderr
    assert finished.trained("phase1") == 1
    assert finished.stage("phase1").returncode == 0


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda project: project.set_params({"phase2.peak_lr": 0.03}), "phase2.peak_lr"),
        (lambda project: append(project.root / "stages/phase2.py", "# edited\n"), "stages/phase2.py"),
    ],
    ids=["params", "code"],
)
@pytest.mark.long
def test_workers_trained_before_and_after_an_edit_are_not_averaged(
    edit: Callable[[Project], object], named: str, finished: Project
) -> None:
    """DVC runs them one after another: each is right for itself."""
    edit(finished)
    finished.dvc("repro", "phase2@1", SWAP_FANOUT="0")
    before = finished.bytes_of("checkpoints/phase3/model.safetensors")

    done = finished.run("dvc", "repro", "--single-item", "--force", "phase3", check=False)

    assert done.returncode != 0
    (error,) = errors_in(done.stderr)
    assert "was trained with a different" in error and named in error
    finished.dvc("repro")
    assert finished.bytes_of("checkpoints/phase3/model.safetensors") != before or named.endswith(".py")


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


@pytest.mark.long
def test_a_file_that_is_written_again_as_it_was_is_no_change(project: Project) -> None:
    project.set_params({"phase1.max_epochs": 30})
    code_file = project.root / "swap_pipeline" / "training" / "loop.py"

    code, output = during_repro(project, "phase1", lambda: code_file.write_text(code_file.read_text()), "phase1")

    assert code == 0, output


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda: set_params(Path("params.yaml"), {"data.train_images": 100}), "params.yaml: data.train_images"),
        (lambda: Path("data/raw/late.png").write_bytes(b"image"), "data/raw"),
        (lambda: Path("stages/prepare.py").write_text(""), "stages/prepare.py"),
        (lambda: Path("params.yaml").write_text("{"), "params.yaml, dvc.yaml or a dependency"),
    ],
    ids=["params", "images", "code", "half-written"],
)
def test_a_stage_that_writes_in_place_notices_an_edit(
    edit: Callable[[], object], named: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    changed = pytest.raises(SwapError, match=f"^prepare: {named} changed while it ran: run `dvc repro` again$")
    with changed, inputs_stay("prepare"):
        edit()


@pytest.mark.parametrize("stage", ["prepare", "report"])
def test_a_stage_that_writes_in_place_has_its_own_errors_and_no_others(
    stage: str, finished: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.root)
    with inputs_stay(stage):
        pass
    Path("params.yaml").write_text("{")
    with pytest.raises(SwapError, match="its own"), inputs_stay(stage):
        raise SwapError("its own")


def test_a_hash_is_that_of_the_present_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one")
    first, stamp = hash_of(file), file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as some editors and archives do
    assert hash_of(file) != first
    file.write_bytes(b"one")
    assert hash_of(file) == first


# ---- damage


def result_of_phase1(project: Project) -> Path:
    (result,) = (project.root / ".swap/phase1").glob("*/result*")
    return result


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


HARMS: dict[str, Callable[[Path], object]] = {
    "flipped byte": lambda result: flip_a_byte(result / "model.safetensors"),
    "truncated record": lambda result: os.truncate(result / "record.json", 100),
    "edited record": lambda result: (result / "record.json").write_text(
        json.dumps({**json.loads((result / "record.json").read_text()), "seconds": 1})
    ),
    "lost kept model": lambda result: (result / "epoch_2.safetensors").unlink(),
    "emptied": lambda result: [path.unlink() for path in result.iterdir()],
    "a file in its place": lambda result: (shutil.rmtree(result), result.write_text("")),
    "a pipe for a model": lambda result: replaced(result / "model.safetensors", os.mkfifo),
    "a folder for a model": lambda result: replaced(result / "model.safetensors", Path.mkdir),
    "a link to itself": lambda result: replaced(result / "record.json", lambda path: path.symlink_to(path)),
    "no digests": lambda result: (result / "digests.json").write_text("{}"),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_damaged_result_in_scratch_is_set_aside_and_made_again(
    harm: Callable[[Path], object], finished: Project, finished_project: Project
) -> None:
    result = result_of_phase1(finished)
    harm(result)

    done = finished.stage("phase1")

    assert done.returncode == 0, done.stderr
    (warning,) = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert re.fullmatch(
        r"warning: \S+/(result-\w+) is damaged \(.+\): renamed to \1.damaged; it will be made again", warning
    )
    assert "phase1: resuming after epoch 3" in done.stdout and "phase1: epoch" not in done.stdout
    assert result.with_suffix(".damaged").exists()
    for name in ("model", "epoch_2"):
        file = f"checkpoints/phase1/{name}.safetensors"
        assert finished.bytes_of(file) == finished_project.bytes_of(file)


def test_what_is_not_of_the_result_is_not_collected(finished: Project) -> None:
    stray = result_of_phase1(finished) / "stray.safetensors"
    shutil.copy(stray.with_name("model.safetensors"), stray)
    finished.stage("phase1")
    names = {path.name for path in (finished.root / "checkpoints" / "phase1").iterdir()}
    assert names == {"model.safetensors", "epoch_2.safetensors"}


def test_a_result_that_lacks_what_was_to_be_kept_is_no_result(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "job")
    with pytest.raises(FileNotFoundError), folder.complete(kept=["epoch_1.safetensors"]) as result:
        (result / "record.json").write_text("{}")
    assert not folder.is_complete


def test_a_result_in_scratch_shares_its_files_with_neither_workspace_nor_cache(finished_project: Project) -> None:
    result = result_of_phase1(finished_project)
    names = {path.name: path.stat().st_nlink for path in result.iterdir()}
    own = dict.fromkeys(("digests.json", "model.safetensors", "record.json"), 1)
    assert names == own | {"epoch_2.safetensors": 2}  # its other name is in kept/, for other ways of leaving
    assert (result.parent / "kept/epoch_2.safetensors").samefile(result / "epoch_2.safetensors")


@pytest.mark.parametrize("kind", ["hardlink", "symlink", "copy"])
@pytest.mark.long
def test_after_a_damaged_file_is_deleted_it_comes_back_whole_also_where_the_cache_was_damaged_with_it(
    kind: str, project: Project
) -> None:
    project.dvc("config", "cache.type", kind)
    project.set_params({"workers.seeds": [0, 1]})
    project.dvc("repro", "phase1")
    model = project.root / "checkpoints/phase1/model.safetensors"
    whole = model.read_bytes()
    objects = [path for path in (project.root / ".dvc/cache/files/md5").glob("??/*") if path.read_bytes() == whole]
    assert len(objects) == 1
    for path in {file.resolve() for file in (*objects, model)} if kind != "hardlink" else objects:
        mode, status = path.stat().st_mode, path.stat()
        path.chmod(0o644)
        flip_a_byte(path)
        path.chmod(mode)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a fault of the disk
    assert model.read_bytes() != whole

    refused = project.dvc("repro", "phase2", check=False)
    (error,) = errors_in(refused)
    assert "checkpoints/phase1/model.safetensors is damaged" in error and "delete it and run `dvc repro`" in error
    model.unlink()
    project.dvc("repro", "phase2")

    assert model.read_bytes() == whole
    assert (project.root / "checkpoints/phase2/seed_1/model.safetensors").exists()


@pytest.mark.long
def test_an_odd_path_and_a_linked_cache_change_nothing(finished_project: Project, tmp_path: Path) -> None:
    project = make_project(tmp_path / 'it\'s "odd"\n🙂 $HOME')
    (tmp_path / "elsewhere").mkdir()
    (project.root / ".dvc/cache").symlink_to(tmp_path / "elsewhere")

    project.dvc("repro", "phase3")

    for path in ("checkpoints/phase3/model.safetensors", "checkpoints/phase2/seed_1/model.safetensors"):
        assert project.bytes_of(path) == finished_project.bytes_of(path)
    assert any((tmp_path / "elsewhere").rglob("*"))
