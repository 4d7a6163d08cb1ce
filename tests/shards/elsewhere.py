"""Data sets put on the web and into stores, and what is written from them."""

from __future__ import annotations

import random
from pathlib import Path

import fsspec

from tests.shards.http_server import WebServer
from tests.shards.layouts import write_tar, write_tree
from tests.shards.layouts_dense import docci_files


def publish(web: WebServer, prefix: str, folder: Path) -> str:
    """Put the files of a folder on the web; gives the folder's address."""
    for path in folder.rglob("*"):
        if path.is_file():
            web.files[f"{prefix}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return web.url(f"{prefix}/")


def upload(url: str, folder: Path) -> str:
    filesystem, root = fsspec.url_to_fs(url)
    for path in folder.rglob("*"):
        if path.is_file():
            filesystem.pipe(f"{root}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return url


def content(out: Path) -> dict[str, bytes]:
    """Every file of a set but its manifest, which names the source."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }


def docci(root: Path) -> Path:
    """DOCCI as it lies at its official place; a large file comes first, so that what looks at the tar sees a part."""
    lists, pictures = docci_files()
    folder = write_tree(root / "docci", lists)
    write_tar(folder / "docci_images.tar.gz", {"README": random.Random(3).randbytes(3_000_000), **pictures}, "w:gz")
    return folder
