"""The one conversion of pictures to pixels: done once, before rollout engine and trainer, so that both see the same."""

from __future__ import annotations

import io
from os import PathLike

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from stretto.types import StrettoError

ImageLike = Image.Image | np.ndarray | bytes | str | PathLike[str]

_PLAIN = {"1", "L", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "P"}
_KEYED = {"1", "L", "RGB", "P"}  # modes that may declare one colour transparent
_ALPHA = {"LA", "La", "PA", "RGBA", "RGBa"}
_GREY16 = {"I;16", "I;16L", "I;16B", "I;16N"}


def to_rgb(image: ImageLike, where: str) -> np.ndarray:
    """``image`` as a uint8 RGB array [height, width, 3].

    Accepts a PIL image, encoded bytes, a path, or a uint8 array [height, width, 3]. Rules: EXIF orientation is applied;
    transparency shows white behind it; 16-bit grey is scaled to 8 bits (65535 becomes 255); palettes are looked up;
    CMYK, YCbCr and HSV are converted by Pillow's plain formulas, without colour profiles; an animation gives frame 0.

    Args:
        where: names the image in errors, such as ``row digits/train/000123, image 0``.

    Raises:
        StrettoError: not an image, cut short, missing, above Pillow's pixel limit, or of a mode, type or shape without
            a rule (32-bit integer and float pictures among them: their range is anyone's guess).
    """
    if isinstance(image, np.ndarray):
        return _checked(image, where)
    if isinstance(image, Image.Image):
        return _pixels(image, where)
    if not isinstance(image, bytes | str | PathLike):
        raise StrettoError(
            f"{where}: an image of type {type(image).__name__}; give encoded bytes, a path, a PIL image, or a uint8 "
            "array [height, width, 3]"
        )
    try:
        with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
            return _pixels(opened, where)
    except UnidentifiedImageError as error:
        raise StrettoError(f"{where}: not an image in any format that Pillow {Image.__version__} reads") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise StrettoError(f"{where}: cannot be read as an image: {error}") from error


def _checked(array: np.ndarray, where: str) -> np.ndarray:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise StrettoError(
            f"{where}: an array {array.dtype} {list(array.shape)}; image arrays are uint8 [height, width, 3] "
            "with values 0 to 255"
        )
    return np.ascontiguousarray(array)


def _pixels(image: Image.Image, where: str) -> np.ndarray:
    frame = image.tell()
    if frame:
        image.seek(0)
    first = image.copy()
    if frame:
        image.seek(frame)  # the caller's object stays as it was
    image = ImageOps.exif_transpose(first)
    if image.mode in _GREY16:
        return _from_grey16(image)
    if image.mode in _ALPHA or (image.mode in _KEYED and "transparency" in image.info):
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return np.array(Image.alpha_composite(white, rgba).convert("RGB"))
    if image.mode in _PLAIN:
        return np.array(image.convert("RGB"))
    raise StrettoError(
        f"{where}: pictures of mode {image.mode!r} have no rule; convert to 8-bit RGB or grey, or to 16-bit grey"
    )


def _from_grey16(image: Image.Image) -> np.ndarray:
    values = np.asarray(image).astype(np.uint32)
    grey = ((values * 255 + 32767) // 65535).astype(np.uint8)
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return np.repeat(grey[..., None], 3, axis=2)
