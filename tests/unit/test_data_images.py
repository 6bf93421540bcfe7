"""One conversion to pixels for every kind of picture (cases A1, A4, A5)."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stretto.data.images import to_rgb
from stretto.types import StrettoError

RED, WHITE, BLACK = (255, 0, 0), (255, 255, 255), (0, 0, 0)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(data: object) -> np.ndarray:
    out = to_rgb(data, "row 7")  # type: ignore[arg-type]
    assert out.dtype == np.uint8
    assert out.shape[2] == 3
    return out


def test_transparent_noise_is_white_and_the_opaque_square_keeps_its_colour() -> None:
    rgba = np.random.default_rng(0).integers(0, 256, (256, 256, 4), dtype=np.uint8)
    rgba[..., 3] = 0
    rgba[64:128, 64:128] = (255, 0, 0, 255)
    expected = np.full((256, 256, 3), 255, np.uint8)
    expected[64:128, 64:128] = RED
    assert (pixels(encoded(Image.fromarray(rgba), "PNG")) == expected).all()


def test_half_transparency_mixes_with_white() -> None:
    out = pixels(encoded(Image.new("RGBA", (2, 2), (255, 0, 0, 51)), "PNG"))  # 51/255 = a fifth of red over white
    assert out[0, 0].tolist() == [255, 204, 204]


def test_a_transparent_palette_colour_is_white() -> None:
    image = Image.new("P", (256, 256), 0)
    image.putpalette([0, 0, 0, 255, 255, 255, 0, 0, 255])
    image.paste(1, (10, 10, 20, 20))
    image.paste(2, (30, 30, 40, 40))
    out = pixels(encoded(image, "PNG", transparency=0))
    assert out[0, 0].tolist() == list(WHITE)
    assert out[15, 15].tolist() == list(WHITE)
    assert out[35, 35].tolist() == [0, 0, 255]
    assert pixels(encoded(image, "PNG"))[0, 0].tolist() == list(BLACK)


def test_16_bit_grey_keeps_256_levels() -> None:
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = np.rint(ramp.astype(np.float64) * 255 / 65535).astype(np.uint8)
    for kind in ("PNG", "TIFF"):
        out = pixels(encoded(Image.fromarray(ramp), kind))
        assert (out == expected[..., None]).all()
    assert len(np.unique(out)) == 256
    big_endian = Image.frombytes("I;16B", (256, 256), ramp.astype(">u2").tobytes())
    assert (pixels(big_endian) == expected[..., None]).all()


def test_a_transparent_16_bit_grey_is_white() -> None:
    image = Image.fromarray(np.array([[0, 1000, 65535]], np.uint16))
    out = pixels(encoded(image, "PNG", transparency=1000))
    assert out[0, :, 0].tolist() == [0, 255, 255]


def test_cmyk_red_is_red() -> None:
    out = pixels(encoded(Image.new("CMYK", (256, 256), (0, 255, 255, 0)), "JPEG", quality=95)).astype(int)
    assert abs(out - RED).max() <= 4


def test_grey_grey_with_alpha_and_bilevel() -> None:
    assert pixels(encoded(Image.new("L", (4, 4), 77), "PNG"))[0, 0].tolist() == [77, 77, 77]
    assert pixels(encoded(Image.new("LA", (4, 4), (77, 255)), "PNG"))[0, 0].tolist() == [77, 77, 77]
    assert pixels(encoded(Image.new("LA", (4, 4), (77, 0)), "PNG"))[0, 0].tolist() == list(WHITE)
    assert pixels(encoded(Image.new("1", (4, 4), 1), "PNG"))[0, 0].tolist() == list(WHITE)


@pytest.mark.case("A1")
def test_palettes_with_alpha_and_premultiplied_modes_show_white_behind() -> None:
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    with_alpha = palette.convert("PA")
    with_alpha.putpixel((1, 0), (1, 0))
    assert pixels(with_alpha)[0].tolist() == [[10, 20, 30], list(WHITE)]
    for mode in ("RGBa", "RGBX", "YCbCr", "HSV"):
        assert (
            pixels(Image.new("RGBA", (2, 2), (255, 255, 255, 255)).convert("RGB").convert(mode))[0, 0].tolist()
            == [255] * 3
        )


@pytest.mark.case("A1")
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "1", "P", "PA", "CMYK", "YCbCr", "HSV", "I;16"])
def test_a_picture_made_in_strips_is_the_picture_made_at_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(3).integers(0, 256, (37, 23, 4), dtype=np.uint8)
    if mode == "I;16":
        image = Image.fromarray(noise.view(np.uint16)[..., 0].copy())
        image.info["transparency"] = int(np.asarray(image)[20, 5])
    else:
        image = Image.fromarray(noise).convert("P" if mode == "PA" else mode)
        image = image.convert("PA") if mode == "PA" else image
        if mode in ("P", "L"):
            image.info["transparency"] = int(np.asarray(image)[20, 5])
    whole = pixels(image)
    monkeypatch.setattr("stretto.data.images.STRIP_PIXELS", 23 * 5)
    assert (pixels(image) == whole).all()
    if mode in ("I;16", "P", "L"):
        assert whole[20, 5].tolist() == list(WHITE)


def test_a_format_that_would_start_another_program_is_no_image() -> None:
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    with pytest.raises(StrettoError, match="not an image in any format"):
        to_rgb(eps, "row 7")


def test_every_container_of_one_picture_gives_the_same_pixels(tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    image = Image.fromarray(array)
    path = tmp_path / "picture.png"
    image.save(path)
    for given in (str(path), path, path.read_bytes(), image, array, array[:, ::-1][:, ::-1]):
        assert (pixels(given) == array).all()
    assert pixels(array[:, ::-1]).flags.c_contiguous


def test_an_animation_is_its_first_frame_wherever_it_stands() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, (0, 255, 0), (0, 0, 255))]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixels(data)[0, 0].tolist() == list(RED)
    opened = Image.open(io.BytesIO(data))
    opened.seek(2)
    assert pixels(opened)[0, 0].tolist() == list(RED)
    assert opened.tell() == 2


def test_exif_orientation_is_applied() -> None:
    image = Image.new("RGB", (4, 2), RED)
    image.putpixel((0, 0), (0, 0, 255))
    exif = image.getexif()
    exif[0x0112] = 6  # to be shown turned a quarter clockwise: the top left corner goes to the top right
    out = pixels(encoded(image, "PNG", exif=exif))
    assert out.shape == (4, 2, 3)
    assert out[0, 1].tolist() == [0, 0, 255]


def jpeg() -> bytes:
    noise = np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    return encoded(Image.fromarray(noise), "JPEG")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (jpeg()[: len(jpeg()) // 2], "truncated"),
        (b"", "not an image"),
        (b"<html><body>404</body></html>", "not an image"),
        ("no/such/file.png", "No such file"),
        (np.zeros((4, 4, 3), np.float32), r"float32 \[4, 4, 3\]"),
        (np.zeros((4, 4), np.uint8), r"uint8 \[4, 4\]"),
        (np.zeros((3, 4, 4), np.uint8), r"uint8 \[3, 4, 4\]"),
        (Image.new("F", (4, 4)), "mode 'F'"),
        (Image.new("I", (4, 4)), "mode 'I'"),
        (Image.new("LAB", (4, 4)), "mode 'LAB'"),
        ({"bytes": None, "path": None}, "neither its bytes nor its path"),
        (7, "type int"),
    ],
)
def test_what_has_no_rule_is_refused_with_its_row_and_reason(given: object, words: str) -> None:
    with pytest.raises(StrettoError, match=f"^row 7: .*{words}"):
        to_rgb(given, "row 7")  # type: ignore[arg-type]


def test_a_picture_above_the_pixel_limit_is_refused_before_it_is_decoded() -> None:
    bomb = bytearray(encoded(Image.new("1", (8, 8)), "PNG"))
    bomb[16:24] = (20000).to_bytes(4, "big") * 2  # the size in the header
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    with pytest.raises(StrettoError, match=r"row 7: .*400000000 pixels"):
        to_rgb(bytes(bomb), "row 7")
