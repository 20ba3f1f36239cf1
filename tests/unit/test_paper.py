"""The planner against the figures of the paper, which are written down here once more; and the command `lss paper`.

Bounds are of the project's aims. The seconds that a host takes for an operator are fitted to the ratios of FLOP/s in
Table 3a, so those are not tested; memory, lengths and shares of communication are fitted to nothing.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lss.cli import main
from lss.page import markdown
from lss.paper import facts, figures, report, setting, tables
from lss.paper.sections import SECTIONS
from lss.paper.setting import Run
from lss.plan.memory import Peak
from lss.plan.plan import traced

# Table, GPUs that hold a sequence, tokens, data groups, and GB of a GPU.
MEMORY = [
    ("3a", 6, 348, 1, 0.54),
    ("3a", 36, 2088, 1, 1.01),
    ("3a", 108, 6264, 1, 2.05),
    ("3a", 324, 18792, 1, 5.94),
    ("3a", 864, 50112, 1, 13.58),
    ("4a", 6, 348, 4, 0.54),
    ("4a", 36, 2088, 4, 1.01),
    ("4a", 864, 50112, 4, 13.58),
    ("5a", 108, 1512, 1, 0.74),
    ("5a", 864, 4320, 1, 1.15),
    ("6a", 6, 366, 1, 21.67),
    ("6a", 36, 900, 1, 22.48),
    ("6a", 108, 1512, 1, 23.34),
    ("3b", 36, 2088, 1, 10.29),
    ("6b", 6, 366, 1, 25.28),
]
OUT_OF_MEMORY = [("3b", 108, 6264), ("6b", 36, 900)]
LONGEST = {6: 5900, 12: 8400, 24: 11400, 48: 15800, 96: 22600}
COMMUNICATION = {(36, 2088): 27, (864, 50112): 40}
EFFICIENCY = {"fused and averaged": 151, "averaged only": 147, "neither": 118}
COLLECTIVES = {"basic": 6, "fused": 4, "fused and averaged": 2, "nvidia": 8}


def run_of(table: str, ranks: int, length: int, groups: int = 1) -> Run:
    return Run(
        "large" if table[0] == "6" else "small",
        ranks,
        length,
        groups,
        strategy="megatron" if table[1] == "b" else "lss",
    )


@pytest.mark.parametrize(("table", "ranks", "length", "groups", "gigabytes"), MEMORY)
def test_memory(table, ranks, length, groups, gigabytes):
    plan = run_of(table, ranks, length, groups).plan()
    assert plan.peak.total / 2**30 == pytest.approx(gigabytes, rel=0.15)
    assert plan.fits


@pytest.mark.parametrize(("table", "ranks", "length"), OUT_OF_MEMORY)
def test_what_was_out_of_memory_does_not_fit(table, ranks, length):
    assert not run_of(table, ranks, length).plan().fits


@pytest.mark.parametrize(("ranks", "length"), LONGEST.items())
def test_longest_sequence(ranks, length):
    """Figure 4(b): a sequence 15 % shorter than the paper's longest fits, one 15 % longer does not."""
    shorter, longer = (ranks * round(share * length / ranks) for share in (0.85, 1.15))
    assert Run("small", ranks, shorter).plan().fits
    assert not Run("small", ranks, longer).plan().fits


@pytest.mark.parametrize(("size", "percent"), COMMUNICATION.items())
def test_share_of_communication(size, percent):
    assert 100 * Run("small", *size).plan().communication_share == pytest.approx(percent, abs=8)


def test_what_fusion_and_averaging_bring():
    found = {record.run: record.plan for record in figures.ablation() if record.quantity == "efficiency_at_864"}
    assert found == pytest.approx(EFFICIENCY, abs=10)
    assert sorted(found, key=found.__getitem__) == ["neither", "averaged only", "fused and averaged"]


def test_collectives_of_a_layer():
    assert {record.run: record.plan for record in figures.collectives()} == COLLECTIVES


def test_the_facts_are_the_papers():
    assert [fact.gigabytes for fact in facts.table("3a_lss_linear")] == [row[-1] for row in MEMORY[:5]]
    assert [fact.ran for fact in facts.table("3b_nvidia_linear")] == [True, True, False]


def test_the_page_of_the_docs_is_what_the_command_writes():
    page = (Path(__file__).parents[2] / "docs/paper.md").read_text()
    for name, find in {"3a": lambda: tables.records("3a"), "figure-4c": figures.shares}.items():
        made = markdown("", report.section(name, find()))
        assert made.split("\n\n", 1)[1] in page


@pytest.fixture
def planned(monkeypatch):
    """All plans are one of a small run, but for their setup and memory, which grows with the length; how many."""
    plan = Run("small", 6, 348).plan()
    setups = []

    def found(run):
        setups.append(run.setup)
        return replace(plan, setup=run.setup, peaks=(Peak({"activations": run.length * 300_000}, "forward"),))

    monkeypatch.setattr(setting.Run, "plan", found)
    for module in (tables, figures):
        monkeypatch.setattr(module, "traced", lambda _: traced(plan.setup))
    return setups


def test_the_command(planned, tmp_path, capsys):
    files = {name: tmp_path / f"paper.{name}" for name in ("html", "json", "markdown")}
    assert main(["paper", *(part for name, file in files.items() for part in (f"--{name}", str(file)))]) == 0
    printed, progress = capsys.readouterr()
    assert all(section.title in printed for section in SECTIONS.values())
    assert len(progress.splitlines()) == len(SECTIONS)

    rows = json.loads(files["json"].read_text())
    assert set(rows) == {"hardware", "assumptions", "unknown", "rows"}
    assert {row["section"] for row in rows["rows"]} == set(SECTIONS)
    keys = {"section", "run", "quantity", "paper", "plan", "gpus", "length", "deviation", "deviates_by"}
    assert all(set(row) == keys for row in rows["rows"])

    html = ElementTree.fromstring(files["html"].read_text())
    captions = [caption.text for caption in html.iter("caption")]
    assert all(any(caption.startswith(section.title) for caption in captions) for section in SECTIONS.values())
    assert len(list(html.iter("{http://www.w3.org/2000/svg}svg"))) == 4
    assert all(section.title in files["markdown"].read_text() for section in SECTIONS.values())


def test_one_section(planned, capsys):
    assert main(["paper", "collectives"]) == 0
    assert SECTIONS["3a"].title not in capsys.readouterr().out
    assert len(planned) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [(["7a"], "allowed: 3a, 3b"), (["--json", "missing/file"], "allowed: a file in a folder that exists")],
)
def test_bad_input(planned, capsys, words, said):
    assert main(["paper", *words]) == 2
    assert said in capsys.readouterr().err
    assert not planned


def test_without_matplotlib(planned, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["paper", "--html", str(tmp_path / "paper.html")]) == 2
    assert 'pip install "lss-transformer[report]"' in capsys.readouterr().err
    assert not planned
