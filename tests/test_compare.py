"""`swap compare` on a stand-in pipeline with real DVC and git: what runs, what is shared, what survives a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, wait_until
from filelock import FileLock
from ruamel.yaml import YAML
from stand_in import RUNS, make_stand_in

from swap_pipeline.cli.compare.leftovers import MARK
from swap_pipeline.runtime.environment import num_cores

NAMES = {"swap-0", "small_batch-0", "swa_large_then_small-0"}
AUTHOR = {f"GIT_{who}_{what}": "test@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
SLOW = 120
"""seconds after which a test gives up"""


@dataclass
class StandIn:
    root: Path

    @property
    def environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SWAP_", "DVC_", "PYTEST"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "SWAP_DEVICE": "cpu"}
        return {**inherited, **own, **AUTHOR, "DVC_SITE_CACHE_DIR": str(self.root / ".dvc/tmp/site")}

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=600)
        assert not check or done.returncode == 0, f"{command} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def swap(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "swap_pipeline.cli", *arguments, check=check)

    @contextmanager
    def start(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        command = (sys.executable, "-m", "swap_pipeline.cli", "compare", *arguments)
        process = subprocess.Popen(
            command, cwd=self.root, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def ran(self) -> list[str]:
        """`stage experiment`, in the order in which they began."""
        file = self.root / RUNS
        return file.read_text().splitlines() if file.exists() else []

    def has_started(self, name: str) -> bool:
        return (self.root / f".swap/compare/{name}.log").exists()

    def forget_runs(self) -> None:
        (self.root / RUNS).unlink(missing_ok=True)

    def experiments(self) -> set[str]:
        refs = self.run("git", "for-each-ref", "--format=%(refname:lstrip=4)", "refs/exps").stdout
        return set(refs.split())

    def shown(self) -> set[str]:
        """Every experiment that `dvc exp show` has a row for."""
        told = json.loads(self.run("dvc", "exp", "show", "-A", "--json").stdout)
        return {row["name"] for baseline in told for row in baseline["experiments"] or ()}

    def show(self, name: str, file: str) -> str:
        ref = self.run("git", "for-each-ref", "--format=%(objectname)", f"refs/exps/**/{name}").stdout.split()[0]
        return self.run("git", "show", f"{ref}:{file}").stdout

    def edit(self, file: str, old: str, new: str) -> None:
        text = (self.root / file).read_text()
        assert old in text
        (self.root / file).write_text(text.replace(old, new))

    def hold(self, stage: str) -> None:
        (self.root / ".swap").mkdir(exist_ok=True)
        (self.root / f".swap/wait-{stage}").touch()

    def let_go(self, stage: str) -> None:
        (self.root / f".swap/wait-{stage}").unlink()

    def processes(self) -> list[psutil.Process]:
        """Of experiments, still alive."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.root) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def folders(self) -> list[Path]:
        return list((self.root / ".dvc/tmp/exps/standalone").glob("tmp*"))


def recipe() -> str:
    return (ROOT / "recipes/fashion-mini.yaml").read_text().replace("recipe: fashion-mini", "recipe: tiny")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    for name, value in AUTHOR.items():
        monkeypatch.setenv(name, value)
    project = StandIn(tmp_path / "project")
    make_stand_in(project.root, recipe())
    yield project
    for process in project.processes():
        process.kill()


