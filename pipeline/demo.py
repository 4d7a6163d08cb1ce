"""The main job end to end, by the commands that a user would type: python -m pipeline.demo (`make demo`).

Shards of OpenMoji, a common start, plain fine-tuning and HN-CLIP from it with equal budget and seed, retrieval on the
held-out split, two ONNX encoders, and a text query answered by ONNX Runtime. The figures go to
runs/demo/summary.json; `--table` prints the Markdown table of the last demo, which is the one in the README.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path("runs/demo")
SET = "openmoji"
QUERY = "a woman with dark skin tone walking to the right"
STAGES = ("start", "infonce", "hn")
_RECIPES = {"start": "align", "infonce": "infonce", "hn": "hn"}


class Demo:
    """Runs commands, says which, and times them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, stage: str, *command: str) -> None:
        """Run one command of a stage; the demo ends with it when it fails."""
        print(f"\n$ {' '.join(f'{c!r}' if ' ' in c else c for c in command)}", flush=True)
        began = time.monotonic()
        # The environment's own programs first: the demo is started by its Python, activated or not.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        done = subprocess.run(command, env={**os.environ, "PATH": path})
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.monotonic() - began, 1)
        if done.returncode != 0:
            sys.exit(f"demo: that command failed with exit code {done.returncode}")


def main() -> None:
    """Run the demo, or print the last one's table."""
    if "--table" in sys.argv[1:]:
        print(table(read_summary()))
        return
    demo = Demo()
    if ROOT.exists():
        print(f"removing the last demo's runs: {ROOT}")
        shutil.rmtree(ROOT)
    demo.run("shards", "make", "shards", f"DATASET={SET}")
    for name in STAGES:
        _train_and_evaluate(demo, name)
    demo.run("export", "pipeline", "export", "--onnx")
    bundle = str(ROOT / "hn" / "bundle")
    demo.run("search", "pipeline", "index", bundle, SET, "--out", str(ROOT / "index"))
    demo.run("search", "pipeline", "search", str(ROOT / "index"), QUERY, "--html", str(ROOT / "query.html"))
    ROOT.joinpath("summary.json").write_text(json.dumps(summarise(demo.seconds), indent=2) + "\n", encoding="utf-8")
    print(f"\n{table(read_summary())}\n\nfigures: {ROOT / 'summary.json'}   pictures: {ROOT / 'query.html'}")


def _train_and_evaluate(demo: Demo, name: str) -> None:
    """One training launch, on all GPUs or on two CPU ranks, then retrieval on the test split."""
    recipe = _RECIPES[name]
    demo.run(
        name,
        *("deepspeed", *_ranks(), "launcher/train.py", "--config", "zero2.json"),
        *("--recipe", recipe, "--set", f"run.name=demo/{recipe}"),
    )
    scores = str(ROOT / f"{name}.json")
    demo.run("evaluate", "pipeline", "evaluate", str(ROOT / recipe), SET, "--split", "test", "--json", scores)


def _ranks() -> list[str]:
    import torch

    return [] if torch.cuda.is_available() else ["--num_gpus", "2"]


def summarise(seconds: dict[str, float]) -> dict[str, Any]:
    """The demo's figures, each read from what a stage wrote."""
    manifest = _read(Path("data/mds") / SET / "manifest.json")
    parity = _read(ROOT / "hn" / "bundle" / "manifest.json")["parity"]
    scores = {name: _read(ROOT / f"{name}.json") for name in STAGES}
    return {
        "pairs": manifest["counts"]["written"],
        "test_pairs": scores["start"]["images"],
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "seconds": {**seconds, "total": round(sum(seconds.values()), 1)},
        **{
            name: {way: {k: round(score[way][k], 2) for k in ("1", "5", "10")} for way in ("t2i", "i2t")}
            for name, score in scores.items()
        },
        "export": {f"{kind}_max_abs_diff": parity[f"{kind}_max_abs_diff"] for kind in ("image", "text")},
    }


def table(summary: dict[str, Any]) -> str:
    """The figures as a Markdown table, with the machine that they come from."""
    names = {"start": "start: `align`", "infonce": "then `infonce`", "hn": "then `hn`"}
    rows = [
        "| OpenMoji, {} test pairs | R@1 | R@5 | R@10 | R@1 | R@5 | R@10 |".format(summary["test_pairs"]),
        "|---|---|---|---|---|---|---|",
        "| | text → image | | | image → text | | |",
    ]
    for name in STAGES:
        cells = [f"{summary[name][way][k]:.2f}" for way in ("t2i", "i2t") for k in ("1", "5", "10")]
        rows.append(f"| {names[name]} | {' | '.join(cells)} |")
    export = summary["export"]
    rows += [
        "",
        f"{summary['pairs']} pairs; {summary['seconds']['total'] / 60:.1f} minutes on {summary['machine']}; "
        f"ONNX against torch: images {export['image_max_abs_diff']:.1e}, texts {export['text_max_abs_diff']:.1e}.",
    ]
    return "\n".join(rows)


def read_summary() -> dict[str, Any]:
    """The figures of the last demo.

    Raises:
        SystemExit: there was none.
    """
    path = ROOT / "summary.json"
    if not path.is_file():
        sys.exit(f"demo: no {path}; run `make demo` first")
    return _read(path)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
