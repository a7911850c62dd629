"""Reports of a sweep: the paper's tables and figures from a table of results; missing numbers are shown as missing."""

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from zendaya.cli import app
from zendaya.errors import ZendayaError
from zendaya.evaluation.metrics.quality import bleu
from zendaya.evaluation.metrics.results import write_traces
from zendaya.evaluation.metrics.significance import bootstrap, paired_bootstrap, statistics
from zendaya.records import Trace
from zendaya.research.report import published
from zendaya.research.report.figures import panels
from zendaya.research.report.results import Results
from zendaya.research.report.tables import symmetric
from zendaya.research.report.write import latex, tex, write_report
from zendaya.research.sweep.table import Record, Row, Table, now

WORDS = ("a man", "a dog", "runs", "sings", "in the rain", "at home", "slowly", "again")
CLIPS = 30


def trace(clip, text, reference, schedule, scale="segment"):
    return Trace(
        clip=clip, split="test", schedule=schedule, scale=scale, window_tokens=4, num_source_tokens=4, text=text, references=(reference,),
        reference_steps=(3,), predicted_steps=(2,), tokens=(5, 6), windows=(0, 0), horizons=(2, 4), effective_horizons=(2, 4),
        arrived=(2, 4),
    )  # fmt: skip


class Made:
    """A table of results with known numbers: texts that lose words at random, at a rate per setting."""

    def __init__(self, folder):
        self.folder, self.table, self.texts = folder, Table(folder, create=True), {}
        rng = np.random.default_rng(1)
        self.references = [" ".join(rng.choice(WORDS, 5)) for _ in range(CLIPS)]

    def add(self, mode, train, decode, seed, loss, lag, recipe="msvd", limit=None, form="fix"):
        rng = np.random.default_rng([seed, int(1000 * loss)])
        kept = [" ".join(word if rng.random() > loss else "cat" for word in text.split()) for text in self.references]
        key = f"{recipe}-{mode}-{train}-{decode}-{seed}-{limit}".replace("=", "").replace(",", "-")
        out = self.folder / "decodes" / key
        out.mkdir(parents=True)
        digest = write_traces(out, [trace(f"{n}", *pair, decode) for n, pair in enumerate(zip(kept, self.references, strict=True))])
        found = bleu(kept, [[text] for text in self.references])
        self.texts[mode, train, decode, seed] = kept
        model = {"decoder": {"source_dim": 512}, "window_tokens": 80, "max_steps": 40}
        training = {"recipe": {"corpus": "msvd", "encoder": "features:x.npz,rate=3", "model": model}, "rho": 3.4}
        evaluation = {"normalise": "english", "limit": limit, "store": {"encoder": "features dim=512 rate=3"}}
        signature = {"metric": found.signature, "training": training, "evaluation": evaluation}
        base = {field.name: "" for field in dataclasses.fields(Row)} | {
            "cell": key, "run": f"{train}-{seed}", "grid": "made", "recipe": recipe, "corpus": "msvd", "split": "test", "form": form,
            "mode": mode, "scale": "segment", "train_schedule": train, "decode_schedule": decode, "seed": seed, "n": CLIPS, "lag": lag,
            "signature": json.dumps(signature), "traces": f"decodes/{key}/traces.jsonl", "traces_digest": digest, "seconds": 1.0,
            "data_digest": "0123456789abcdef", "created": now(),
        }  # fmt: skip
        values = {"BLEU": found.value, "AL": lag, "LAAL": lag, "first_token": lag / 2, "exposure": 0.8, "predicted_steps": 9.0}
        record = Record(
            cell=key, kind="evaluate", label=key, status="done", error="", recipe=recipe, steps=None, tokens=None, seconds=1.0, config="{}",
            created=now(),
        )  # fmt: skip
        self.table.write(record, [Row(**base | {"metric": name, "value": value}) for name, value in values.items()])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """γ→0 worse than γ = 0.3 on every seed, γ = 1 worst; streaming with all γ, wait-k and a policy; no METEOR."""
    made = Made(tmp_path_factory.mktemp("made"))
    for seed in (0, 1, 2):
        made.add("offline", "gamma=0.0", "gamma=0.0", seed, 0.3, 4.0)
        made.add("offline", "gamma=0.3", "gamma=0.3", seed, 0.02, 3.0)
        made.add("offline", "gamma=1.0", "gamma=1.0", seed, 0.6, 1.0)
        for decode, loss, lag in (
            ("gamma=0.2", 0.1, 3.0),
            ("gamma=1.0", 0.4, 1.0),
            ("wait-k=2,stride=1.5", 0.5, 1.5),
            ("wait-k=5,stride=1.5", 0.2, 3.8),
        ):
            made.add("streaming", "dial+wait-k=0.2", decode, seed, loss, lag)
    made.add("streaming", "dial+wait-k=0.2", "alignatt=2,chunk=1", 0, 0.15, 2.0)
    return made


