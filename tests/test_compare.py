"""The pages and tables that compare two results, as a browser and a terminal show them, without a network."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.readme import one
from tests.test_newcomer import Newcomer
from tests.test_pipeline import STAGES

pytestmark = pytest.mark.servers

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH = 1300  # of the window, in pixels
SECTION = "Change one thing, and compare"

# Draws with SVG instead of a canvas, so that what is drawn can be read.
PREPARE = """<script>
const charts = [], embed = window.vegaEmbed;
if (embed) vegaEmbed = (where, spec) => charts.push(embed(where, spec, {renderer: "svg"}).then(() => where));
</script>"""
REPORT = """<script>
addEventListener("load", async () => {
    const texts = (root, of) => [...root.querySelectorAll(of)].map(each => each.textContent);
    const drawn = [];
    for (const where of await Promise.all(charts)) {
        const chart = document.querySelector(where);
        const marks = of => [...chart.querySelectorAll(of)].filter(path => path.getTotalLength() > 0)
            .map(path => path.getAttribute("stroke") ?? path.getAttribute("fill"))
            .filter(colour => colour != "transparent");
        const legend = Object.fromEntries([...chart.querySelectorAll(".role-legend")].map(legend =>
            [texts(legend, ".role-legend-title text")[0], texts(legend, ".role-legend-label text")]));
        drawn.push({where, legend, words: texts(chart, "text"), title: texts(chart, ".role-title-text text")[0],
            lines: marks(".mark-line path"), points: marks(".mark-symbol.role-mark path")});
    }
    const images = [...document.images].map(image => {
        const {left, right, top} = image.getBoundingClientRect();
        return {name: image.closest("div[id]").querySelector("p").textContent,
            revision: image.previousElementSibling.textContent,
            pixels: image.naturalWidth, left, right, top};
    });
    const report = document.createElement("pre");
    report.id = "report";
    report.textContent = JSON.stringify({charts: drawn, images, text: document.body.innerText});
    document.body.append(report);
});
</script>"""


@pytest.fixture(scope="module")
def pages(newcomer: Newcomer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What the browser shows: before and after the scripts were put into the page, and of one revision."""
    (browser,) = [path for name in BROWSERS if (path := shutil.which(name))][:1] or [None]
    if not browser:
        pytest.skip("Chromium is not installed")
    profile = tmp_path_factory.mktemp("profile")
    diff = one(SECTION, "dvc plots diff").replace("EXPERIMENT", newcomer.experiment)
    newcomer.sh(diff)
    pages = {"linked": looked_at(browser, profile, newcomer.folder / "dvc_plots/index.html")}
    install, and_then, offline = one(SECTION, "pip install -e '.[plots]'").partition(" && ")
    assert (install, and_then) == ("pip install -e '.[plots]'", " && ")
    pytest.importorskip("vl_convert")
    newcomer.sh(offline)
    newcomer.sh(diff)
    pages["diff"] = looked_at(browser, profile, newcomer.folder / "dvc_plots/index.html")
    newcomer.sh("dvc plots show -o elsewhere/page")
    pages["show"] = looked_at(browser, profile, newcomer.folder / "elsewhere/page/index.html")
    return pages


def looked_at(browser: str, profile: Path, page: Path) -> dict:
    """What a browser without a network shows of a page."""
    source = page.read_text(encoding="utf-8")
    head, start, body = source.partition("\n<body>\n")
    assert start and body.endswith("</body>\n</html>\n")
    copy = page.with_name("looked_at.html")
    prepared = f"{head}{start}{PREPARE}{body}{REPORT}"
    copy.write_text(prepared, encoding="utf-8")
    command = [
        *(
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
        ),
        *("--disable-background-networking", "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *(f"--window-size={WIDTH},2000", "--virtual-time-budget=30000", "--dump-dom", copy.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (report,) = re.findall(r'<pre id="report">(.*?)</pre>', done.stdout, re.DOTALL) or [None]
    assert report, done.stderr
    return json.loads(html.unescape(report))


def test_the_curves_of_both_revisions_are_drawn_and_told_apart_by_a_legend(pages: dict, newcomer: Newcomer) -> None:
    charts = {chart["title"]: chart for chart in pages["diff"]["charts"]}
    for form in ("constants", "one variable", "two variables"):
        chart = charts[f"Accuracy: {form}"]
        assert set(chart["legend"]["rev"]) == {"main", newcomer.experiment}
        curves = len(chart["legend"]["field"])
        first, second = sorted(set(chart["lines"]))  # a colour each
        assert chart["lines"].count(first) == chart["lines"].count(second) >= curves >= 2


def test_no_chart_is_empty_and_each_names_its_revisions(pages: dict, newcomer: Newcomer) -> None:
    shown, compared = ({chart["where"]: chart for chart in pages[page]["charts"]} for page in ("show", "diff"))
    assert shown.keys() == compared.keys()
    for where, chart in compared.items():
        marks, of_one = (len(one["lines"] + one["points"]) for one in (chart, shown[where]))
        assert marks == 2 * of_one > 0, where
        assert {"main", newcomer.experiment} <= set(chart["words"]), where


def test_pictures_stand_side_by_side_and_none_is_broken(pages: dict, newcomer: Newcomer) -> None:
    pictures = {f"plots/figures/{file.name}" for file in (newcomer.folder / "plots/figures").glob("*.png")}
    found: dict[str, list[dict]] = {}
    for image in pages["diff"]["images"]:
        assert image["pixels"] > 0 and 0 <= image["left"] < image["right"] <= WIDTH, image
        found.setdefault(image["name"], []).append(image)
    assert set(found) == pictures
    for left, right in found.values():
        assert (left["revision"], right["revision"]) == ("main", newcomer.experiment)
        assert left["top"] == right["top"] and left["right"] <= right["left"]
    assert {image["name"] for image in pages["show"]["images"]} == pictures
    assert all(image["pixels"] > 0 for image in pages["show"]["images"])


def test_a_page_that_cannot_load_its_scripts_says_what_to_do(pages: dict) -> None:
    assert not pages["linked"]["charts"]
    assert one(SECTION, "pip install -e '.[plots]'") in pages["linked"]["text"]
    assert "could not be loaded" not in pages["diff"]["text"]


def test_two_experiments_fit_a_terminal_of_120_columns(newcomer: Newcomer) -> None:
    newcomer.run("dvc", "exp", "run", "-n", "fewer-pairs", "-S", "generate.f=0.5", "evaluate")
    table = newcomer.sh(one(SECTION, "dvc exp show"))
    assert max(map(len, table.splitlines())) <= 120, table
    for shown in (newcomer.experiment, "fewer-pairs", "main", "train.r", "generate.f", "2var_exact"):
        assert shown in table
    assert "train.lr" not in table  # which is the same in all


def test_the_differences_of_the_judging_fit_a_screen(newcomer: Newcomer) -> None:
    command = one(SECTION, "dvc metrics diff").replace("EXPERIMENT", newcomer.experiment)
    assert "--targets metrics/evaluate.json" in command
    table = newcomer.sh(command)
    longest = newcomer.sh(f"{command} --all")
    assert "2var_exact" in table
    assert max(map(len, longest.splitlines())) <= 100 and len(longest.splitlines()) <= 30


def test_every_curve_of_a_stage_is_on_the_page(pages: dict) -> None:
    shown = {chart["where"].strip("#") for chart in pages["diff"]["charts"]}
    for stage in STAGES.values():
        for entry in stage.get("plots", []):
            (path,) = entry
            if path.endswith(".csv"):
                assert re.sub(r"\W", "_", path) in shown, path
