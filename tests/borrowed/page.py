"""Look at the run's page in a real browser: python -m tests.borrowed.page RUN ... [--output FOLDER]

Needs Playwright and a Chromium (`pip install playwright`, `playwright install chromium`, or
`--chromium /usr/bin/chromium`), which the suite does not. Opens the pages of the runs, of all of
them together, and of a made run of 100,000 log lines from the disk, without a network, light and
dark, wide and on a phone; compares what the charts draw with metrics.jsonl; follows a growing run.
Takes screenshots to look at.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from rapidformer.report.live import build_server
from rapidformer.report.page import write_page

SIZES = {"wide": (1360, 900), "phone": (390, 844)}
DRAWN = """() => {
  smoothing.percent = 0; redraw();
  const { series, data } = drawn.panels.find((panel) => panel.panel.keys[0] === "loss").chart;
  return series.slice(1).map((one, i) => [one.label, data[0], data[i + 1]]);
}"""


def open_page(browser: Browser, address: str, size: str, scheme: Any) -> tuple[Page, list[str]]:
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme,
        offline=address.startswith("file:"),
    )  # fmt: skip
    page, problems = context.new_page(), []
    page.on("console", lambda m: problems.append(m.text) if m.type != "log" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(address[:7]) else problems.append(r.url))
    page.goto(address)
    page.wait_for_selector("#main section")
    page.wait_for_timeout(300)
    return page, problems


def look(browser: Browser, file: Path, shots: Path) -> None:
    for size in SIZES:
        for scheme in ("light", "dark"):
            page, problems = open_page(browser, file.resolve().as_uri(), size, scheme)
            too_wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            page.screenshot(path=shots / f"{file.stem}-{size}-{scheme}.png", full_page=True)
            assert not problems and too_wide <= 0, (file, size, scheme, problems, too_wide)
            page.context.close()
    print(f"{file}: no console error, no request, nothing wider than the screen")


def compare(browser: Browser, run: Path, file: Path) -> None:
    """The points of the loss, as uPlot has them."""
    page, _ = open_page(browser, file.resolve().as_uri(), "wide", "light")
    series = page.evaluate(DRAWN)
    page.context.close()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for (label, steps, values), name in zip(
        series, ("loss", "eval_loss", "test_loss"), strict=False
    ):
        wanted = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        found = [(x, y) for x, y in zip(steps, values, strict=True) if y is not None]
        assert found == wanted, (run, label)
        print(f"{run}: {len(found)} points of {label} equal metrics.jsonl")


def time_long_run(browser: Browser, folder: Path, shots: Path) -> None:
    names = ("loss", "lr", "grad_norm", "tokens_per_second", "samples_per_second", "step_time",
             "mfu", "memory_gib", "padding_share")  # fmt: skip
    run = folder / "long"
    run.mkdir()
    with (run / "metrics.jsonl").open("w") as file:
        for n in range(1, 100_001):
            values = {name: (n * 7919 % 1000 + k) / n**0.5 for k, name in enumerate(names, 1)}
            file.write(json.dumps({"step": n, **values}) + "\n")
    started = time.perf_counter()
    page_file = write_page([run], run / "report.html")
    written, size = time.perf_counter() - started, page_file.stat().st_size / 1e6
    page, problems = open_page(browser, page_file.resolve().as_uri(), "wide", "light")
    loaded = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000
    page.screenshot(path=shots / "long.png")
    page.context.close()
    print(f"100,000 log lines, {len(names)} curves: written in {written:.2f} s, {size:.2f} MB, "
          f"loaded and drawn in {loaded:.2f} s")  # fmt: skip
    assert not problems and size < 3 and loaded < 1, (problems, size, loaded)


def break_out(browser: Browser, folder: Path) -> None:
    evil = "</script><script>window.broken = 1</script><img src=x onerror='window.broken=1'>"
    run = folder / "evil & <b>bold<"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    tokens = {"name": evil, "fact": evil, "count": 1, "tokens": [[evil, 1, "t", evil]]}
    sample = {"text": evil, "label": evil, "expected": evil}
    events = [
        {"event": "start", "time": 1, "step": 0, "command": evil, "environment": {evil: evil}},
        {"event": "batch", "time": 1, "examples": 1, "rows": [[tokens]]},
        {"event": "evaluation", "time": 1, "step": 1, "split": evil, "samples": [sample]},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    file = write_page([run], folder / "evil.html")
    page, problems = open_page(browser, file.resolve().as_uri(), "wide", "light")
    assert not problems and page.evaluate("window.broken") is None, problems
    assert page.locator("img").count() == 0 and evil in page.inner_text("main")
    print("markup in the user's texts stays text")


def follow(browser: Browser, folder: Path) -> None:
    run = folder / "growing"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    with build_server([run], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        page, problems = open_page(browser, address, "wide", "dark")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 777, "loss": 0.5}\n')
        page.get_by_text("777", exact=True).first.wait_for(timeout=10_000)
        assert not problems, problems
        page.context.close()
        server.shutdown()
    print("--live follows the run")


def main() -> None:
    parser = argparse.ArgumentParser(description="Look at the run's page in a browser.")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("screenshots"))
    parser.add_argument("--chromium", help="the program (default: Playwright's own)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as made:
        arguments = ["--no-sandbox"] if options.chromium else []
        browser = playwright.chromium.launch(executable_path=options.chromium, args=arguments)
        for number, run in enumerate(options.runs):
            file = write_page([run], Path(made) / f"{number}-{run.name}.html")
            look(browser, file, options.output)
            if (run / "metrics.jsonl").is_file():
                compare(browser, run, file)
        runs = [run for run in options.runs if (run / "metrics.jsonl").is_file()]  # no sweeps
        if len(runs) > 1:
            look(browser, write_page(runs, Path(made) / "all.html"), options.output)
        time_long_run(browser, Path(made), options.output)
        break_out(browser, Path(made))
        follow(browser, Path(made))
        browser.close()


if __name__ == "__main__":
    main()