def test_experiments_are_not_mixed(tmp_path):
    made = Made(tmp_path)
    made.add("offline", "gamma=0.0", "gamma=0.0", 0, 0.3, 4.0)
    made.add("offline", "gamma=0.0", "gamma=0.0", 0, 0.9, 4.0, limit=10)  # a smoke run in the same folder
    values = {row.cell: row.value / 100 for row in made.table.rows() if row.metric == "BLEU"}
    groups = Results(tmp_path).groups
    assert len({group.label for group in groups}) == len(groups) == 2
    assert sorted(group.settings["gamma=0.0"].mean("BLEU-4") for group in groups) == sorted(values.values())
    made = Made(tmp_path / "alone")
    made.add("offline", "gamma=0.0", "gamma=0.0", 0, 0.3, 4.0)
    assert [group.label for group in Results(tmp_path / "alone").groups] == ["msvd"]


@pytest.fixture(scope="module")
def written(made, tmp_path_factory):
    to = tmp_path_factory.mktemp("report") / "out"
    assert {path.name for path in write_report(made.folder, to=to)} == {
        "offline.svg",
        "streaming.svg",
        "report.md",
        "tables.tex",
        "report.html",
    }
    return to


def tables(text):
    """The tables of a page of Markdown: (name, rows of cells)."""
    for part in text.split("\n## ")[1:]:
        name, _, rest = part.partition("\n")
        yield name, [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rest.splitlines() if line.startswith("| ")]


def test_every_table_of_the_paper_is_there(written):
    found = dict(tables((written / "report.md").read_text()))
    assert set(found) == {
        "Table 1",
        "Table 2",
        "Table 3",
        "Table 4",
        "Table A1",
        "Table A2",
        "Table A3",
        "Q1",
        "Q2",
        "Q3",
        "Whole dial",
        "All decodes",
    }
    fixed = {row[0]: row for row in found["Table 2"]}
    assert fixed["Charades-STA (paper)"][1:] == ["0.0336", "**0.0402 (γ=0.30)**", "0.2096", "**0.2115**", "+19.6%", "0.77", "1"]
    assert fixed["LibriHeavy (paper)"][3:5] == ["0.5627", "0.5608"]
    assert set(fixed["Charades-STA, ours"][1:]) == {"–"}  # it was not run
    assert fixed["msvd"][3:5] == ["–", "–"]  # METEOR was not measured
    seeded = {row[0]: row for row in found["Table A3"]}
    assert seeded["0.7"][1] == "–"
    assert seeded["0.7"][-6:] == [
        "**0.0410 ± 0.0013**", "0.2098 ± 0.0077", "**0.0197 ± 0.0039**", "**0.1225 ± 0.0053**", "0.2033 ± 0.0020", "0.5422 ± 0.0017"
    ]  # fmt: skip


def test_numbers_are_those_of_the_sweep(made, written):
    found = dict(tables((written / "report.md").read_text()))
    values = {(row.mode, row.decode_schedule, row.seed): row.value / 100 for row in made.table.rows() if row.metric == "BLEU"}

    def seeds(decode):
        return [values["offline", decode, seed] for seed in (0, 1, 2)]

    (row,) = [row for row in found["Table 2"] if row[0] == "msvd"]
    base, best = np.mean(seeds("gamma=0.0")), np.mean(seeds("gamma=0.3"))
    assert row[1:3] == [f"{base:.4f}", f"**{best:.4f} (γ=0.3)**"]
    assert row[5:] == [f"{100 * (best - base) / base:+.1f}%", "0.80", "3"]
    seeded = {row[0]: row for row in found["Table A3"]}
    assert seeded["0.3"][1] == f"**{best:.4f} ± {np.std(seeds('gamma=0.3'), ddof=1):.4f}**"
    assert seeded["1"][1] == f"{np.mean(seeds('gamma=1.0')):.4f} ± {np.std(seeds('gamma=1.0'), ddof=1):.4f}"


