"""``rapidformer report RUN ...``: one HTML file with everything about one run, or several."""

from __future__ import annotations

import sys
from pathlib import Path

from rapidformer.cli.own_flags import CommandParser
from rapidformer.errors import ConfigurationError
from rapidformer.report import PAGE_FILE
from rapidformer.report.page import build_content, write_page


def run(argv: list[str]) -> None:
    """Write the page, or serve it and follow the runs."""
    parser = build_parser()
    options = parser.parse_args(argv)
    sources = [Path(text).expanduser() for text in options.runs]
    if options.live and options.output:
        raise ConfigurationError("--live serves the page and writes no file: leave --output out.")
    if not options.live and options.port is not None:
        raise ConfigurationError("--port is for --live.")
    if options.live:
        _serve(sources, options.port)
        return
    default = _get_folder(sources[0]) / PAGE_FILE if len(sources) == 1 else Path(PAGE_FILE)
    output = Path(options.output).expanduser() if options.output else default
    if output.is_dir():
        output /= PAGE_FILE
    output.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"{write_page(sources, output)}\n")


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="rapidformer report",
        description="Write the page of a run: curves, evaluations, the first batch, settings, "
        "phases, checks. One HTML file, which needs no network.",
    )
    text = "the folder of a run or of a sweep; several runs are laid over each other"
    parser.add("runs", "RUN", text, nargs="+")
    parser.add(
        "--output", "FILE", f"the page (default: {PAGE_FILE} in the folder of a single run or "
        "sweep, here for several)",
    )  # fmt: skip
    parser.add("--live", "", "serve the page on this machine alone (127.0.0.1), and follow the run")
    parser.add("--port", "N", "of --live (default: 8642, or a free one)")
    return parser


def _get_folder(source: Path) -> Path:
    return source if source.is_dir() else source.parent


def _serve(sources: list[Path], port: int | None) -> None:
    from rapidformer.report.live import build_server

    build_content(sources)  # what is wrong is told at once
    with build_server(sources, port) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        print(f"page      {address}   (Ctrl-C ends it)", file=sys.stderr, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
