"""Make the pictures of the pages from real runs: three of both commands, and densities.svg.

    python .ci/make-pictures.py TRACE [FOLDER]

A manager serves the full blocks of TRACE (`kvoffload demo`), which `kvoffload advise` counts, too,
and `kvoffload top --once` is run repeatedly; its screens are the frames of an animation, beside the
report of `kvoffload advise` on the same trace with the same memory: top.svg, report.png and
top-and-report.svg. densities.svg shows what hit density has learned at the end of TRACE. The
pictures are written to docs/_static, or to another folder. Needs the extras cli, plot, watch and
report, and Debian's chromium. The pages show Mooncake's conversation trace.
"""

import base64
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from kvoffload import CPUOffloadingManager
from kvoffload._sampling import REPEATABLE, secrets_from
from kvoffload.replay import Configuration, DecodedTrace, Selection, replay
from kvoffload.traces import Trace, write_trace

ROOT = Path(__file__).parents[1]
ADDRESS = "127.0.0.1:9400"
"""Of `kvoffload demo`."""
CAPACITY = "2%"
BLOCK_TOKENS = 512
MODEL = "llama-3.1-8b"
RATE = 400  # requests per second: 12,031 take half a minute
FRAMES = 14
SECONDS_PER_FRAME = 2.5
COLUMNS = 80
SHOWN = 1.0
"""Seconds that the animation shows a frame; the last one stays for five."""
HELD = 5.0
SCALE = 0.6
"""Of rich's characters, which are 20 units high and 12.2 wide."""
REPORT_WIDTH = 400
LEAST_HEIGHT = 470
CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
FONT = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def in_terminal(*arguments: str) -> str:
    """Run the command in a terminal of its own; return its output, with its colours."""
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "50"}
    command = shlex.join([sys.executable, "-m", "kvoffload", *arguments])
    script = ["script", "--quiet", "--return", "--command", command, os.devnull]
    printed = subprocess.check_output(script, env=env, stdin=subprocess.DEVNULL, text=True)
    return printed.replace("\r\n", "\n")


def screens(trace: str) -> list[str]:
    """Return the screens of `kvoffload top --once` while a watched manager serves a trace."""
    command = [sys.executable, "-u", "-m", "kvoffload", "demo", trace, "--quiet"]
    command += ["--capacity", CAPACITY, "--rate", str(RATE)]
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as demo:
        try:
            demo.stdout.readline()  # once it serves
            for _ in range(FRAMES):
                time.sleep(SECONDS_PER_FRAME)
                shown = in_terminal("top", ADDRESS, "--once")
                printed.append(f"\x1b[2m$\x1b[0m kvoffload top {ADDRESS}\n\n{shown}")
        finally:
            demo.send_signal(signal.SIGINT)
    return printed


def frame(printed: str, index: int) -> str:
    """Return the text of a terminal as a group of an SVG."""
    console = Console(file=StringIO(), record=True, width=COLUMNS, color_system="truecolor")
    console.print(Text.from_ansi(printed), end="")
    form = "<style>{styles}</style><defs>{lines}</defs><g>{backgrounds}{matrix}</g>"
    return console.export_svg(theme=MONOKAI, unique_id=f"f{index}", code_format=form)


def terminal(frames: list[str], rows: int) -> tuple[str, int, int]:
    """Draw frames in turn in a window; return the drawing with its width and height.

    The last one lies below the others, which appear for a moment each: readers that show a picture
    as it begins, or move nothing, so show how it ends.
    """
    width = round((COLUMNS * 12.2 + 40) * SCALE)
    height = max(LEAST_HEIGHT, round((rows * 24.4 + 40) * SCALE))
    length = SHOWN * (len(frames) - 1) + HELD
    at = f"translate({20 * SCALE:g} {16 * SCALE:g}) scale({SCALE})"
    window = f'<rect width="{width}" height="{height}" rx="8" fill="#0c0c0c"/>'
    groups = [f'<g>{window}<g transform="{at}">{frames[-1]}</g></g>']
    for index, content in enumerate(frames[:-1]):
        delay = f"animation-delay:{HELD + SHOWN * index - length:g}s"
        groups.append(
            f'<g class="moment" style="{delay}">{window}<g transform="{at}">{content}</g></g>'
        )
    rules = (
        f"text{{font:20px {FONT};white-space:pre}}"
        f"@keyframes moment{{0%{{opacity:1}}{100 * SHOWN / length:.3f}%{{opacity:0}}}}"
        f".moment{{opacity:0;animation:moment {length:g}s step-end infinite}}"
        "@media (prefers-reduced-motion:reduce){*{animation:none!important}}"
    )
    return f"<style>{rules}</style>{''.join(groups)}", width, height