def test_an_anchor_shows_its_first_token(written):
    (part,) = [part for part in (written / "report.md").read_text().split("\n## ") if "msvd (dial" in part and "Streaming anchors" in part]
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in part.splitlines() if line.startswith("| ")}
    assert rows["AL"] == ["3.0", "**1.0**", "1.5", "3.8", "2.0"]
    assert rows["first"] == ["1.5", "**0.5**", "0.8", "1.9", "1.0"]


def test_intervals_are_those_of_the_bootstrap(made, written):
    found = dict(tables((written / "report.md").read_text()))
    references = [[text] for text in made.references]

    def stats(*key):
        return statistics("bleu", made.texts[key], references)

    ours, base = stats("offline", "gamma=0.3", "gamma=0.3", 0), stats("offline", "gamma=0.0", "gamma=0.0", 0)
    (row,) = [row for row in found["Table A1"] if row[0].startswith("msvd")]
    interval, gap = bootstrap(ours), paired_bootstrap(ours, base)
    assert row[2:4] == [f"{ours.score / 100:.4f}", f"[{interval.low / 100:.4f}, {interval.high / 100:.4f}]"]
    assert row[6] == f"**{gap.value / 100:.4f} [{gap.low / 100:.4f}, {gap.high / 100:.4f}]**"
    pairs = [row for row in found["Table 4"] if row[0].startswith("msvd")]
    assert [row[1:4] for row in pairs] == [
        [words, lags, seed]
        for words, lags in (("z-1 vs w-2 (nearest lag)", "1.0, 1.5"), ("z-0.2 vs w-5 (best)", "3.0, 3.8"))
        for seed in ("0", "1", "2", "mean of 3")
    ]
    dial = "dial+wait-k=0.2"
    sides = [[stats("streaming", dial, decode, seed) for seed in range(3)] for decode in ("gamma=0.2", "wait-k=5,stride=1.5")]
    gaps = [paired_bootstrap(ours, theirs) for ours, theirs in zip(*sides, strict=True)]
    assert pairs[5][4].strip("*").startswith(f"{gaps[1].value / 100:.4f} [")
    values = np.array([gap.value for gap in gaps]) / 100
    assert pairs[7][4].strip("*") == f"{values.mean():.4f} ± {values.std(ddof=1):.4f}"
    assert pairs[7][4].startswith("**") == (values.min() > 0 and values.mean() >= 3 * values.std(ddof=1) / np.sqrt(3))


def test_every_gamma_is_compared_with_full_and_wait_k(made, written):
    found = dict(tables((written / "report.md").read_text()))
    references, dial = [[text] for text in made.references], "dial+wait-k=0.2"

    def gaps(mode, *pair):
        sides = [[statistics("bleu", made.texts[mode, train, decode, seed], references) for seed in range(3)] for train, decode in pair]
        return [paired_bootstrap(ours, theirs) for ours, theirs in zip(*sides, strict=True)]

    def cell(found):
        values = np.array([gap.value for gap in found]) / 100
        mean = f"{values.mean():.4f} ± {values.std(ddof=1):.4f}".replace("-", "−")
        bold = abs(np.sign(values).sum()) == 3 and abs(values.mean()) >= 3 * values.std(ddof=1) / np.sqrt(3)
        text = f"{mean} ({sum(gap.excludes_zero for gap in found)} of 3)"
        return f"**{text}**" if bold else text

    against_full = {row[2]: row for row in found["Q1"][1:]}
    assert set(against_full) == {"z-0.3", "z-1"}
    better, worse = (gaps("offline", (name, name), ("gamma=0.0", "gamma=0.0")) for name in ("gamma=0.3", "gamma=1.0"))
    assert against_full["z-0.3"][3:5] == ["3", cell(better)]
    assert against_full["z-1"][4] == cell(worse)
    assert against_full["z-1"][-2:] == ["–", "–"]  # the head of this form reads the whole source first
    by_lag = {row[1]: row for row in found["Q2"][1:]}
    assert set(by_lag) == {"z-0.2 vs w-5", "z-1 vs w-2"}
    assert by_lag["z-0.2 vs w-5"][2:] == [
        "3.0, 3.8",
        "–, –",
        "1.5, 1.9",
        "3",
        cell(gaps("streaming", (dial, "gamma=0.2"), (dial, "wait-k=5,stride=1.5"))),
    ]
    (foretold,) = found["Q3"][1:]
    assert all(gap.high < 0 for gap in worse)
    assert foretold == ["msvd", "3.40", f"{-np.log(0.3) / np.log(9):.2f}", f"{-np.log(0.1) / np.log(9):.2f}", "BLEU-4", "3", "0.3", "1"]
    (whole,) = found["Whole dial"][1:]
    assert whole[:4] == [f"msvd ({dial})", "z-1", "1.0, 1.0", "3"]
    sides = [
        [statistics("bleu", made.texts[mode, train, "gamma=1.0", seed], references) for seed in range(3)]
        for mode, train in (("streaming", dial), ("offline", "gamma=1.0"))
    ]
    assert whole[4] == cell([paired_bootstrap(ours, theirs) for ours, theirs in zip(*sides, strict=True)])


