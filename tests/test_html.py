"""The page, the notebook's view and the colours of a report; the page is looked at by a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sherlorch
from sherlorch.reports import html, picture
from sherlorch.reports.neighbourhood import LIMIT, neighbourhood

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<script>alert('&\"')</script>"
VOID = {"meta", "input", "br", "rect", "line", "path"}

# Asks the page itself: what is too wide, what overlaps, which text leaves its box.
PROBE = """
<style>.scroll, .rows { max-height: none !important; }</style>
<script>
const wrong = [];
const wide = document.documentElement.scrollWidth - window.innerWidth;
if (wide > 0) wrong.push(`the page is ${wide} pixels too wide`);
for (const svg of document.querySelectorAll("svg.picture")) {
  const bodies = [...svg.querySelectorAll(".node .body, .target")].map((rect) => rect.getBBox());
  bodies.sort((a, b) => a.y - b.y);
  bodies.forEach((a, i) => {
    for (let j = i + 1; j < bodies.length && bodies[j].y < a.y + a.height; j += 1) {
      const b = bodies[j];
      if (a.x < b.x + b.width && b.x < a.x + a.width) wrong.push(`boxes overlap at y ${b.y}`);
    }
    if (a.x + a.width > svg.viewBox.baseVal.width) wrong.push(`a box leaves the picture at y ${a.y}`);
  });
  for (const node of svg.querySelectorAll(".node")) {
    const box = node.querySelector(".body").getBBox();
    for (const text of node.querySelectorAll("text")) {
      const place = text.getBBox();
      const right = box.x + box.width, bottom = box.y + box.height + 1;
      if (place.x + place.width > right || place.y + place.height > bottom)
        wrong.push(`text leaves its box: ${text.textContent}`);
    }
  }
  const modules = [...svg.querySelectorAll(".module-name")].map((text) => [text, text.getBBox()]);
  for (const [text, place] of modules) {
    if (place.x + place.width > svg.viewBox.baseVal.width)
      wrong.push(`a module's name is cut: ${text.textContent}`);
    if (bodies.some((b) => place.x < b.x + b.width && b.x < place.x + place.width
        && place.y + 2 < b.y + b.height && b.y < place.y + place.height - 2))
      wrong.push(`a module's name is hidden: ${text.textContent}`);
  }
}
for (const element of document.querySelectorAll("main *, aside *"))
  if (!element.closest("svg") && element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0
      && getComputedStyle(element).display !== "inline" && !element.closest("[hidden], details:not([open])"))
    wrong.push(`cut: ${element.tagName}.${element.className}: ${element.textContent.slice(0, 60)}`);
const act = (element, kind) => element.dispatchEvent(new MouseEvent(kind, { bubbles: true }));
const culprit = document.querySelector(".node.culprit");
act(culprit, "click");
const clicked = document.querySelector("#details h3").textContent;
const fold = document.querySelector(".node.fold");
if (fold) act(fold, "click");
const folded = document.querySelectorAll("#details button").length - 1;
const search = document.getElementById("search");
search.value = "add inf";
search.dispatchEvent(new Event("input"));
const result = {
  wrong: wrong.slice(0, 20), clicked, folded, found: document.getElementById("found").textContent,
  back: getComputedStyle(document.body).backgroundColor, width: window.innerWidth };
const outside = window.parent.document;
outside.body.replaceChildren(
  Object.assign(outside.createElement("pre"), { textContent: JSON.stringify(result) }));
</script>
"""


class Block(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.a_projection_with_quite_a_long_name_of_its_own = nn.Linear(4, 4)
        self.inner = nn.ModuleList([Block(depth - 1)]) if depth else nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.a_projection_with_quite_a_long_name_of_its_own(x)
        for block in self.inner:
            x = block(x)
        return x.view(2, 2, 2).transpose(0, 1).reshape(2, 4)


def report_of(steps: int, name: str = "model") -> sherlorch.DiagnosisReport:
    """A log(0) that then passes `steps` additions, modules in modules, and an attention."""
    torch.manual_seed(0)
    model = Block(5)
    with sherlorch.trace(level="aten") as tracker:
        tracker.watch(model, name=name)
        x = torch.log(torch.zeros(2, 4))
        for _ in range(steps):
            x = x + 1
        x = model(x)
        query = x.view(1, 1, 2, 4)
        loss = nn.functional.scaled_dot_product_attention(query, query, query).sum()
    return tracker.diagnose(loss)


@pytest.fixture(scope="module")
def report() -> sherlorch.DiagnosisReport:
    return report_of(3)


class _Check(HTMLParser):
    """Every element is closed by its own name; the texts and attributes are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.links += [
            f"{name}={value}" for name, value in attributes if name in ("src", "href", "xlink:href")
        ]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parsed(text: str) -> _Check:
    check = _Check()
    check.feed(text)
    check.close()
    assert check.open == []
    return check


def test_the_page_says_what_the_text_says(report: sherlorch.DiagnosisReport, tmp_path: Path) -> None:
    report.to_html(tmp_path / "page.html")
    page = parsed((tmp_path / "page.html").read_text(encoding="utf-8"))
    text = " ".join(" ".join(page.texts).split())
    explanation = report.explanations[report.culprits[0].seq]
    for wanted in (
        "aten.log.default",
        "test_html.py",
        "x = torch.log(torch.zeros(2, 4))",
        str(report.coverage),
    ):
        assert wanted in text
    assert explanation.why.split("`")[0] in text
    assert str(report).splitlines()[-1] in "".join(page.texts)


