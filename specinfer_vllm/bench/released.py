# SPDX-License-Identifier: Apache-2.0
"""Python files of a release on the package index: read one by one, without downloading or importing the release.

A GPU wheel of vLLM has hundreds of megabytes and cannot be imported without CUDA; its sources are a few kilobytes each.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from specinfer_vllm.bench import cache
from specinfer_vllm.whole_file import whole_file

LISTING = "members.json"
# Seconds that one answer may take, of the index or of the files' host, and that all of pip's work may.
ANSWER, PIP = 30, 180
# One request's worth of a wheel: most sources fit with their headers.
BLOCK = 1 << 16
# What a network or a server can do to a file on its way.
TROUBLE = (OSError, http.client.HTTPException, zipfile.BadZipFile, tarfile.TarError)


class Unreachable(RuntimeError):
    """The index or its files cannot be read from this machine; nothing is known of the release."""


@dataclass(frozen=True)
class Release:
    """The Python files of one release, each fetched when it is first read and kept in the cache folder."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"

    def read(self, path: str) -> str | None:
        """A file's text by its path in the wheel, None where it has none such. Raises Unreachable."""
        if path not in self.members:
            return None
        file = self.folder / path
        if not is_whole(file, *self.members[path]):
            self.fetch(path)
        return file.read_text(encoding="utf-8")

    @property
    def folder(self) -> Path:
        """Where its files are kept."""
        return cache.folder() / "released" / f"{self.name}-{self.version}"

    @cached_property
    def members(self) -> dict[str, list[int]]:
        """Size and CRC-32 of each Python file. Raises Unreachable."""
        listing = self.folder / LISTING
        if not listing.exists():
            members = self.save_sources() if self.wheel is None else listed(self.wheel)
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(listing) as draft:
                draft.write_text(json.dumps(members))
        return json.loads(listing.read_text())

    def fetch(self, path: str) -> None:
        """Put one file into the folder. Raises Unreachable, or RuntimeError where it is not the one that was listed."""
        if self.wheel is None:
            self.save_sources()
        else:
            try:
                content = self.wheel.read(path)
            except TROUBLE as error:
                raise Unreachable(f"{self}: {path} cannot be read ({error})") from error
            save(self.folder / path, content)
        if not is_whole(self.folder / path, *self.members[path]):
            raise RuntimeError(f"{self}: {path} is another one than before; delete {self.folder} and try again")

    @cached_property
    def links(self) -> list[str]:
        """Addresses of its files, wheels first, whatever the platform: their Python is the same. Raises Unreachable."""
        pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]
        # The one command that reads the index as an installation would and prints what it finds without fetching it.
        options = ["index", "versions", "-vv", "--retries", "1", "--timeout", str(ANSWER), self.name]
        try:
            done = subprocess.run(pip + options, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PIP)
        except subprocess.TimeoutExpired as late:
            raise Unreachable(f"{self}: the index did not answer within {PIP} seconds") from late
        stem = re.escape(f"{self.name.replace('-', '_')}-{self.version}")
        links = set(re.findall(rf"\w+://\S+/{stem}(?:-[^\s/]+\.whl|\.tar\.gz)", done.stdout))
        if not links:
            reason = (done.stderr.strip() or "it lists no such file").splitlines()[-1]
            raise Unreachable(f"{self}: not found on the index that pip uses ({reason})")
        return sorted(links, key=lambda link: (not link.endswith(".whl"), link))

    @cached_property
    def wheel(self) -> zipfile.ZipFile | None:
        """A wheel, opened where it lies; None where none can be read in parts. Raises Unreachable."""
        for link in self.links:
            if not link.endswith(".whl"):
                continue
            if link.startswith("file:"):
                return zipfile.ZipFile(unquote(urlsplit(link).path))
            try:
                return zipfile.ZipFile(io.BufferedReader(RemoteFile(link), BLOCK))
            except NoRanges:
                continue
            except TROUBLE as error:
                raise Unreachable(f"{self}: {link} cannot be read ({error})") from error
        return None

    def save_sources(self) -> dict[str, list[int]]:
        """Put all Python files of the source archive into the folder; their sizes and CRCs. Raises Unreachable."""
        link = next((each for each in self.links if each.endswith(".tar.gz")), None)
        if link is None:
            raise Unreachable(f"{self}: its wheel is not served in parts, and there is no source archive")
        cache.say(f"downloading {link.rpartition('/')[2]}, since no wheel is served in parts")
        members = {}
        try:
            # As a stream: nothing but the Python files reaches the disk.
            with (
                urllib.request.urlopen(link, timeout=ANSWER) as answer,
                tarfile.open(fileobj=answer, mode="r|gz") as archive,
            ):
                for member in archive:
                    path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
                    if member.isfile() and path.suffix == ".py" and ".." not in path.parts:
                        content = archive.extractfile(member).read()
                        save(self.folder / path, content)
                        members[str(path)] = [len(content), zlib.crc32(content)]
        except TROUBLE as error:
            raise Unreachable(f"{self}: {link} cannot be read ({error})") from error
        return members


class NoRanges(OSError):
    """The server sends whole files only."""


class RemoteFile(io.RawIOBase):
    """A file behind http(s), read in parts as they are asked for. Raises NoRanges where that cannot be done."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.place = url, 0
        with self.part(0, 0) as answer:
            if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
                raise NoRanges(f"{url} is not served in parts")
            self.size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def part(self, first: int, last: int) -> http.client.HTTPResponse:
        """The server's answer to bytes first..last, both included."""
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={first}-{last}"})
        return urllib.request.urlopen(request, timeout=ANSWER)

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next part begins."""
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go there; the new place."""
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        return self.place

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer as far as the file goes; how many bytes were read."""
        last = min(self.place + len(buffer), self.size) - 1
        if last < self.place:
            return 0
        with self.part(self.place, last) as answer:
            content = answer.read(len(buffer))
        buffer[: len(content)] = content
        self.place += len(content)
        return len(content)


def listed(wheel: zipfile.ZipFile) -> dict[str, list[int]]:
    """Size and CRC-32 of each Python file of a wheel."""
    return {each.filename: [each.file_size, each.CRC] for each in wheel.infolist() if each.filename.endswith(".py")}


def is_whole(file: Path, size: int, crc: int) -> bool:
    """Whether the file is there and has this size and CRC-32."""
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return len(content) == size and zlib.crc32(content) == crc


def save(file: Path, content: bytes) -> None:
    """Write a file in one piece, its folders too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as draft:
        draft.write_bytes(content)