def test_the_first_token_stands_beside_its_prediction(tmp_path):
    made = Made(tmp_path)
    for decode, loss, lag in (("gamma=0.0", 0.1, 36.0), ("gamma=0.5", 0.12, 8.0)):
        made.add("offline", "dial", decode, 0, loss, lag, form="causal")
    (path,) = [path for path in write_report(tmp_path, formats=["md"]) if path.suffix == ".md"]
    found = dict(tables(path.read_text()))
    (row,) = found["Q1"][1:]
    assert row[-2:] == ["4.0", "6.0"]  # 18 source tokens by the root of 9 steps
    assert found["Q3"][1][-2:] == ["0.5", "–"]  # nothing is lost that the clips could tell


def test_a_head_start_is_a_series_of_its_own(tmp_path):
    made = Made(tmp_path)
    for decode, loss, lag in (("gamma=1.0", 0.4, 1.0), ("gamma=1,head=2", 0.1, 3.0), ("gamma=1.6,head=2", 0.2, 2.5)):
        made.add("streaming", "dial+head=0.2", decode, 0, loss, lag)
    made.add("streaming", "dial+head=0.2", "wait-k=5,stride=1.5", 0, 0.2, 3.8)
    (group,) = Results(tmp_path).groups
    assert [one.name for one in group.ordered] == ["z-1", "w-5", "gamma=1,head=2", "gamma=1.6,head=2"]
    assert [one.name for one in group.by_gamma()] == ["z-1"]
    (panel,) = panels(Results(tmp_path))
    assert [(one.name, len(one.points)) for one in panel.series] == [
        ("ZENDAYA, dial+head=0.2", 1), ("wait-k, dial+head=0.2", 1), ("head=2, dial+head=0.2", 2),
    ]  # fmt: skip
    found = dict(tables(report(tmp_path)))
    assert {row[1] for row in found["Q2"][1:]} == {"z-1 vs w-5", "gamma=1,head=2 vs w-5", "gamma=1.6,head=2 vs w-5"}


def test_an_unknown_loss_is_shown_as_missing(tmp_path):
    made = Made(tmp_path)
    for decode, loss in (("gamma=0.0", 0.1), ("gamma=0.5", 0.9)):
        made.add("offline", "dial", decode, 0, loss, 4.0)
    for path in tmp_path.glob("decodes/*/traces.jsonl"):
        path.unlink()
    assert dict(tables(report(tmp_path)))["Q3"][1][-2:] == ["–", "–"]
    for seed in (1, 2):  # several seeds tell it without traces
        for decode, loss in (("gamma=0.0", 0.1), ("gamma=0.5", 0.9)):
            made.add("offline", "dial", decode, seed, loss, 4.0)
    assert dict(tables(report(tmp_path)))["Q3"][1][-2:] == ["0", "0.5"]


def report(folder):
    (path,) = [path for path in write_report(folder, formats=["md"], force=True) if path.suffix == ".md"]
    return path.read_text()


def test_two_implementations_are_not_compared(tmp_path):
    made = Made(tmp_path)
    for seed in (0, 1, 2):
        for decode, loss in (("gamma=0.0", 0.3), ("gamma=0.3", 0.28)):
            made.add("offline", decode, decode, seed, loss, 4.0)
    for row in [row for row in made.table.rows() if row.metric == "BLEU"]:
        without_java = row.decode_schedule == "gamma=0.3" and row.seed  # two of the six decodes had no Java
        name, value = ("METEOR-nltk", 45.0) if without_java else ("METEOR", 20.0)
        signature = json.dumps({**json.loads(row.signature), "metric": name})
        rows = [one for one in made.table.rows() if one.cell == row.cell]
        made.table.write(
            made.table.records()[row.cell], [*rows, dataclasses.replace(row, metric=name, value=value + row.seed, signature=signature)]
        )
    found = dict(tables(report(tmp_path)))
    seeded = {row[0]: row for row in found["Table A3"]}
    assert seeded["γ→0"][2] == "0.2100 ± 0.0100"
    assert seeded["0.3"][2] == "0.2000 (1)"