def test_the_page_needs_nothing_else(report: sherlorch.DiagnosisReport) -> None:
    text = html.render(report)
    assert parsed(text).links == []
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttp", text)
    assert "default-src 'none'" in text


def test_everything_is_escaped() -> None:
    report = report_of(1, name=EVIL)
    report.target_name = EVIL
    report.also_seen = [EVIL]
    report.notes = (EVIL,)
    for text in (html.render(report), report._repr_html_()):
        page = parsed(text)
        assert EVIL not in text
        assert EVIL in "".join(page.texts)
    nodes = re.search(r'id="nodes">(.*?)</script>', html.render(report))
    assert nodes is not None
    assert any(EVIL in node.get("module_path", "") for node in json.loads(nodes[1]).values())


def test_a_saved_report_gives_a_page_too(report: sherlorch.DiagnosisReport) -> None:
    page = parsed(html.page(json.loads(report.to_json())))
    assert "aten.log.default" in "".join(page.texts)


def test_a_healthy_report_is_a_page_without_a_picture() -> None:
    with sherlorch.trace() as tracker:
        y = torch.ones(2) + 1
    page = html.render(tracker.diagnose(y))
    assert "<svg" not in page
    assert "No non-finite values in `y`" in "".join(parsed(page).texts)


def test_runs_of_views_are_folded_and_the_middle_of_a_long_way_is_too(
    report: sherlorch.DiagnosisReport,
) -> None:
    path = report.to_dict()["culprits"][0]["path"]
    folds = [step for step in picture.steps_of(path) if isinstance(step, picture.Fold)]
    assert folds
    assert all(len(fold.nodes) > 1 and all(node["moves"] for node in fold.nodes) for fold in folds)
    long = [{**path[0], "seq": number} for number in range(1000)]
    steps = picture.steps_of(long)
    assert len(steps) == 301
    (fold,) = [step for step in steps if isinstance(step, picture.Fold)]
    assert fold.text == "700 more operations"


def test_modules_are_boxes_in_boxes(report: sherlorch.DiagnosisReport) -> None:
    text = html.render(report)
    names = [re.sub("<.*?>", "", name) for name in re.findall(r'<text class="module-name".*?</text>', text)]
    assert names.count("model") == 1
    assert "inner.0" in names
    assert text.count('<rect class="module"') >= 4


def test_the_neighbourhood_is_limited_and_has_the_culprits_inputs() -> None:
    report = report_of(2500)
    nodes = neighbourhood(report)
    assert len(nodes) == LIMIT
    numbers = {node.seq for node in nodes}
    assert {parent.seq for culprit in report.culprits for parent in culprit.parents} <= numbers


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize(
    ("steps", "width", "options", "back"),
    [
        (3, 1280, (), "rgb(255, 255, 255)"),
        (3, 390, (), "rgb(255, 255, 255)"),
        (2000, 390, ("--blink-settings=preferredColorScheme=0",), "rgb(20, 23, 27)"),
    ],
)
def test_in_a_browser_nothing_overlaps_or_is_cut(
    steps: int, width: int, options: tuple[str, ...], back: str, tmp_path: Path
) -> None:
    result = looked_at(html.render(report_of(steps)), width, tmp_path, options)
    assert result["wrong"] == []
    assert (result["width"], result["back"]) == (width, back)
    assert re.fullmatch(r"\[\d+\] aten\.log\.default", result["clicked"])
    assert result["folded"] > 1
    assert re.fullmatch(r"[1-9]\d* of \d+", result["found"])


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_text_that_leaves_its_box_is_found(
    report: sherlorch.DiagnosisReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "_PITCH", 3)
    wrong = looked_at(html.render(report), 390, tmp_path)["wrong"]
    assert any("text leaves its box: " in problem for problem in wrong)


def looked_at(
    text: str, width: int, folder: Path, options: tuple[str, ...] = (), probe: str = PROBE
) -> dict[str, Any]:
    """What the probe says of a page, in a frame since a browser's window has a least width."""
    assert CHROMIUM is not None
    inner = escape(text.replace("</body>", f"{probe}</body>"))
    page = folder / "page.html"
    page.write_text(
        '<meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<body><iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{inner}"></iframe>',
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", *options,
            "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    body = re.search(r"<body[^>]*><pre>(.*?)</pre>", done.stdout, flags=re.DOTALL)
    assert body is not None, done.stdout[-2000:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(unescape(body[1]))
    return result


def test_a_notebook_gets_a_small_view(report: sherlorch.DiagnosisReport) -> None:
    view = report._repr_html_()
    assert len(view) < 12_000
    page = parsed(view)
    assert "aten.log.default" in "".join(page.texts)
    assert "<script" not in view


def test_colour_changes_no_character(report: sherlorch.DiagnosisReport) -> None:
    console = pytest.importorskip("rich.console")
    from sherlorch.reports.colour import coloured

    assert coloured(str(report)).plain == str(report)
    shown = console.Console(force_terminal=True, color_system="standard", width=40)
    with shown.capture() as capture:
        shown.print(report, soft_wrap=True)
    painted = capture.get()
    assert "\x1b[" in painted
    assert re.sub(r"\x1b\[[\d;]*m", "", painted).rstrip("\n") == str(report)
