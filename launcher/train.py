"""DeepSpeed entry: deepspeed launcher/train.py --config zero2.json [--recipe NAME|PATH] [--set key=value ...]

Parse, then hand over to pipeline.train.entry, which builds, trains and closes.
"""

from __future__ import annotations

import argparse
import sys


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; DeepSpeed's launcher adds --local_rank, which the environment says as well."""
    parser = argparse.ArgumentParser(prog="launcher/train.py", description="Train a dual encoder.", allow_abbrev=False)
    parser.add_argument("--config", required=True, help="DeepSpeed JSON: a path, or a name in configs/")
    parser.add_argument("--recipe", help="a path, or a name in configs/recipes (default: HN-CLIP, 'default')")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="recipe overrides")
    parser.add_argument("--resume", metavar="auto|RUN|CHECKPOINT", help="go on with a run; 'auto' finds the newest")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Train; gives the exit code."""
    args = parse()
    from pipeline.train.entry import Launch, main

    return main(Launch(args.config, args.recipe, args.set, args.resume))


if __name__ == "__main__":
    sys.exit(main())