def test_own_and_other_schedules_form_one_group(tmp_path):
    made = Made(tmp_path)
    for decode, loss in (("gamma=0.0", 0.3), ("gamma=0.5", 0.05), ("gamma=1.0", 0.5)):
        made.add("offline", "gamma=0.5", decode, 0, loss, 1.0)
    found = dict(tables(report(tmp_path)))
    values = {row.decode_schedule: row.value / 100 for row in made.table.rows() if row.metric == "BLEU"}
    (row,) = [row for row in found["Table 2"] if row[0] == "msvd (gamma=0.5)"]
    assert row[1:3] == [f"{values['gamma=0.0']:.4f}", f"**{values['gamma=0.5']:.4f} (γ=0.5)**"]
    assert "Whole dial" not in found  # a decode is not compared with itself


def test_a_report_needs_no_metric_tools(made, tmp_path, monkeypatch):
    def gone(*_, **__):
        raise ZendayaError("no Java here")

    monkeypatch.setattr("zendaya.evaluation.metrics.significance.statistics", gone)
    told = []
    write_report(made.folder, to=tmp_path, formats=["md"], report=told.append)
    found = dict(tables((tmp_path / "report.md").read_text()))
    assert {row[-1] for row in found["Table A1"] if row[0].startswith("msvd")} == {"–"}
    assert any("no Java here" in words for words in told)


def test_an_unreadable_signature_is_one_line(tmp_path):
    made = Made(tmp_path)
    made.add("offline", "gamma=0.0", "gamma=0.0", 0, 0.3, 4.0)
    (row,) = [row for row in made.table.rows() if row.metric == "BLEU"]
    for signature in ("{", "[]", '{"metric": ""}'):
        made.table.write(made.table.records()[row.cell], [dataclasses.replace(row, signature=signature)])
        with pytest.raises(ZendayaError, match=r"results.sqlite: the BLEU of cell .* no readable signature"):
            write_report(tmp_path)


def test_an_unwritable_place_fails_before_scoring(made, tmp_path):
    (tmp_path / "file").write_text("")
    for to in ("file", "file/inside"):
        told = []
        with pytest.raises(ZendayaError, match="file: not a writable folder"):
            write_report(made.folder, to=tmp_path / to, report=told.append)
        assert told == []


def test_settings_are_compared_on_shared_seeds(tmp_path):
    made = Made(tmp_path)
    for seed, loss in enumerate((0.05, 0.6, 0.6)):  # the first seed is the lucky one
        made.add("offline", "gamma=0.0", "gamma=0.0", seed, loss, 4.0)
    made.add("offline", "gamma=1.0", "gamma=1.0", 0, 0.3, 1.0)
    (path,) = [path for path in write_report(tmp_path, formats=["md"]) if path.suffix == ".md"]
    (row,) = [row for row in dict(tables(path.read_text()))["Table 2"] if row[0] == "msvd"]
    values = {(row.decode_schedule, row.seed): row.value / 100 for row in made.table.rows() if row.metric == "BLEU"}
    assert row[1:3] == [f"{values['gamma=0.0', 0]:.4f}", f"{values['gamma=1.0', 0]:.4f} (γ=1)"]
    assert row[-1] == "1"
    assert row[5].startswith("-")


def test_a_pair_stands_once_and_a_smoke_run_apart(tmp_path):
    made = Made(tmp_path)
    for seed in (0, 1):
        made.add("streaming", "gamma=1.0", "gamma=1.0", seed, 0.1, 3.0)
        made.add("streaming", "wait-k=5,stride=1.5", "wait-k=5,stride=1.5", seed, 0.3, 9.0)
    made.add("streaming", "gamma=1.0", "gamma=1.0", 0, 0.9, 3.0, limit=10)
    (path,) = [path for path in write_report(tmp_path, formats=["md"]) if path.suffix == ".md"]
    found = dict(tables(path.read_text()))
    pairs = [row for row in found["Table 4"] if row[1].startswith("z-1 vs w-5")]
    assert [row[1:4] for row in pairs] == [["z-1 vs w-5 (nearest lag, best)", "3.0, 9.0", seed] for seed in ("0", "1", "mean of 2")]
    names = {row[0] for row in found["All decodes"][1:]}
    assert len(names) == 2
    assert all(re.fullmatch(r"msvd #\w{6}", name) for name in names)


