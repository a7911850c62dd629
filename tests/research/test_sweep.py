"""Sweeps: a grid into one table, by one process or several, stopped, killed and resumed to the same rows; what it would cost."""

import dataclasses
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from zendaya.cli import app
from zendaya.errors import ConfigError, ZendayaError
from zendaya.nn.config import DecoderConfig, ModelConfig
from zendaya.nn.model import Model
from zendaya.research.recipes import recipe
from zendaya.research.report.write import write_report
from zendaya.research.sweep import cost
from zendaya.research.sweep.cells import cells_of
from zendaya.research.sweep.grids import Arm, Decode, Grid, Sizes, grid, grids
from zendaya.research.sweep.run import sweep
from zendaya.research.sweep.table import Record, Row, Table, now
from zendaya.schedule import PowerLaw
from zendaya.training.loop import LoopConfig
from zendaya.training.train import TrainConfig

WORDS = ("a man", "a dog", "runs", "sings", "in the rain", "at home", "slowly", "again")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Twelve clips a split: random features and a text each."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    lines = []
    for split in ("train", "valid", "test"):
        for number in range(12):
            name, length = f"{split}{number}", int(rng.integers(5, 17))
            np.save(folder / f"{name}.npy", rng.standard_normal((length, 6)).astype(np.float32))
            text = " ".join(rng.choice(WORDS, 4))
            lines.append({"id": name, "split": split, "media": f"{name}.npy", "end_s": length / 3, "text": text})
    (folder / "clips.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "clips.jsonl"


def toy(**loop):
    decoder = DecoderConfig(
        vocab_size=320, source_dim=6, max_source=16, max_rows=61, dim=32, layers=1, heads=1, head_dim=32, ffn_dim=64, norm="pre",
    )  # fmt: skip
    return TrainConfig(
        name="toy", corpus="manifest", folder="", encoder="features,rate=3", vocab_size=320, schedule=PowerLaw(0.5),
        model=ModelConfig(decoder=decoder, window_tokens=16, max_steps=30, length="fix", length_hidden=32, history=False),
        loop=LoopConfig(**{"epochs": 2, "batch_tokens": 120, "learning_rate": 3e-3, "warmup_steps": 5, "log_every": 1} | loop),
    )  # fmt: skip


def facts(folder):
    """The rows of a table without what differs from run to run: seconds, moments, and where the checkpoints lay."""
    rows = []
    for row in Table(folder).rows():
        plain = dataclasses.asdict(row)
        signature = json.loads(plain.pop("signature"))
        del plain["seconds"], plain["created"], signature["evaluation"]["checkpoint"]
        rows.append(plain | {"signature": signature})
    return rows


@pytest.fixture(scope="module")
def swept(corpus, tmp_path_factory):
    """The tiny grid, run in this process."""
    out = tmp_path_factory.mktemp("swept")
    updates = []
    summary = sweep(_tiny(), data=corpus, out=out, report=updates.append)
    assert summary.failed == ()
    return out, summary, updates


def _tiny():
    return Grid.from_dict(json.loads(GRID), "tiny.json")


OWN = [{"schedules": ["own", "wait-k=2"], "metrics": ["bleu"]}]
GRID = json.dumps({
    "name": "tiny",
    "arms": [
        {"recipe": toy().to_dict(), "schedules": ["0", "1.0"], "seeds": [0, 1], "decodes": OWN},
        {"recipe": toy().to_dict(), "schedules": ["dial"], "decodes": [
            {"mode": "streaming", "scale": "segment", "schedules": ["0.5", "alignatt=2"], "metrics": ["bleu"]}
        ]},
    ],
})  # fmt: skip


# The table.


def test_every_cell_is_in_the_table_once(swept):
    out, summary, _ = swept
    assert (summary.total, summary.done, summary.skipped, summary.left, summary.stopped) == (1 + 5 + 10, 16, 0, 0, False)
    rows = Table(out).rows()
    bleu = [row for row in rows if row.metric == "BLEU"]
    assert len(bleu) == 10
    assert {(row.train_schedule, row.decode_schedule, row.seed, row.mode) for row in bleu if row.mode == "offline"} == {
        (f"gamma={gamma}", decode.format(gamma=gamma), seed, "offline")
        for gamma in ("0.0", "1.0")
        for seed in (0, 1)
        for decode in ("gamma={gamma}", next(row.decode_schedule for row in bleu if row.decode_schedule.startswith("wait-k=2,stride=")))
    }
    assert {row.decode_schedule for row in bleu if row.train_schedule == "dial"} == {"gamma=0.5", "alignatt=2"}
    assert all(row.n == 12 and row.form == "fix" and row.split == "test" and row.corpus == "manifest" for row in rows)
    for row in bleu:
        lag = next(one.value for one in rows if one.cell == row.cell and one.metric == "AL")
        assert row.lag == lag
        assert (out / row.traces).is_file()
        assert json.loads(row.signature)["metric"].startswith("bleu|")
    trained = [record for record in Table(out).records().values() if record.kind == "train"]
    sizes = json.loads((out / "runs" / trained[0].cell / "recipe.json").read_text())["examples"]["train"]
    assert all(record.steps > 0 and record.tokens > 2 * sizes * 5 for record in trained)


def test_wait_k_has_the_stride_of_the_corpus(swept):
    out, _, _ = swept
    (row, *_) = [row for row in Table(out).rows() if row.decode_schedule.startswith("wait-k")]
    rho = json.loads((out / "runs" / row.run / "recipe.json").read_text())["rho"]
    assert rho != 1.0
    assert row.decode_schedule == f"wait-k=2,stride={rho}"


def test_a_second_sweep_skips_done_cells_and_redoes_lost_ones(swept, corpus, tmp_path):
    out, _, _ = swept
    before = facts(out)
    again = sweep(_tiny(), data=corpus, out=out)
    assert (again.skipped, again.done) == (16, 16)
    lost = next(row for row in Table(out).rows() if row.decode_schedule == "alignatt=2")
    (out / lost.traces).unlink()
    again = sweep(_tiny(), data=corpus, out=out)
    assert (again.skipped, again.done) == (15, 16)
    assert facts(out) == before


def test_several_processes_make_the_same_table(swept, corpus, tmp_path):
    out, _, _ = swept
    summary = sweep(_tiny(), data=corpus, out=tmp_path, processes=2)
    assert (summary.done, summary.failed) == (16, ())
    assert facts(tmp_path) == facts(out)


def test_a_local_ray_cluster_makes_the_same_table(swept, corpus, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'zendaya[distributed]'")
    (tmp_path / "tiny.json").write_text(GRID)
    code = (  # in a process of its own: Ray leaves threads and sockets behind
        "import sys; from zendaya.research.sweep.run import sweep; from zendaya.research.sweep.grids import grid; "
        "s = sweep(grid(sys.argv[1]), data=sys.argv[2], out=sys.argv[3], processes=2, ray='local'); print(s.done, s.failed)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "tiny.json"), str(corpus), str(tmp_path / "out")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}  # Ray's workers give way to all other work
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert ran.stdout.strip().endswith("16 ()"), ran.stdout + ran.stderr
    assert facts(tmp_path / "out") == facts(swept[0])


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_sweep_goes_on_to_the_same_table(swept, corpus, tmp_path, processes):
    (tmp_path / "tiny.json").write_text(GRID)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "zendaya", "sweep", str(tmp_path / "tiny.json"), "--data", str(corpus), "--out", str(out)]
    command += ["--processes", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def lines():
        """Steps trained and cells done so far."""
        done = len(Table(out).records()) if (out / "results.sqlite").exists() else 0
        return done + sum(path.read_bytes().count(b"\n") for path in out.glob("runs/*/history.jsonl"))

    for how in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        before = lines()
        while lines() < before + 5 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(how)
        _, complaint = process.communicate()
        assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), complaint
        if how == signal.SIGINT:
            assert "run the same command again to go on" in complaint.splitlines()[-1]
            assert "Traceback" not in complaint
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["done"], record["left"], record["failed"]) == (16, 0, [])
    assert facts(out) == facts(swept[0])


def test_a_failed_cell_is_recorded_and_the_others_go_on(corpus, tmp_path):
    decodes = [{"schedules": ["own"], "metrics": ["bleu"]}, {"schedules": ["own"], "split": "dev", "metrics": ["bleu"]}]
    arms = [
        {"recipe": toy().to_dict(), "schedules": ["0"], "decodes": decodes},
        {"recipe": {**toy().to_dict(), "name": "too-long", "splits": ["train", "nowhere"]}, "schedules": ["0"], "decodes": decodes[:1]},
    ]
    (tmp_path / "bad.json").write_text(json.dumps({"arms": arms}))
    out = tmp_path / "out"
    command = ["sweep", str(tmp_path / "bad.json"), "--data", str(corpus), "--out", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "failed: toy gamma=0.0 seed 0 at own, offline: manifest: no clip with a source and a text in split 'dev'" in result.stderr
    assert "failed: too-long gamma=0.0 seed 0: manifest: no example of split 'nowhere'" in result.stderr
    assert "3 of 6 cells done" in result.stdout  # the decode of the run that failed was not begun
    errors = {record.label: record.error for record in Table(out).records().values() if record.status == "failed"}
    assert set(errors) == {"toy gamma=0.0 seed 0 at own, offline", "too-long gamma=0.0 seed 0"}
    assert [row.metric for row in Table(out).rows()].count("BLEU") == 1


def test_two_sweeps_in_one_folder_are_refused(corpus, tmp_path, swept):
    import fcntl

    with (swept[0] / ".sweep.lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ZendayaError, match="another sweep is running there"):
            sweep(_tiny(), data=corpus, out=swept[0])


def _record(key):
    return Record(
        cell=key, kind="evaluate", label=key, status="done", error="", recipe="r", steps=None, tokens=None, seconds=1.0, config="{}",
        created=now(),
    )  # fmt: skip


def _row(key, value=1.0, **changes):
    fields = {field.name: "" for field in dataclasses.fields(Row)}
    return Row(**fields | {"cell": key, "metric": "BLEU", "value": value, "seed": 0, "n": 1, "lag": 0.0, "seconds": 0.0} | changes)


def test_many_writers_lose_nothing(tmp_path):
    def write(number):
        Table(tmp_path, create=True).write(_record(f"{number}"), [_row(f"{number}", float(number))])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(24)))
    assert sorted(row.value for row in Table(tmp_path).rows()) == [float(number) for number in range(24)]


def test_a_write_is_whole_or_not_at_all(tmp_path):
    table = Table(tmp_path, create=True)
    table.write(_record("one"), [_row("one")])
    with pytest.raises(ZendayaError):
        table.write(_record("two"), [_row("two"), dataclasses.replace(_row("two", metric="AL"), value=None)])
    assert set(table.records()) == {"one"}
    assert [row.cell for row in table.rows()] == ["one"]


def test_the_table_is_exported(swept, tmp_path):
    import csv

    table = Table(swept[0])
    number = table.export(tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert len(read) == number == len(table.rows())
    assert [float(line["value"]) for line in read] == [row.value for row in table.rows()]
    with pytest.raises(ZendayaError, match="give --force"):
        table.export(tmp_path / "results.csv")
    with pytest.raises(ZendayaError, match=r"as \.csv or \.parquet: got '\.txt'"):
        table.export(tmp_path / "results.txt")


def test_the_table_is_exported_as_parquet(swept, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    Table(swept[0]).export(tmp_path / "results.parquet")
    assert parquet.read_table(tmp_path / "results.parquet").column("value").to_pylist() == [row.value for row in Table(swept[0]).rows()]


# Keys.


def test_a_key_depends_on_config_and_data_and_nothing_else(corpus, tmp_path):
    def keys(grid, data=corpus, out=tmp_path):
        return {cell.key for cell in cells_of(grid, data=data, out=out)}

    assert keys(_tiny()) == keys(_tiny(), out=tmp_path / "elsewhere")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "clips.jsonl").write_text(corpus.read_text())
    assert keys(_tiny(), data=copy / "clips.jsonl") == keys(_tiny())
    (copy / "clips.jsonl").write_text(corpus.read_text().replace("a dog", "a cat"))
    assert not keys(_tiny(), data=copy / "clips.jsonl") & keys(_tiny())
    longer = Grid(name="tiny", about="", arms=(Arm(recipe=toy(epochs=3), schedules=("0",), decodes=_tiny().arms[0].decodes),))
    assert len(keys(longer) & keys(_tiny())) == 1  # the features


def test_a_run_is_decoded_before_the_next_is_trained(corpus, tmp_path):
    cells = cells_of(_tiny(), data=corpus, out=tmp_path)
    for number, cell in enumerate(cells):
        assert set(cell.needs) <= {before.key for before in cells[:number]}
        if cell.kind == "evaluate":
            assert [before.key for before in cells[:number] if before.kind == "train"][-1] == cell.run


def test_head_starts_are_swept_and_reported(corpus, tmp_path):
    decode = {"mode": "streaming", "scale": "segment", "schedules": ["1", "gamma=1,head=2", "1.3,head=3", "wait-k=2"], "metrics": ["bleu"]}
    arm = {"recipe": toy(epochs=1).to_dict(), "schedules": ["dial+head"], "decodes": [decode]}
    assert sweep(Grid.from_dict({"arms": [arm]}, "heads.json"), data=corpus, out=tmp_path / "out").failed == ()
    rows = Table(tmp_path / "out").rows()
    assert {row.train_schedule for row in rows} == {"dial+head=0.2"}
    assert {"gamma=1,head=2", "gamma=1.3,head=3", "gamma=1.0"} < {row.decode_schedule for row in rows}
    limits = {row.decode_schedule: row.value for row in rows if row.metric == "exposure_limit"}
    assert limits["gamma=1.0"] == 0.5 < limits["gamma=1,head=2"] < 1
    text = next(path for path in write_report(tmp_path / "out") if path.suffix == ".md").read_text()
    for name in ("z-1 ", "gamma=1,head=2", "gamma=1.3,head=3", "gamma=1,head=2 vs w-2"):
        assert f"| {name}" in text


# Grids and costs.


def test_the_paper_is_63_offline_runs_and_needs_no_data():
    result = CliRunner().invoke(app, ["sweep", "paper", "--dry-run", "--tokens-per-s", "10000", "--json"])
    assert result.exit_code == 0, result.output
    runs = json.loads(result.stdout)["runs"]
    offline = [run for run in runs if run["modes"] == ["offline"]]
    assert len(offline) == 63
    assert len({(run["recipe"], run["schedule"], run["seed"]) for run in offline}) == 63
    assert {run["recipe"] for run in offline} == {"charades-sta", "activitynet", "libriheavy"}
    assert len(runs) == 99
    for run in runs:
        assert run["train_h"] == pytest.approx(run["tokens"] / 10000 / 3600)
        assert run["flops"] > 6 * 15e6 * run["tokens"] * 0.3  # of 29 M parameters some serve the source alone, some the text
        assert run["rate"] == "given by --tokens-per-s"
    text = CliRunner().invoke(app, ["sweep", "paper", "--dry-run", "--tokens-per-s", "10000"]).stdout
    assert "63 offline training runs" in text
    assert "upper bound" in text


def test_seeds_of_a_grid_are_runs_of_the_whole_grid():
    def runs(*arguments):
        dry = ["sweep", "frontier-msvd", "--dry-run", "--tokens-per-s", "10000", "--json"]
        result = CliRunner().invoke(app, [*dry, *arguments])
        assert result.exit_code == 0, result.output
        return [(run["schedule"], run["seed"]) for run in json.loads(result.stdout)["runs"]]

    assert runs("--seeds", "2,0") == [run for run in runs() if run[1] != 1]
    assert len(runs("--seeds", "1")) == 3


@pytest.mark.parametrize("name", ["msvd", "librispeech", "multi30k", "charades-sta"])
def test_flops_are_those_that_torch_counts(name):
    config = recipe(name)
    source, steps = 20, 12
    noise = cost._Noise(config, source)
    model = Model(config.model).double()  # in float32 a CPU takes products that torch's counter does not know
    targets = [tuple(range(5, 5 + steps - 1))]
    batch = model.batch([noise.tokens.values_TE.double()], targets, PowerLaw(0.3))
    with FlopCounterMode(display=False) as counter:
        model.loss(batch).backward()
    shape = config.model.decoder
    # Done but not counted: the tied weight's gradient, which is added in place, and attention itself. Counted by us but not done: the
    # gradient of the features, which are given.
    added = 2 * steps * shape.dim * shape.vocab_size
    inner = shape.heads * shape.head_dim
    attention = 3 * 4 * inner * (shape.layers * (steps * steps + steps * source) + shape.source_layers * source * source)
    given = 0 if shape.source_vocab else 2 * source * shape.source_dim * shape.dim
    expected = cost.flops_per_example(dataclasses.replace(config, alignment=None), source=source, steps=steps)
    assert expected - added - attention - given == counter.get_total_flops()


@pytest.mark.parametrize(("name", "steps"), [("msvd-q1", 2082), ("multi30k-q1", 1684), ("librispeech-q1", 2576), ("long30-q1", 2520)])
def test_estimated_steps_are_near_those_of_real_batches(name, steps):
    """The steps are those that `training.buckets.plan` gave on the corpora themselves."""
    (first, *_) = cost.estimates(grid(name), {})
    assert first.steps == pytest.approx(steps, rel=0.06)


def test_rates_come_from_finished_runs_or_a_calibration(swept):
    table = Table(swept[0])
    tiny = _tiny()
    rates = cost.known_rates(tiny, table.records(), table.rows())
    trained = [record for record in table.records().values() if record.kind == "train"]
    assert rates["toy"].tokens_per_s == pytest.approx(sum(r.tokens for r in trained) / sum(r.seconds for r in trained))
    assert rates["toy"].where == "measured in 5 runs of toy in this folder"
    assert rates["toy"].decoded_per_s > 0
    sizes = Sizes(train_examples=12, source_tokens=11, steps=10, decode_clips=12, where="counted")
    sized = Grid(name="tiny", about="", arms=(dataclasses.replace(tiny.arms[0], sizes=sizes),))
    threads = torch.get_num_threads()
    measured = cost.measured_rates(sized)
    assert torch.get_num_threads() == threads
    assert measured["toy"].tokens_per_s > 0
    assert "measured now" in measured["toy"].where
    (first, *_) = cost.estimates(sized, measured)
    assert (first.tokens, first.steps) == (2 * 12 * 21, 2 * 3)  # 252 tokens an epoch in batches of 120, 0.85 full
    assert [one.tokens for one in cost.estimates(tiny, rates)] == [None] * 5  # of a corpus whose size nobody said nothing is claimed


@pytest.mark.parametrize("name", list(grids()))
def test_every_grid_can_be_written_down_and_read_again(name, tmp_path):
    whole = grid(name)
    (tmp_path / "grid.json").write_text(json.dumps(whole.to_dict()))
    assert grid(str(tmp_path / "grid.json")) == whole
    assert len({(config.name, str(config.schedule), config.loop.seed) for arm in whole.arms for config in arm.configs()}) == sum(
        len(arm.schedules) * len(arm.seeds) for arm in whole.arms
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "expected object: got"),
        ("{}", "expected a field arms, which is missing"),
        ('{"arms": []}', "at least one arm"),
        ('{"arms": [{"recipe": "msvd"}]}', "expected a field schedules, which is missing"),
        ('{"arms": [{"recipe": "nothing", "schedules": ["0"]}]}', "no recipe 'nothing'"),
        ('{"arms": [{"recipe": "msvd", "schedules": ["dial"]}]}', "no schedule of its own"),
        ('{"arms": [{"recipe": "msvd", "schedules": ["fast"]}]}', "not a schedule: 'fast'"),
        ('{"arms": [{"recipe": "msvd", "schedules": ["0"], "colour": 1}]}', "colour"),
        (
            '{"arms": [{"recipe": "msvd", "schedules": ["0"], "decodes": [{"mode": "live"}]}]}',
            "'streaming': got 'live'",
        ),
        ('{"arms": [{"recipe": "adapt-tiny.en", "schedules": ["0"]}]}', "draws its own schedules"),
        ('{"arms": [{"recipe": "msvd", "schedules": "01"}]}', "schedules: expected array: got '01'"),
        ('{"arms": [{"recipe": "msvd", "schedules": ["1", "gamma=1.0"]}]}', "each schedule and seed once"),
        ('{"arms": [{"recipe": "msvd", "schedules": ["0"], "decodes": [{"schedules": ["1", "1.0"]}]}]}', "each once: got 1, 1.0"),
        ('{"arms": [{"recipe": "msvd", "schedules": ["0"], "seeds": "012"}]}', "seeds: expected array: got '012'"),
        ('{"arms": [{"recipe": "msvd", "schedules": ["0"], "seeds": [0.7]}]}', "seeds.0.: expected int: got 0.7"),
        ('{"arms": [{"recipe": "msvd", "schedules": ["0"], "seeds": [true]}]}', "seeds.0.: expected int: got True"),
        (
            '{"arms": [{"recipe": "msvd", "schedules": ["0"], '
            '"sizes": {"train_examples": NaN, "source_tokens": 1, "steps": 1, "decode_clips": 1, "where": ""}}]}',
            "train_examples: expected int: got nan",
        ),
        ('{"arms": [{"recipe": "msvd", "schedules": ["0"], "limit": 2.5}]}', "limit: expected int . null: got 2.5"),
        ('{"arms": [{"recipe": "msvd", "schedules": ["0"], "seeds": [9223372036854775808]}]}', "seed must be .* got 9223372036854775808"),
        ('{"arms": [{"recipe": "msvd", "schedules": ["0"], "decodes": [{"limit": "all"}]}]}', "limit: expected int . null: got 'all'"),
        ('{"arms": [{"recipe": "msvd", "schedules": ["0"], "decodes": [{"metrics": []}]}]}', "at least one metric of wer"),
        ('{"arms": [{"recipe": "msvd", "schedules": ["0"], "decodes": [{"split": 5}]}]}', "split: expected str: got 5"),
        (
            '{"arms": [{"recipe": "msvd", "schedules": ["0"], "decodes": [{"normalise": "x"}]}]}',
            "or 'none': got 'x'",
        ),
    ],
)
def test_what_is_no_grid_is_one_line(text, complaint, tmp_path):
    path = tmp_path / "grid.json"
    path.write_text(text)
    with pytest.raises(ZendayaError, match=complaint.replace("(", r"\(")) as raised:
        grid(str(path))
    assert "\n" not in str(raised.value)


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "zendaya", *map(str, arguments)], capture_output=True, text=True, timeout=600, check=False)


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, corpus):
    (tmp_path / "tiny.json").write_text(GRID)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    with sqlite3.connect(foreign / "results.sqlite") as database:
        database.execute("CREATE TABLE others (name TEXT)")
    database.close()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "results.sqlite").write_bytes(b"not a database at all" * 100)
    newer = tmp_path / "newer"
    Table(newer, create=True)
    with sqlite3.connect(newer / "results.sqlite") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    tiny = tmp_path / "tiny.json"
    for arguments, complaint in (
        (["nothing"], "no grid 'nothing'; expected one of paper"),
        ([tmp_path / "no.json"], "no such file or folder"),
        ([tiny], "needs --data"),
        ([], "give a grid"),
        ([tiny, "--data", tmp_path / "nowhere", "--out", tmp_path / "out"], "no such folder; expected the corpora of the grid"),
        (["msvd-q1", "--data", tmp_path, "--out", tmp_path / "out"], "msvd.jsonl"),
        ([tiny, "--data", corpus, "--out", foreign], "a database of another program"),
        ([tiny, "--data", corpus, "--out", broken], "not a table of results"),
        ([tiny, "--data", corpus, "--out", newer], "results of version 99"),
        ([tiny, "--data", corpus, "--out", tiny], "tiny.json: not a folder for results"),
        ([tiny, "--dry-run", "--tokens-per-s", "0"], "above 0: got 0"),
        (["msvd-q1", "--seeds", "0,7"], "grid msvd-q1 has the seeds 0, 1, 2: got 0, 7"),
        (["msvd-q1", "--seeds", "first"], "--seeds: expected values with commas between them"),
        ([tiny, "--data", corpus, "--out", tmp_path / "out", "--ray", "127.0.0.1:1"], "no Ray cluster at 127.0.0.1:1"),
    ):
        if "--ray" in arguments and not _has_ray():
            continue
        ran = run("sweep", *arguments)
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1), (arguments, ran.stdout, ran.stderr)
        assert complaint in ran.stderr
        assert "--ray" in arguments or not (tmp_path / "out").exists()


def test_an_empty_file_of_results_is_called_so(tmp_path):
    (tmp_path / "results.sqlite").touch()
    with pytest.raises(ZendayaError, match=r"results.sqlite: an empty file: expected the results of zendaya sweep"):
        Table(tmp_path)
    assert Table(tmp_path, create=True).rows() == []


def _has_ray():
    import importlib.util

    return importlib.util.find_spec("ray") is not None


def test_a_decode_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="each once"):
        Decode(schedules=("0", "0"))
    with pytest.raises(ConfigError, match="at least 1 clip"):
        Decode(limit=0)
    assert Decode(mode="streaming").scale_of_mode == "window"
