"""The bytes of a web address are those of the file, or it is an error: whatever the connection does."""

from __future__ import annotations

import email.utils
import random
import time
import zipfile
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.location import location, open_seekable
from shards.remote.http import HttpPath
from shards.remote.patience import Limits
from tests.shards.http_server import Trouble, WebServer, answer, cut, ended, serving, stalled
from tests.shards.layouts import write_zip

PATIENT = Limits(tries=6, timeout=20, backoff=0.001)
DATA = random.Random(5).randbytes(3_000_000)


@pytest.fixture(scope="module")
def server() -> Iterator[WebServer]:
    with serving() as web:
        yield web


@pytest.fixture
def web(server: WebServer) -> WebServer:
    """The server with one file `data.bin` and no troubles yet."""
    reset(server)
    return server


def reset(web: WebServer) -> None:
    web.files = {"data.bin": DATA}
    web.troubles.clear()
    web.etags, web.folders = {"data.bin": '"one"'}, set()
    web.ranges = web.lengths = True
    web.requests.clear()


def read(web: WebServer, *troubles: Trouble, limits: Limits = PATIENT) -> bytes:
    web.troubles["data.bin"] = deque(troubles)
    with HttpPath(web.url("data.bin"), limits).open() as file:
        return file.read()


# going on -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [cut, ended])
@pytest.mark.parametrize("after", [0, 1, 1_000_000, len(DATA) - 1])
def test_a_lost_connection_goes_on_from_the_byte_that_was_reached(web: WebServer, trouble, after: int) -> None:
    assert read(web, trouble(after)) == DATA
    first, second = web.asked("data.bin")
    assert first is None
    if trouble is ended:  # a reset may take with it what was on its way
        assert second == (f"bytes={after}-" if after else None)


def test_a_connection_that_stalls_is_left(web: WebServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert read(web, stalled(1_000_000), limits=Limits(6, 2.0, 0.001)) == DATA
    assert len(web.asked("data.bin")) > 1
    assert f"{web.url('data.bin')}: no byte came for too long at byte " in capsys.readouterr().err


@pytest.mark.parametrize("ranges", [True, False])
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, len(DATA)), max_size=6), kinds=st.lists(st.sampled_from([cut, ended]), min_size=6))
def test_any_cuts_give_the_original_bytes(server: WebServer, ranges: bool, cuts: list[int], kinds: list) -> None:
    reset(server)
    server.ranges = ranges
    troubles = [kind(after) for kind, after in zip(kinds, cuts, strict=False)]
    assert read(server, *troubles, limits=Limits(len(cuts) + 2, 20, 0.0001)) == DATA


def test_a_server_without_ranges_starts_again_and_is_read_past_what_is_known(web: WebServer) -> None:
    web.ranges = False
    assert read(web, ended(2_000_000), ended(1_500_000), cut(0)) == DATA
    assert web.asked("data.bin") == [None, *["bytes=2000000-"] * 3]


def test_neither_ranges_nor_sizes_nor_versions(web: WebServer) -> None:
    web.ranges = web.lengths = False
    web.etags.clear()
    assert read(web) == DATA
    web.files["data.bin"] = b""
    assert read(web) == b""


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_passing_troubles_of_the_server_are_waited_out(web: WebServer, status: int, capsys) -> None:
    date = email.utils.formatdate(time.time() - 5, usegmt=True)
    assert read(web, answer(status), cut(9), answer(status, Retry_After="0"), answer(status, Retry_After=date)) == DATA
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert f"answered {status} " in lines[0]
    assert "; try 2 of 6 in 0.0 s" in lines[0]


def test_the_pause_that_the_server_asks_for_is_kept(web: WebServer, capsys: pytest.CaptureFixture[str]) -> None:
    before = time.monotonic()
    assert read(web, answer(429, Retry_After="1")) == DATA
    assert time.monotonic() - before >= 1
    assert "answered 429 Too Many Requests; try 2 of 6 in 1.0 s" in capsys.readouterr().err
    with pytest.raises(
        ConnectionError, match="503 Service Unavailable; it asks to come back in 7200 s: run again then"
    ):
        read(web, answer(503, Retry_After="7200"))


def test_redirects_are_followed_and_asked_anew_after_a_loss(web: WebServer) -> None:
    web.files["elsewhere/signed.bin"] = DATA
    web.troubles["elsewhere/signed.bin"] = deque([ended(1000)])
    moved = answer(302, Location="/elsewhere/signed.bin?signature=abc")
    assert read(web, moved, moved) == DATA
    assert web.asked("elsewhere/signed.bin") == [None, "bytes=1000-"]


# giving up ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "error", "next_step"),
    [
        (401, PermissionError, "401 Unauthorized: it asks for consent or a login"),
        (403, PermissionError, "403 Forbidden: it asks for consent or a login"),
        (404, FileNotFoundError, "404 Not Found: check the address"),
        (410, FileNotFoundError, "410 Gone: check the address"),
        (418, OSError, "check the address, or download the file"),
    ],
)
def test_refusals_are_errors_at_once(web: WebServer, status: int, error: type[OSError], next_step: str) -> None:
    with pytest.raises(error, match=rf"http://127\.0\.0\.1:\d+/data\.bin answered .*{next_step}"):
        read(web, answer(status))
    assert len(web.requests) == 1
    with pytest.raises(error, match=next_step):
        read(web, cut(1000), answer(status))