def test_score_and_interval_are_of_one_metric(tmp_path):
    made = Made(tmp_path)
    for decode, loss in (("gamma=0.0", 0.3), ("gamma=0.3", 0.02)):
        made.add("offline", decode, decode, 0, loss, 4.0)
    for row in [row for row in made.table.rows() if row.metric == "BLEU"]:
        rows = [one for one in made.table.rows() if one.cell == row.cell]
        made.table.write(made.table.records()[row.cell], [*rows, dataclasses.replace(row, metric="BLEU-lc", value=row.value + 7)])
    (path,) = [path for path in write_report(tmp_path, formats=["md"]) if path.suffix == ".md"]
    found = dict(tables(path.read_text()))
    (fixed,) = [row for row in found["Table 2"] if row[0] == "msvd"]
    (interval,) = [row for row in found["Table A1"] if row[0].startswith("msvd")]
    assert fixed[1] == interval[4]


def test_bold_where_lower_is_better(tmp_path):
    made = Made(tmp_path)
    for seed in (0, 1, 2):
        made.add("offline", "gamma=0.0", "gamma=0.0", seed, 0.3, 4.0)
        made.add("offline", "gamma=0.3", "gamma=0.3", seed, 0.02, 3.0)
        made.add("offline", "gamma=1.0", "gamma=1.0", seed, 0.6, 3.0)
    for row in made.table.rows():
        if row.metric == "BLEU":
            record = made.table.records()[row.cell]
            made.table.write(
                record,
                [dataclasses.replace(row, metric="WER", value={"0.0": 30, "0.3": 10, "1.0": 60}[row.decode_schedule[6:]] + row.seed)],
            )
    (path,) = [path for path in write_report(tmp_path, formats=["md"]) if path.suffix == ".md"]
    found = dict(tables(path.read_text()))
    assert next(row for row in found["Table 2"] if row[0] == "msvd")[5:7] == ["0.3100", "**0.1100 (γ=0.3)**"]
    cells = {row[0]: row[1] for row in found["Table A3"]}
    assert (cells["0.3"], cells["1"]) == ("**0.1100 ± 0.0100**", "0.6100 ± 0.0100")


def test_the_sample_is_symmetric_and_has_each_reference_once(made, written):
    found = dict(tables((written / "report.md").read_text()))
    rows = found["Table A2"]
    assert rows[0] == ["reference", "z-0.2", "w-5"]
    headings = [number for number, row in enumerate(rows) if row[0].startswith("**Clips where")]
    assert headings == [1, 11]
    for half in (rows[2:11], rows[12:]):
        assert len({row[0] for row in half}) == len(half) == 9
    twice = [
        trace("1", "a man runs", "a man runs", "gamma=0.2"),
        trace("2", "a man runs", "A man runs", "gamma=0.2"),
        trace("3", "x", "a dog", "gamma=0.2"),
    ]
    assert symmetric(twice) == [0, 2]


def test_the_page_is_self_contained(made, written):
    text = (written / "report.html").read_text()
    assert len(text) < 1_000_000
    outside = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'<)]*", text))
    assert outside == {"http://www.w3.org/2000/svg"}  # the name of SVG, which nothing fetches
    assert not re.search(r"<(?:link|img|iframe)\b|\bsrc=|@import|url\(|fetch\(|XMLHttpRequest", text)

    class Reader(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open, self.data, self.inside = [], "", False

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "br"):
                self.open.append(tag)
            self.inside = dict(attrs).get("id") == "data"

        def handle_endtag(self, tag):
            assert self.open.pop() == tag
            self.inside = False

        def handle_data(self, data):
            self.data += data if self.inside else ""

    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    panels = json.loads(reader.data)
    assert [(panel["figure"], panel["y"]) for panel in panels] == [("offline", "BLEU-4"), ("streaming", "BLEU-4")]
    offline, streaming = panels
    assert [(one["name"], one["flat"], len(one["points"])) for one in offline["series"]] == [
        ("ZENDAYA", False, 2),
        ("γ→0, full exposure", True, 1),
    ]
    assert {one["name"]: len(one["points"]) for one in streaming["series"]} == {
        "ZENDAYA, dial+wait-k=0.2": 2, "wait-k, dial+wait-k=0.2": 2, "alignatt, dial+wait-k=0.2": 1
    }  # fmt: skip
    assert [point["x"] for point in streaming["series"][0]["points"]] == [1.0, 3.0]


