"""The one conversion of pictures to pixels: done once, before rollout engine and trainer, so that both see the same."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, overload

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from stretto.types import StrettoError

MAX_PIXELS = 89_478_485
"""Largest picture that is decoded (Pillow's own warning limit): a quarter of a gigabyte as RGB."""
LARGE_PIXELS = 16_000_000
"""Pictures above this are decoded one at a time, so that many threads together stay within a gigabyte or so."""
STRIP_PIXELS = 1_000_000
LONGEST_PATH = 4096

_ONE_LARGE = threading.Lock()

_PLAIN = {"1", "L", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "P"}
_KEYED = {"1", "L", "RGB", "P"}  # modes that may declare one colour transparent
_ALPHA = {"LA", "La", "PA", "RGBA", "RGBa"}
_GREY16 = {"I;16", "I;16L", "I;16B", "I;16N"}
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_FORMS = (
    "a path, encoded bytes, {'bytes': ..., 'path': ...}, a data URI, a PIL image, or a uint8 array [height, width, 3]"
)


def to_rgb(image: Any, where: str, folder: Path | None = None) -> np.ndarray:
    """``image`` as a uint8 RGB array [height, width, 3].

    Accepts a path (relative to ``folder``), encoded bytes, a ``{"bytes": ..., "path": ...}`` mapping as the
    ``datasets`` library writes, a data URI, a PIL image, or a uint8 array [height, width, 3]. Rules: EXIF orientation
    is applied; transparency shows white behind it; 16-bit grey is scaled to 8 bits (65535 becomes 255); palettes are
    looked up; CMYK, YCbCr and HSV are converted by Pillow's plain formulas, without colour profiles; an animation
    gives frame 0. Nothing is fetched from a network.

    Args:
        where: names the image in errors, such as ``row digits/train/000123, image 0``.

    Raises:
        StrettoError: not an image, cut short, missing, above ``MAX_PIXELS`` by its header, or of a mode, type or shape
            without a rule (32-bit integer and float pictures among them: their range is anyone's guess).
    """
    image = resolve(image, where, folder)
    if isinstance(image, np.ndarray):
        return _checked(image, where)
    if isinstance(image, Image.Image):
        _check_size(image.size, where)
        return _pixels(_first_frame(image), where)
    try:
        with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image, formats=_formats()) as opened:
            _check_size(opened.size, where)
            with _ONE_LARGE if opened.width * opened.height > LARGE_PIXELS else nullcontext():
                if opened.tell():  # some formats open at another frame
                    opened.seek(0)
                opened.load()
                return _pixels(opened, where)
    except StrettoError:
        raise
    except UnidentifiedImageError as error:
        raise StrettoError(f"{where}: not an image in any format that Pillow {Image.__version__} reads") from error
    except Image.DecompressionBombError as error:
        raise StrettoError(f"{where}: {error} {_SHRINK}") from error
    except Exception as error:  # foreign bytes make decoders raise anything: struct, zlib, index and value errors
        raise StrettoError(f"{where}: cannot be read as an image: {error}") from error


_SHRINK = f"Shrink it to at most {MAX_PIXELS} pixels; the model is shown at most model.max_pixels of them"


def resolve(image: Any, where: str, folder: Path | None = None) -> Image.Image | np.ndarray | bytes | Path:
    """What an image column may hold, brought to one of four forms. No file is opened; one is asked for its kind.

    Raises:
        StrettoError: another type, an address on a network, a broken data URI, or a path that is no file.
    """
    if isinstance(image, Image.Image | np.ndarray):
        return image
    if isinstance(image, Mapping) and {"bytes", "path"} & image.keys():
        if image.get("bytes") is None and image.get("path") is None:
            raise StrettoError(f"{where}: neither its bytes nor its path are there (both are None or missing)")
        image = image["bytes"] if image.get("bytes") is not None else image["path"]
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if not isinstance(image, str | PathLike):
        raise StrettoError(f"{where}: an image of type {type(image).__name__}; give {_FORMS}")
    text = os.fspath(image)
    if text[:5].lower() == "data:":
        return _data_uri(text, where)
    return _file(text, where, folder)


def _data_uri(text: str, where: str) -> bytes:
    head, comma, body = text.partition(",")
    try:
        if not comma:
            raise ValueError("it has no comma")
        if not head.lower().endswith(";base64"):
            return urllib.parse.unquote_to_bytes(body)
        return base64.b64decode("".join(urllib.parse.unquote(body).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise StrettoError(f"{where}: a data URI that cannot be decoded ({error})") from error


def _file(text: str, where: str, folder: Path | None) -> Path:
    scheme = _SCHEME.match(text)
    if scheme and scheme[1].lower() == "file":
        text = urllib.parse.unquote(urllib.parse.urlsplit(text).path)
    elif scheme:
        raise StrettoError(
            f"{where}: {_short(text)} is an address, and nothing is fetched while training; download it and give the "
            "path of the file"
        )
    if len(text) > LONGEST_PATH:
        raise StrettoError(
            f"{where}: a string of {len(text)} characters ({_short(text)}) is no path; encoded images begin with "
            "data:image/png;base64,"
        )
    path = Path(folder or "", text).expanduser() if text else Path()
    try:
        kind = os.stat(path).st_mode
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise StrettoError(f"{where}: cannot be read as an image: {path}: {why}") from error
    if not text or not stat.S_ISREG(kind):  # a pipe or a device would never end
        raise StrettoError(f"{where}: cannot be read as an image: {str(path) if text else ''!r} is no file")
    return path


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:79] + "…")