@pytest.fixture
def compared(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    """A copy of a project after one `swap compare`."""
    os.environ.update(AUTHOR)
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compared"
    with FileLock(f"{folder}.lock"):
        if not (folder / "output.txt").exists():
            made = StandIn(folder / "project")
            make_stand_in(made.root, recipe())
            (folder / "output.txt").write_text(made.swap("compare").stdout)
    shutil.copytree(folder / "project", tmp_path / "project", symlinks=True)
    project = StandIn(tmp_path / "project")
    yield project
    for process in project.processes():
        process.kill()


def test_every_method_becomes_an_experiment_and_what_they_share_runs_once(compared: StandIn) -> None:
    assert compared.experiments() == compared.shown() == NAMES
    counts = Counter(line.split()[0] for line in compared.ran())
    # SWAP has four workers, the others one each; its phase 1 is also that of SWA.
    assert counts == {"prepare": 1, "phase1": 2, "phase2": 6, "phase3": 3, "report": 3}
    assert not compared.folders() and not compared.processes()


def test_a_second_comparison_runs_nothing(compared: StandIn) -> None:
    compared.forget_runs()
    output = compared.swap("compare").stdout
    assert "3 of 3 experiments are up to date" in output
    assert compared.ran() == []


@pytest.mark.long
def test_a_changed_rate_of_one_method_runs_that_one_alone(compared: StandIn) -> None:
    compared.forget_runs()
    compared.edit("recipes/tiny.methods.yaml", "peak_lr: 0.2", "peak_lr: 0.3")
    compared.swap("compare")
    assert {line.split()[1] for line in compared.ran()} == {"small_batch-0"}
    assert "peak_lr: 0.3" in compared.show("small_batch-0", "params.yaml")
    assert compared.experiments() == NAMES


@pytest.mark.parametrize(
    ("file", "old", "new", "stages"),
    [
        ("data/raw/images.txt", "some", "other", {"prepare", "phase1", "phase2", "report"}),
        ("stand_in.py", "90 + chance", "91 + chance", {"prepare", "phase1", "phase2", "phase3", "report"}),
        ("params.yaml", "momentum: 0.9", "momentum: 0.8", {"report"}),
    ],
)
@pytest.mark.long
def test_changed_data_code_and_params_of_all_methods_run_all_of_them(
    compared: StandIn, file: str, old: str, new: str, stages: set[str]
) -> None:
    compared.forget_runs()
    compared.edit(file, old, new)
    assert len(compared.swap("compare", "--dry-run").stdout.splitlines()) == 3
    compared.swap("compare", "--methods", "small_batch")
    assert {line.split()[0] for line in compared.ran()} == stages


def test_methods_change_the_recipe_whatever_an_applied_experiment_left_in_params(compared: StandIn) -> None:
    compared.forget_runs()
    compared.run("dvc", "exp", "apply", "small_batch-0")
    output = compared.swap("compare").stdout
    assert "3 of 3 experiments are up to date" in output
    assert "note: ignored edits of params.yaml: " in output
    assert "phase2.epochs (0, recipe 8)" in output
    assert compared.ran() == []


def test_the_printed_commands_give_the_same_experiments_by_hand(fresh: StandIn) -> None:
    lines = fresh.swap("compare", "--dry-run", "--methods", "small_batch,swap").stdout.splitlines()
    assert lines[1] == "dvc exp run --temp -n swap-0"
    for line in lines:
        fresh.run("sh", "-c", line)
    assert fresh.swap("compare", "--dry-run", "--methods", "small_batch,swap").stdout == ""


@pytest.mark.long
def test_data_that_git_ignores_is_found_by_its_whole_path(fresh: StandIn) -> None:
    (fresh.root / ".gitignore").write_text((fresh.root / ".gitignore").read_text() + "/mine/\n")
    shutil.copytree(fresh.root / "data/raw", fresh.root / "mine")
    fresh.edit("params.yaml", "root: data/raw", "root: mine")
    fresh.swap("compare", "--methods", "small_batch")
    params = YAML(typ="safe", pure=True).load(fresh.show("small_batch-0", "params.yaml"))
    assert params["data"]["root"] == f"{fresh.root}/mine"
    assert fresh.swap("compare", "--dry-run", "--methods", "small_batch").stdout == ""


@pytest.mark.long
def test_a_method_that_fails_leaves_the_others_and_its_old_result_alone(compared: StandIn) -> None:
    before = compared.show("small_batch-0", "metrics/swap.json")
    (compared.root / ".swap/fail-phase1-small_batch").touch()
    compared.edit("recipes/tiny.methods.yaml", "peak_lr: 0.2", "peak_lr: 0.3")
    compared.edit("recipes/tiny.methods.yaml", "epochs: 16", "epochs: 32")
    done = compared.swap("compare", check=False)
    assert done.returncode == 1
    assert "error: 1 of 2 experiments failed: small_batch-0" in done.stderr
    assert (
        "small_batch-0: failed: error: this stage was told to fail (log: .swap/compare/small_batch-0.log)"
        in done.stdout
    )
    assert "older than the current params or code: small_batch-0" in done.stdout
    assert "epochs: 32" in compared.show("swa_large_then_small-0", "params.yaml")
    assert compared.show("small_batch-0", "metrics/swap.json") == before
    assert compared.experiments() == NAMES and not compared.folders()


@pytest.mark.skipif(num_cores() < 2, reason="one device")
@pytest.mark.long
def test_methods_that_leave_devices_free_run_side_by_side_once_what_they_share_is_there(fresh: StandIn) -> None:
    fresh.hold("prepare")
    fresh.hold("phase1")
    with fresh.start("--methods", "small_batch", "--seeds", "0,1") as process:
        wait_until(lambda: "prepare small_batch-0" in fresh.ran())
        time.sleep(1)  # it looks five times a second for what can start
        assert not fresh.has_started("small_batch-1")
        fresh.let_go("prepare")
        wait_until(lambda: {"phase1 small_batch-0", "phase1 small_batch-1"} <= set(fresh.ran()))
        assert "prepare small_batch-1" not in fresh.ran()
        second = fresh.swap("compare", check=False)
        assert "error: another `swap compare` is running here" in second.stderr
        fresh.let_go("phase1")
        assert process.wait(SLOW) == 0
    assert fresh.experiments() == {"small_batch-0", "small_batch-1"}


@pytest.mark.long
def test_at_most_so_many_jobs_run_side_by_side(fresh: StandIn) -> None:
    fresh.hold("phase3")
    with fresh.start("--methods", "small_batch", "--seeds", "0,1", "--jobs", "1") as process:
        wait_until(lambda: "phase3 small_batch-0" in fresh.ran())
        time.sleep(1)
        assert not fresh.has_started("small_batch-1")
        fresh.let_go("phase3")
        assert process.wait(SLOW) == 0


@pytest.mark.parametrize("victims", ["compare", "compare and dvc", "everything"])
@pytest.mark.long
def test_a_killed_comparison_resumes_and_nothing_of_it_is_left(compared: StandIn, victims: str) -> None:
    compared.edit("recipes/tiny.methods.yaml", "peak_lr: 0.2", "peak_lr: 0.3")
    compared.edit("params.yaml", "# The default", "# An edit that is not committed")
    edited = (compared.root / "params.yaml").read_text()
    compared.forget_runs()
    compared.hold("phase2")
    with compared.start() as process:
        wait_until(lambda: "phase2 small_batch-0" in compared.ran())
        process.kill()
    left = compared.processes()
    assert left and compared.folders()
    if victims != "compare":
        for one in left:
            if victims == "everything" or "dvc" in one.cmdline():
                one.kill()
        wait_until(
            lambda: not [one for one in compared.processes() if victims == "everything" or "dvc" in one.cmdline()]
        )
    assert "new-small_batch-0" in compared.shown()  # with figures that are not its own

    stale = {one.pid for one in compared.processes()}
    compared.let_go("phase2")
    compared.swap("compare")
    assert not stale & {one.pid for one in psutil.process_iter()}
    assert not compared.processes() and not compared.folders()
    assert compared.shown() == compared.experiments() == NAMES
    assert compared.ran().count("phase1 small_batch-0") == 1  # resumed after it
    assert (compared.root / "params.yaml").read_text() == edited


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.long
def test_an_interrupted_comparison_ends_what_it_started_and_keeps_edits(fresh: StandIn, number: signal.Signals) -> None:
    fresh.edit("params.yaml", "# The default", "# An edit that is not committed")
    edited = (fresh.root / "params.yaml").read_text()
    fresh.hold("phase1")
    with fresh.start("--methods", "small_batch") as process:
        wait_until(lambda: "phase1 small_batch-0" in fresh.ran())
        process.send_signal(number)
        output, _ = process.communicate(timeout=SLOW)
        assert process.returncode == 130
    assert "interrupted; run `swap compare` again to resume" in output
    assert not fresh.processes() and not fresh.folders() and not fresh.shown()
    assert (fresh.root / "params.yaml").read_text() == edited


@pytest.mark.long
def test_what_a_killed_comparison_left_in_dvcs_queue_does_not_run(compared: StandIn) -> None:
    queue = """
from dvc.repo import Repo
with Repo() as repo:
    repo.experiments.new(repo.experiments.tempdir_queue, name="new-left_over-0", params={"params.yaml": ["seed=9"]})
"""
    compared.run(sys.executable, "-c", queue)
    assert compared.run("git", "rev-parse", "--verify", "refs/exps/stash").stdout
    compared.forget_runs()
    compared.edit("recipes/tiny.methods.yaml", "peak_lr: 0.2", "peak_lr: 0.3")
    compared.swap("compare")
    assert {line.split()[1] for line in compared.ran()} == {"small_batch-0"}
    assert compared.experiments() == NAMES


@pytest.mark.long
def test_edits_that_a_dvc_killed_at_its_start_had_put_away_are_not_lost(fresh: StandIn) -> None:
    fresh.edit("params.yaml", "# The default", "# An edit that is not committed")
    edited = (fresh.root / "params.yaml").read_text()
    with fresh.start("--methods", "small_batch") as process:
        wait_until((fresh.root / ".git/refs/stash").exists)
        for one in fresh.processes():
            one.kill()
        process.kill()
    done = fresh.swap("compare", check=False)
    assert done.returncode == 1
    assert "DVC was killed while it was starting an experiment" in done.stderr
    fresh.run("sh", "-c", done.stderr.split("`")[1])
    assert (fresh.root / "params.yaml").read_text() == edited
    assert fresh.run("git", "symbolic-ref", "--short", "HEAD").stdout == "main\n"
    fresh.swap("compare", "--methods", "small_batch")
    assert fresh.experiments() == fresh.shown() == {"small_batch-0"}


@pytest.mark.long
def test_a_lock_of_a_killed_comparison_does_not_wait_for_whoever_has_its_number_now(compared: StandIn) -> None:
    lock = compared.root / ".dvc/tmp/exps/rwlock"
    ours, other = ({"pid": os.getpid(), "cmd": f"dvc exp run --temp -n {name}"} for name in ("new-swap-0", "mine"))
    lock.write_text(json.dumps({"read": {"a": [ours, other], "b": [ours]}, "write": {"refs/exps/stash": ours}}))
    compared.edit("recipes/tiny.methods.yaml", "peak_lr: 0.2", "peak_lr: 0.3")
    compared.swap("compare")
    assert json.loads(lock.read_text())["read"]["a"] == [other]


def test_an_experiment_that_was_complete_but_not_named_is_kept(compared: StandIn) -> None:
    ref = compared.run("git", "for-each-ref", "--format=%(refname)", "refs/exps/**/swap-0").stdout.strip()
    compared.run("git", "update-ref", ref.replace("swap-0", "new-swap-0"), ref)
    compared.run("git", "update-ref", "-d", ref)
    compared.forget_runs()
    compared.swap("compare")
    assert compared.experiments() == NAMES and compared.ran() == []


@pytest.mark.long
def test_experiments_of_others_stay_as_they_are(compared: StandIn) -> None:
    compared.run("dvc", "exp", "run", "--temp", "-n", "gentle", "-S", "phase2.peak_lr=0.05")
    before = compared.show("gentle", "metrics/swap.json")
    compared.edit("recipes/tiny.methods.yaml", "peak_lr: 0.2", "peak_lr: 0.3")
    compared.swap("compare")
    assert compared.experiments() == {*NAMES, "gentle"}
    assert compared.show("gentle", "metrics/swap.json") == before


def _untracked(project: StandIn) -> None:
    project.edit("dvc.yaml", "deps: [data/prepared, stand_in.py]", "deps: [data/prepared, stand_in.py, extra.py]")
    (project.root / "extra.py").write_text("x = 1\n")


def _no_methods(project: StandIn) -> None:
    (project.root / "recipes/tiny.methods.yaml").unlink()


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (_untracked, (), "git does not track extra.py, so experiments would run without it: `git add` it first"),
        (_no_methods, (), "there is no recipes/tiny.methods.yaml: write it, or choose a recipe with `swap use`"),
        (
            lambda project: project.edit("recipes/tiny.methods.yaml", "peak_lr", "peek_lr"),
            (),
            "recipes/tiny.methods.yaml, small_batch: phase1.peek_lr is not a known parameter: did you mean peak_lr?",
        ),
        (
            lambda project: project.edit("recipes/tiny.methods.yaml", "swap: {}", "swap: 3"),
            (),
            "recipes/tiny.methods.yaml: swap must have sections with entries, such as phase1: {peak_lr: 0.1}",
        ),
        (
            lambda project: project.edit("recipes/tiny.methods.yaml", "swap: {}", "swap-1: {}"),
            (),
            "recipes/tiny.methods.yaml: 'swap-1' is not a valid name of a method: use letters, digits and _",
        ),
        (
            lambda project: project.edit("params.yaml", "root: data/raw", "root: nowhere"),
            (),
            "params.yaml: data.root is nowhere, which does not exist: put the data there, or fix the path",
        ),
        (lambda project: None, ("--methods", "swop"), "has no method 'swop': did you mean swap?"),
        (lambda project: None, ("--seeds", "0,x"), "--seeds has 'x': write whole numbers, such as 0,1,2"),
    ],
)
def test_a_mistake_is_answered_in_one_line_before_anything_runs(
    fresh: StandIn, change: Callable[[StandIn], None], arguments: tuple[str, ...], message: str
) -> None:
    change(fresh)
    done = fresh.swap("compare", *arguments, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr
    assert not fresh.ran()


# --- swap tables


def test_the_tables_have_the_figures_of_the_experiments(compared: StandIn) -> None:
    output = compared.swap("tables", "-o", "out").stdout
    written = json.loads((compared.root / "out/tables.json").read_text())
    plain, swa = ({row["method"]: row["quantities"] for row in table["rows"]} for table in written["tables"])
    swap, small, after = (
        json.loads(compared.show(name, "metrics/swap.json"))
        for name in ("swap-0", "small_batch-0", "swa_large_then_small-0")
    )
    assert plain["swap_after"]["test_accuracy"]["mean"] == swap["accuracy"]
    assert plain["swap_before"]["test_accuracy"]["mean"] == swap["workers"]
    assert plain["swap_before"]["training_time"]["mean"] == pytest.approx(swap["seconds"] - 0.5)
    assert plain["small_batch"]["test_accuracy"]["minus_swap"]["mean"] == small["accuracy"] - swap["accuracy"]
    assert swa["swa_large_then_small"]["before_averaging"]["mean"] == after["workers"]
    assert swa["swa_large_then_small"]["training_time"]["seeds"] == {"0": after["seconds"]}
    assert plain["swap_after"]["devices"]["mean"] == 4  # workers side by side
    assert f"{small['accuracy']:.2f}" in output and "tables: out/index.html, and .md, .json, .csv" in output
    for name in ("index.html", "tables.md", "tables.csv", "figures/accuracy_time.svg", "figures/swa.png"):
        assert (compared.root / "out" / name).stat().st_size


@pytest.mark.long
def test_tables_of_an_earlier_commit_are_shown_on_request_and_say_so(compared: StandIn) -> None:
    commit = compared.run("git", "rev-parse", "HEAD").stdout[:7]
    compared.run("git", "commit", "-q", "--allow-empty", "-m", "next")
    done = compared.swap("tables", check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no experiment of recipe tiny started from this commit: run `swap compare`")
    assert done.stderr.endswith(", or use --all for those of earlier commits\n")
    assert f"small_batch-0 is from commit {commit}" in compared.swap("tables", "--all").stdout
    compared.swap("compare", "--methods", "small_batch")
    notes = compared.swap("tables", "--all").stdout
    assert "small_batch-0 is from commit" not in notes and f"swap-0 is from commit {commit}" in notes


def test_experiments_without_their_records_still_have_accuracy_and_time(compared: StandIn) -> None:
    shutil.rmtree(compared.root / ".dvc/cache")
    output = compared.swap("tables").stdout
    accuracy = json.loads(compared.show("small_batch-0", "metrics/swap.json"))["accuracy"]
    assert f"{accuracy:.2f} |       – |" in output
    assert "their records are not in DVC's cache" in output