def write_picture(path: Path, content: str, width: int, height: int, title: str) -> None:
    """Write an SVG; screen readers read its title."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{title}</title>'
    path.write_text(f"{svg}{content}</svg>\n", encoding="utf-8")


def report(trace: Path, page: Path, *options: str) -> Path:
    """Write the report of `kvoffload advise` on a trace to a page."""
    command = [sys.executable, "-m", "kvoffload", "advise", trace.name, "--model", MODEL]
    command += ["--capacity", CAPACITY, *options, "--report", str(page), "--quiet"]
    subprocess.run(command, cwd=trace.parent, stdout=subprocess.DEVNULL, check=True)
    return page


def screenshot(page: Path, width: int, height: int, scale: float) -> bytes:
    """Return the beginning of a page as PNG."""
    size = (f"--window-size={width},{height}", f"--force-device-scale-factor={scale}")
    made = page.with_suffix(".png")
    subprocess.run([*CHROMIUM, *size, f"--screenshot={made}", page.as_uri()], check=True)
    return made.read_bytes()


def image(data: bytes, x: int, height: int, kind: str = "") -> str:
    """Return a picture of the narrow report as an element of an SVG."""
    text = base64.b64encode(data).decode()
    size = f'x="{x}" width="{REPORT_WIDTH}" height="{height}"'
    return f'<image class="{kind}" {size} href="data:image/png;base64,{text}"/>'


# Classes of blocks, by the uses and the gap between the last two.
LEARNED = {
    0: "never used again",
    2: "once again, after 3 to 6 requests",
    5: "once again, after 31 to 126",
    9: "more often, last after 3 to 6",
    12: "more often, last after 31 to 126",
}


def densities(trace: Path, path: Path) -> None:
    """Draw the densities of some classes by age, learned in memory for 2 % of the blocks."""
    decoded = DecodedTrace.of(Trace(trace))
    with secrets_from(REPEATABLE):
        manager = CPUOffloadingManager(16, decoded.unique_blocks // 50, "hit-density")
    replay(decoded, Configuration(host=decoded.unique_blocks // 50), manager=manager)
    ages = [value - 1 for value in range(2, 8)]
    ages += [(4 + part << octave) - 1 for octave in range(1, 9) for part in range(4)]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "densities", "font.size": 9}):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for reuse_class, text in LEARNED.items():
            row = manager.policy.densities[reuse_class]
            axes.step(ages, row[2 : 2 + len(ages)], where="post", label=text)
        axes.set(xscale="log", xlabel="age: requests since the last use")
        axes.set(yscale="log", ylabel="density: hits per request and slot")
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


def main(trace: Path, folder: Path) -> None:
    """Make the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    densities(trace, folder / "densities.svg")
    with tempfile.TemporaryDirectory() as made:
        full = Path(made, trace.name)
        write_trace(Selection(Trace(trace), full_block_tokens=BLOCK_TOKENS), full)
        printed = screens(str(full))
    frames = [frame(each, index) for index, each in enumerate(printed)]
    rows = max(each.count("\n") for each in printed)
    moving, width, height = terminal(frames, rows)
    with tempfile.TemporaryDirectory() as made:
        page = report(trace, Path(made, "report.html"))
        (folder / "report.png").write_bytes(screenshot(page, 1000, 1280, 1))
        # The demo has no accelerator, whose cache would serve some blocks first.
        page = report(trace, Path(made, "beside.html"), "--device-memory", "0")
        advice = screenshot(page, REPORT_WIDTH, height, 1.5)
        head, _, rest = page.read_text(encoding="utf-8").partition("<h1>")
        rest = rest[rest.index('<h2 id="chart-title">') :]
        page.write_text(f"{head}{rest}", encoding="utf-8")
        curve = screenshot(page, REPORT_WIDTH, height, 1.5)
    x = width + 16  # beside the terminal
    length = SHOWN * (len(frames) - 1) + HELD
    beside = (
        f"{moving}<style>@keyframes turn{{50%{{opacity:1}}}}"
        f".turn{{opacity:0;animation:turn {length:g}s step-end infinite}}</style>"
        f"{image(advice, x, height)}{image(curve, x, height, 'turn')}"
        f'<rect x="{x + 0.5}" y=".5" width="{REPORT_WIDTH - 1}" height="{height - 1}" fill="none" '
        f'stroke="#8888"/>'
    )
    both = "kvoffload top beside the report of kvoffload advise, on the same trace"
    write_picture(folder / "top-and-report.svg", beside, x + REPORT_WIDTH, height, both)
    write_picture(folder / "top.svg", *terminal(frames[-1:], rows), "kvoffload top")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    given = Path(sys.argv[1]).absolute()
    main(given, Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs" / "_static")