def test_texts_cannot_break_out_of_the_page(tmp_path):
    made = Made(tmp_path)
    made.references = [f"</script><script>alert({n})</script> & 100% $x_1$ | {n}" for n in range(CLIPS)]
    for decode in ("gamma=0.2", "wait-k=2,stride=1.5"):
        made.add("streaming", "dial", decode, 0, 0.1, 1.0, recipe="</script>x")
    write_report(tmp_path)
    text = (tmp_path / "report" / "report.html").read_text()
    assert text.count("<script") == 2
    assert text.count("</script") == 2
    for part in (tmp_path / "report" / "report.md").read_text().split("\n## ")[1:]:
        bars = {len(re.findall(r"(?<!\\)\|", line)) for line in part.splitlines() if line.startswith("|")}
        assert len(bars) == 1, part  # as many cells in every row as in the header


def test_figures_are_svg_and_the_same_each_time(made, written, tmp_path):
    for name in ("offline.svg", "streaming.svg"):
        root = ElementTree.parse(written / name).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    write_report(made.folder, to=tmp_path, formats=["md"])
    assert (tmp_path / "offline.svg").read_bytes() == (written / "offline.svg").read_bytes()


def test_latex_is_well_formed(written):
    text = (written / "tables.tex").read_text()
    begun, ended = re.findall(r"\\begin\{([\w*]+)\}", text), re.findall(r"\\end\{([\w*]+)\}", text)
    assert sorted(begun) == sorted(ended)
    assert begun.count("tabular") == 15
    body = re.sub(r"(?m)(?<!\\)%.*$", "", text)
    assert len(re.findall(r"(?<!\\)\{", body)) == len(re.findall(r"(?<!\\)\}", body))
    for tabular in re.findall(r"\\begin\{tabular\}\{@\{\}l(c+)@\{\}\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        columns = len(tabular[0]) + 1
        rows = [line for line in tabular[1].splitlines() if line.endswith(r"\\")]
        assert {len(re.split(r"(?<!\\)&", row)) for row in rows} == {columns}
    assert not re.search(r"[^\x00-\x7f]", body), re.search(r"[^\x00-\x7f]", body)


COMPILER = shutil.which("pdflatex") or shutil.which("tectonic")


@pytest.mark.skipif(COMPILER is None, reason="no pdflatex or tectonic here: the tables are not compiled")
def test_latex_compiles(written, tmp_path):
    text = (written / "tables.tex").read_text()
    (tmp_path / "main.tex").write_text(
        "\\documentclass{article}\\usepackage[utf8]{inputenc}\\usepackage{booktabs,graphicx,array}\\begin{document}"
        + text
        + "\\end{document}"
    )
    ran = subprocess.run([COMPILER, "-interaction=nonstopmode", "main.tex"], cwd=tmp_path, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:]


def test_tex_escapes_special_characters():
    assert tex(r"50% & $x_1$ {γ→0} \a") == r"50\% \& \$x\_1\$ \{$\gamma\to0$\} \textbackslash{}a"
    assert latex([], "note").startswith("% note")


def test_nothing_is_overwritten_without_force(made, written):
    before = (written / "report.md").read_bytes()
    with pytest.raises(ZendayaError, match=r"already holds .*report\.md.*; give --force") as raised:
        write_report(made.folder, to=written)
    assert "\n" not in str(raised.value)
    write_report(made.folder, to=written, force=True)
    assert (written / "report.md").read_bytes() == before


def test_changed_traces_are_refused_removed_ones_missing(tmp_path):
    made = Made(tmp_path)
    for gamma in ("0.0", "0.3"):
        made.add("offline", f"gamma={gamma}", f"gamma={gamma}", 0, 0.2 + float(gamma) / 10, 1.0)
    path = next((tmp_path / "decodes").glob("*0.3*")) / "traces.jsonl"
    lines = path.read_text()
    path.write_text(lines.replace("cat", "dog"))
    with pytest.raises(ZendayaError, match="the traces were changed after scoring"):
        write_report(tmp_path)
    path.unlink()
    write_report(tmp_path, formats=["md"])
    (row,) = [row for row in dict(tables((tmp_path / "report/report.md").read_text()))["Table A1"] if row[0].startswith("msvd")]
    assert row[2:4] == row[6:8] == ["–", "–"]
    assert row[4] != "–"


def test_bad_input_is_one_line(tmp_path, made):
    Table(tmp_path / "empty", create=True)
    for arguments, complaint in (
        ([tmp_path / "nowhere"], "no such file; expected the folder of a sweep"),
        ([tmp_path / "empty"], "holds no results yet"),
        ([made.folder, "--format", "pdf"], "one of md, latex, html, got 'pdf'"),
    ):
        result = CliRunner().invoke(app, ["report", *map(str, arguments)])
        assert isinstance(result.exception, ZendayaError), result.output
        assert complaint in str(result.exception)
        assert "\n" not in str(result.exception)


def test_slow_scoring_is_reported(tmp_path, made):
    result = CliRunner().invoke(app, ["report", str(made.folder), "--to", str(tmp_path), "--format", "md"])
    assert result.exit_code == 0, result.output
    said = result.stderr.splitlines()
    assert any(re.fullmatch(r"BLEU of each clip: msvd gamma=\S+ seed \d at gamma=\S+", line) for line in said), said
    assert len(set(said)) == len(said)  # nothing twice
    assert str(tmp_path / "report.md") in result.stdout.splitlines()


def test_published_numbers_agree_with_each_other():
    for recipe, one in published.FIXED.items():
        assert one.rel == f"{100 * (one.bleu - one.bleu_base) / one.bleu_base:+.1f}%"
        assert one.exposure == pytest.approx(1 / (1 + one.gamma), abs=0.005)
        score, _, _, base, *_ = published.INTERVALS[recipe]["BLEU-4"]
        assert (score, base) == (pytest.approx(one.bleu, abs=2e-4), pytest.approx(one.bleu_base, abs=3e-4))
        pair, delta, _ = published.PAIRS[recipe]
        ours, _, theirs = pair.partition(" vs ")
        assert published.STREAM[recipe][ours][0] - published.STREAM[recipe][theirs][0] == pytest.approx(delta[0], abs=2e-4)
        for numbers in published.INTERVALS[recipe].values():
            assert numbers[6] == pytest.approx(numbers[0] - numbers[3], abs=1.5e-4)


def test_models_of_their_own_are_their_own_group(made):
    groups = Results(made.folder).groups
    assert [(group.mode, group.family, sorted(one.name for one in group.settings.values())) for group in groups] == [
        ("offline", "own", ["z-0", "z-0.3", "z-1"]),
        ("streaming", "dial+wait-k=0.2", ["alignatt=2,chunk=1", "w-2", "w-5", "z-0.2", "z-1"]),
    ]


STUB = """
const page = require("fs").readFileSync(process.argv[2], "utf8"), made = [];
class Node {
  constructor(name) {
    Object.assign(this, { name, attributes: {}, style: {}, dataset: {}, on: {}, children: [] });
    made.push(this);
  }
  setAttribute(key, value) {
    if (/NaN|undefined|Infinity/.test(String(value))) throw new Error(`${this.name} ${key}=${value}`);
    this.attributes[key] = String(value);
  }
  getAttribute(key) { return this.attributes[key]; }
  append(...nodes) { this.children.push(...nodes); }
  addEventListener(what, then) { this.on[what] = then; }
  getBoundingClientRect() { return { left: 1, top: 1 }; }
}
const ids = Object.fromEntries(["data", "tip", "plots", "theme"].map((id) => [id, new Node(id)]));
ids.data.textContent = page.match(/id="data">(.*?)<\\/script>/s)[1];
Object.assign(globalThis, {
  document: { getElementById: (id) => ids[id], createElementNS: (_, name) => new Node(name), createElement: (name) => new Node(name),
              documentElement: new Node("html") },
  addEventListener: () => {}, scrollX: 0, scrollY: 0, innerWidth: 1000, matchMedia: () => ({ matches: false }),
});
(0, eval)(page.match(/<script>\\n(.*?)<\\/script>/s)[1]);
const dots = made.filter((node) => node.name === "circle");
dots[0].on.pointerenter({ pageX: 5, pageY: 5 });
const button = made.find((node) => node.attributes["aria-pressed"]);
button.on.click();
ids.theme.on.click();
console.log(JSON.stringify([ids.plots.children.length, dots.length, ids.tip.textContent.split("\\n")[0], button.attributes["aria-pressed"],
                            document.documentElement.dataset.theme]));
"""


def test_the_script_of_the_page_draws_every_point(written, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: the page's script is not run")
    (tmp_path / "stub.js").write_text(STUB)
    ran = subprocess.run([node, str(tmp_path / "stub.js"), str(written / "report.html")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [2, 2 + 1 + 2 + 2 + 1, "ZENDAYA, γ=0.3", "false", "dark"]