@cache
def _formats() -> tuple[str, ...]:
    """Every format that Pillow reads by itself: EPS would start Ghostscript, with a foreign program as its input."""
    Image.init()
    return tuple(name for name in Image.OPEN if name != "EPS")


class Images(Sequence[np.ndarray]):
    """The images of a row, as ``to_rgb`` gives them: decoded each time one is asked for, by whoever asks."""

    def __init__(self, given: Sequence[Any], row_id: str, folder: Path | None = None):
        self.given, self.row_id, self.folder = tuple(given), row_id, folder

    def __len__(self) -> int:
        return len(self.given)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> Images: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | Images:
        if isinstance(index, slice):
            return Images(self.given[index], self.row_id, self.folder)
        given = self.given[index]
        return to_rgb(given, f"row {self.row_id}, image {index % len(self.given)}", self.folder)

    def original(self, index: int) -> tuple[bytes, str]:
        """See ``originals``."""
        where = f"row {self.row_id}, image {index}"
        image = resolve(self.given[index], where, self.folder)
        if isinstance(image, Image.Image | np.ndarray):
            return _png(self[index])
        try:
            content = image if isinstance(image, bytes) else image.read_bytes()
            with Image.open(io.BytesIO(content), formats=_formats()) as opened:
                return content, (opened.format or "bin").lower()
        except OSError as error:
            raise StrettoError(f"{where}: cannot be read as an image: {error}") from error

    def files(self) -> list[Path]:
        """The files that images are read from; those inside the row have none. Raises StrettoError as ``to_rgb``."""
        found = [resolve(g, f"row {self.row_id}, image {i}", self.folder) for i, g in enumerate(self.given)]
        return [path for path in found if isinstance(path, Path)]


def originals(images: Sequence[np.ndarray]) -> list[tuple[bytes, str]]:
    """The files that images were given as, byte for byte, and the format of each (``png``, ``jpeg``); those that were
    given as pixels become PNG files of the same pixels.

    Raises:
        StrettoError: a file is gone, or is no image any more.
    """
    if not isinstance(images, Images):
        return [_png(pixels) for pixels in images]
    return [images.original(index) for index in range(len(images))]


def _png(pixels: np.ndarray) -> tuple[bytes, str]:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue(), "png"


def _check_size(size: tuple[int, int], where: str) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise StrettoError(f"{where}: {width} x {height} is {width * height} pixels. {_SHRINK}")


def _checked(array: np.ndarray, where: str) -> np.ndarray:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise StrettoError(
            f"{where}: an array {array.dtype} {list(array.shape)}; image arrays are uint8 [height, width, 3] "
            "with values 0 to 255"
        )
    return np.ascontiguousarray(array)


def _first_frame(image: Image.Image) -> Image.Image:
    """A copy of frame 0; the caller's object stays as it was."""
    frame = image.tell()
    if frame:
        image.seek(0)
    first = image.copy()
    if frame:
        image.seek(frame)
    return first


def _pixels(image: Image.Image, where: str) -> np.ndarray:
    """Of an image that may be changed. Made strip by strip: conversions need several times the memory of what they
    convert.
    """
    ImageOps.exif_transpose(image, in_place=True)
    convert = _rule(image, where)
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, STRIP_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        pixels[top:bottom] = convert(image.crop((0, top, width, bottom)))
    return pixels


def _rule(image: Image.Image, where: str) -> Callable[[Image.Image], np.ndarray]:
    """How each part of ``image`` becomes RGB values: pixel by pixel, so that parts are as the whole."""
    if image.mode in _GREY16:
        return _from_grey16
    if image.mode in _ALPHA or (image.mode in _KEYED and "transparency" in image.info):
        return _over_white
    if image.mode in _PLAIN:
        return lambda part: np.asarray(part.convert("RGB"))
    raise StrettoError(
        f"{where}: pictures of mode {image.mode!r} have no rule; convert to 8-bit RGB or grey, or to 16-bit grey"
    )


def _over_white(image: Image.Image) -> np.ndarray:
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return np.asarray(Image.alpha_composite(white, rgba).convert("RGB"))


def _from_grey16(image: Image.Image) -> np.ndarray:
    values = np.asarray(image).astype(np.uint32)
    grey = ((values * 255 + 32767) // 65535).astype(np.uint8)
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return grey[..., None]
