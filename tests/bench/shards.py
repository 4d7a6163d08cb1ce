"""How fast shards are written, beside webdataset's own writer: python -m tests.bench.shards [--help]

One tar of JPEGs with captions; both sides read it and write the same bytes, in turns, into fresh folders on one disk.
Ours also syncs every shard to the disk, lists the contents by hash and keeps a journal; webdataset's writer does not.
Memory is the peak of a process that writes a tar of tiny pairs.
"""

from __future__ import annotations

import argparse
import io
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from shards.checking import look_at_all
from shards.mds import ShardFormat, encode_pair
from shards.pair import Pair
from shards.replay import Replay
from shards.request import make_request
from shards.sources import get_source
from shards.writer import write_set
from tests.bench.measure import machine, paired, spread

TARGET_RATIO, TARGET_MB = 0.6, 600
DISTINCT = 64


def jpegs(kilobytes: int) -> list[bytes]:
    """Photograph-like pictures of about the given size."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(DISTINCT):
        coarse = Image.fromarray(random.integers(0, 256, (48, 64, 3), dtype=np.uint8)).resize((1024, 768))
        noise = random.normal(0, 0.12 * kilobytes, (768, 1024, 3))
        buffer = io.BytesIO()
        Image.fromarray(np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=75)
        found.append(buffer.getvalue())
    return found


def write_tar(path: Path, pictures: list[bytes], extension: str, count: int) -> None:
    """A WebDataset tar; pictures come round."""
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            for suffix, data in ((extension, pictures[number % len(pictures)]), ("txt", f"caption {number}".encode())):
                info = tarfile.TarInfo(f"{number:08}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def read(tar: Path) -> Iterator[Pair]:
    """The pairs of a tar as `write_set` gets them."""
    source = get_source("webdataset")
    for item in source.read(make_request(source, str(tar), None, {})):
        assert isinstance(item, Pair)
        yield item


def ours(tar: Path, out: Path, **options: object) -> None:
    """`pipeline shards write webdataset`."""
    shutil.rmtree(out, ignore_errors=True)
    write_set("webdataset", source=str(tar), out=str(out), **options)  # type: ignore[arg-type]


def theirs(tar: Path, out: Path) -> None:
    """webdataset, from its reader to its writer."""
    import webdataset

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    with webdataset.ShardWriter(f"{out}/%06d.tar", maxcount=1 << 60, maxsize=1 << 26, verbose=0) as tars:
        for sample in webdataset.WebDataset([str(tar)], shardshuffle=False, empty_check=False):
            tars.write({key: sample[key] for key in ("__key__", "jpg", "txt")})


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The median of some runs."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def stages(tar: Path, repeats: int) -> dict[str, float]:
    """Seconds up to and including each stage of a pass-through."""
    nothing = Replay(tar.parent, {})

    def drain(items: Iterator[object]) -> None:
        for _ in items:
            pass

    def encode() -> None:
        for item in look_at_all(read(tar), "header", 1, nothing):
            encode_pair(item.pair, item.captions)  # type: ignore[union-attr]

    return {
        "reading": seconds(lambda: drain(read(tar)), repeats),
        "+ header check and contents": seconds(lambda: drain(look_at_all(read(tar), "header", 1, nothing)), repeats),
        "+ encoding": seconds(encode, repeats),
    }


CHILD = """
import sys
from shards.writer import write_set
from tests.resident import peak_resident_bytes
write_set("webdataset", source=sys.argv[1], out=sys.argv[2], check="header")
print(peak_resident_bytes() / 1e6)
"""


def peak_mb(tar: Path, out: Path) -> float:
    """Peak resident memory of a process that writes a tar and has imported nothing else, in MB."""
    command = [sys.executable, "-c", CHILD, str(tar), str(out)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="paired runs")
    parser.add_argument("--pictures", type=int, default=3000, help="pictures of the tar, 150 KB each")
    parser.add_argument("--tiny", type=int, default=1_000_000, help="tiny pairs whose memory is measured")
    arguments = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        tar, out = Path(folder, "in.tar"), Path(folder, "out")
        pictures = jpegs(150)
        write_tar(tar, pictures, "jpg", arguments.pictures)
        size = tar.stat().st_size / 1e6
        plain = ShardFormat(hashes=())
        variants = {
            f"pass-through (header, no hashes, 1 worker; target {TARGET_RATIO})": {"check": "header", "format": plain},
            "header, xxh64": {"check": "header"},
            "decode, xxh64, 1 worker": {},
            "decode, xxh64, 2 workers": {"workers": 2},
        }
        print(f"{arguments.pictures} pictures, {size:.0f} MB; speed as a share of webdataset.ShardWriter's")
        medians = []
        for name, options in variants.items():
            repeats = arguments.repeats if options.get("check") else 2
            times = paired(lambda: theirs(tar, out), lambda options=options: ours(tar, out, **options), repeats)  # type: ignore[misc]
            medians.append(statistics.median(times.second))
            rates = " ".join(f"{size / statistics.median(side):5.0f}" for side in times)
            print(f"{name:62} MB/s theirs, ours: {rates}  ratio {spread(times.ratios)}")
        before = 0.0
        for name, until in {**stages(tar, 3), "+ writing, syncing, journal": medians[0]}.items():
            print(f"  pass-through, {name:30} {until - before:6.2f} s")
            before = until
        shutil.rmtree(out, ignore_errors=True)
        buffer = io.BytesIO()
        Image.new("RGB", (4, 4)).save(buffer, "PNG")
        write_tar(tar, [buffer.getvalue()], "png", arguments.tiny)
        began = time.perf_counter()
        peak = peak_mb(tar, out)
        rate = arguments.tiny / (time.perf_counter() - began)
        print(f"{arguments.tiny} tiny pairs: peak {peak:.0f} MB (target {TARGET_MB}), {rate:.0f} pairs/s")


if __name__ == "__main__":
    main()