def test_tries_without_a_byte_are_bounded(web: WebServer) -> None:
    with pytest.raises(ConnectionError, match=r"data\.bin: answered 503 Service Unavailable; given up after 6 tries"):
        read(web, *[answer(503)] * 6)
    assert len(web.requests) == 6
    reset(web)
    with pytest.raises(ConnectionError, match=r"it ended early at byte 5; given up after 6 tries"):
        read(web, ended(5), *[ended(0)] * 6)


def test_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")  # a proxy would be there, and answer for whom it does not find
    with serving() as gone:
        url = gone.url("data.bin")
    with pytest.raises(ConnectionError, match=r"data\.bin: .*refused; given up after 2 tries"):
        HttpPath(url, Limits(2, 5, 0.001)).read_bytes()
    with pytest.raises(ConnectionError, match="no such host, or no connection to the net"):
        HttpPath("http://no-such-host.invalid/x", PATIENT).read_bytes()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_that_changes_on_the_way_is_an_error(web: WebServer, ranges: bool) -> None:
    web.ranges = ranges

    def read_on() -> bytes:
        """Read a file that is cut, and is another one when the rest is asked for."""
        web.troubles["data.bin"] = deque([ended(2_000_000)])
        with HttpPath(web.url("data.bin"), PATIENT).open() as file:
            start = file.read(1_000_000)
            web.etags["data.bin"], web.files["data.bin"] = later
            return start + file.read()

    later = '"two"', DATA
    with pytest.raises(OSError, match=r'data\.bin changed while it was read \(ETag was "one", now "two"\); run again'):
        read_on()
    web.etags.clear()
    later = "", DATA[:-1]
    with pytest.raises(OSError, match=r"\(size was 3000000, now 2999999\)"):
        read_on()
    reset(web)
    web.ranges = ranges
    web.etags.clear()
    later = "", DATA[::-1]
    if ranges:
        return  # nothing tells two files of one size apart whose server says no more of them
    with pytest.raises(OSError, match="the same place holds other bytes now"):
        read_on()


# any place in a file --------------------------------------------------------------------------------------------------


def test_a_seekable_file_is_the_same_file(web: WebServer) -> None:
    web.files["data.bin"] = big = DATA * 4  # three blocks
    web.troubles["data.bin"] = deque([answer(503), ended(0), ended(100), cut(2_000_000)])
    draw = random.Random(7)
    with open_seekable(HttpPath(web.url("data.bin"), PATIENT)) as file:
        for _ in range(50):
            start, count = draw.randrange(len(big)), draw.randrange(5_000_000)
            assert file.seek(start) == start
            assert file.read(count) == big[start : start + count]
            assert file.tell() == min(start + count, len(big))
        file.seek(-5, 2)
        assert file.read() == big[-5:]
    assert len(web.requests) < 12, "blocks are kept"


def test_a_zip_needs_ranges(web: WebServer, tmp_path) -> None:
    path = write_zip(tmp_path / "a.zip", {"x.jpg": b"x" * 1000, "y.jpg": b"y"})
    web.files["a.zip"] = path.read_bytes()
    place = HttpPath(web.url("a.zip"), PATIENT)
    with open_seekable(place) as file, zipfile.ZipFile(file) as archive:
        assert archive.read("x.jpg") == b"x" * 1000
    web.ranges = False
    with pytest.raises(OSError, match=r"a\.zip: its server gives no parts of files, which a zip .*download it"):
        open_seekable(HttpPath(web.url("a.zip"), PATIENT))


# addresses ------------------------------------------------------------------------------------------------------------


def test_addresses_are_joined_and_shown_without_what_gives_access() -> None:
    signed = HttpPath("https://me:pw@host.org/a/b%20c/?sv=2&sig=S3CR3T")
    child = signed / "images" / "é 1#?.jpg"
    assert str(child) == "https://host.org/a/b%20c/images/%C3%A9%201%23%3F.jpg"
    assert child.url == "https://me:pw@host.org/a/b%20c/images/%C3%A9%201%23%3F.jpg?sv=2&sig=S3CR3T"
    assert (child.name, child.suffix, str(child.parent)) == ("é 1#?.jpg", ".jpg", "https://host.org/a/b%20c/images/")
    assert str(signed / "../x/./C:\\photos\\1.jpg") == "https://host.org/a/x/C%3A/photos/1.jpg"
    assert str(HttpPath("http://host.org/get.php?id=7")) == "http://host.org/get.php?id=7"


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRIES", "TIMEOUT", "BACKOFF"):
        monkeypatch.delenv(f"PIPELINE_HTTP_{name}", raising=False)
    assert Limits.from_environment() == Limits(8, 60.0, 1.0)
    monkeypatch.setenv("PIPELINE_HTTP_TRIES", "3")
    monkeypatch.setenv("PIPELINE_HTTP_TIMEOUT", "2.5")
    monkeypatch.setenv("PIPELINE_HTTP_BACKOFF", "")
    place = location("http://host.org/x")
    assert isinstance(place, HttpPath)
    assert place.limits == Limits(3, 2.5, 1.0)
    monkeypatch.setenv("PIPELINE_HTTP_TRIES", "many")
    with pytest.raises(ValueError, match="PIPELINE_HTTP_TRIES is 'many', not a positive number"):
        location("http://host.org/x")
