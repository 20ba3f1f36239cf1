"""Pages of `lss plan`: what is on them, and that they need no other file."""

import json
import sys
from xml.etree import ElementTree

import pytest

from lss.cli import main
from lss.plan import command

FLAGS = ["gpt-tiny", "--ranks", "2", "--length", "256"]
SVG = "{http://www.w3.org/2000/svg}"


def read(file):
    text = file.read_text()
    html = ElementTree.fromstring(text.replace("<!DOCTYPE html>\n", ""))
    assert not any("href" in name and not value.startswith("#") for node in html.iter() for name, value in node.items())
    assert "src=" not in text
    return html


def table(html, caption):
    (found,) = (node for node in html.iter("table") if node.find("caption").text.startswith(caption))
    return {row[0].text: [cell.text for cell in row[1:]] for row in found.iter("tr")}


def test_of_a_plan(tmp_path, capsys):
    files = {name: tmp_path / f"plan.{name}" for name in ("html", "json")}
    written = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    assert main(["plan", *FLAGS, "--compression", "2", *written]) == 0
    html, plan = read(files["html"]), json.loads(files["json"].read_text())
    asked = table(html, "What was asked")
    assert asked["tokens of a sequence"] == ["256"]
    assert asked["what if: compression"] == ["2.0"]
    assert {kind: row[0] for kind, row in table(html, "memory").items() if kind} == {
        kind: f"{size / 1e9:.3f} GB" for kind, size in plan["bytes"].items()
    }
    assert table(html, "messages")["all_gather"][2] == str(plan["collectives"][1]["count"])
    assert table(html, "step")["efficiency by time"][0].startswith(f"{plan['efficiency']['time']:.0%}")
    words = " ".join(node.text or "" for node in html.iter())
    assert "would NOT equal the serial one" in words
    assert "not measured" in words
    drawn = ["".join(svg.itertext()) for svg in html.iter(f"{SVG}svg")]
    assert len(drawn) == 2
    assert "workspace" in drawn[0]
    assert "waiting" in drawn[1]


def test_of_the_longest_that_fits(tmp_path, capsys):
    file = tmp_path / "plan.html"
    assert main(["plan", *FLAGS, "--fit", "200MB", "--html", str(file)]) == 0
    words = [node.text or "" for node in read(file).iter("p")]
    assert any(line.startswith("longest sequence that fits into 200MB") for line in words)
    assert any("fits into 0.200 GB" in line for line in words)


def test_of_the_best(tmp_path, capsys):
    file = tmp_path / "plan.html"
    assert main(["plan", *FLAGS, "--best", "--html", str(file)]) == 0
    html = read(file)
    assert table(html, "the fastest")["1"][0] in ("1 x 2", "2 x 1")
    assert any("lss train" in (node.text or "") for node in html.iter("p"))
    assert len(list(html.iter(f"{SVG}svg"))) == 2


@pytest.fixture
def unplanned(monkeypatch):
    def never(*_):
        raise AssertionError("planned")

    monkeypatch.setattr(command, "make_plan", never)


def test_without_matplotlib(unplanned, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plan", *FLAGS, "--html", str(tmp_path / "plan.html")]) == 2
    assert 'pip install "lss-transformer[report]"' in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--html", "--json"])
def test_into_no_folder(unplanned, capsys, flag):
    assert main(["plan", *FLAGS, flag, "missing/file"]) == 2
    assert "allowed: a file in a folder that exists" in capsys.readouterr().err
