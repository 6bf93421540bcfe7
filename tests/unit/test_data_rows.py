"""From a row to a prompt: columns, messages, places of images, answers, and what is refused (case A5)."""

from __future__ import annotations

import base64
import datetime
import decimal
from pathlib import Path

import numpy as np
import pytest
from data_case import PICTURE, encoded
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stretto.config import DataConfig
from stretto.data.images import Images
from stretto.data.rows import as_text, row_id, to_prompt
from stretto.data.tables import BadRow
from stretto.types import Prompt, StrettoError

PNG = encoded(PICTURE)
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
TEXT = {"type": "text", "text": "Sum?"}


def prompt(row: dict, folder: Path = Path("."), **options: object) -> Prompt:
    cfg = DataConfig(source="files", train_files=("x.jsonl",), **options)  # type: ignore[arg-type]
    return to_prompt({"answer": "1", **row}, cfg, "r7", "x.jsonl", folder)


def shape(found: Prompt) -> list[str]:
    """Parts of all messages: ``*`` for an image, else the text."""
    return ["*" if part["type"] == "image" else part["text"] for m in found.messages for part in m["content"]]


def refusal(row: dict, **options: object) -> str:
    with pytest.raises(BadRow) as caught:
        prompt(row, **options)
    return caught.value.reason


# Images (A5) -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    (tmp_path / "picture.png").write_bytes(PNG)
    return tmp_path


@pytest.mark.case("A5")
@pytest.mark.parametrize(
    "image",
    [
        "picture.png",
        "{folder}/picture.png",
        "file://{folder}/picture.png",
        PNG,
        bytearray(PNG),
        {"bytes": PNG, "path": None},
        {"bytes": PNG, "path": "no/such/file.png"},
        {"bytes": None, "path": "picture.png"},
        {"path": "picture.png"},
        {"bytes": PNG},
        URI,
        URI.replace("data:image/png", "DATA:image/PNG"),
        "data:image/png;base64," + "\n".join([URI[22:90], URI[90:]]),
        Image.fromarray(PICTURE),
        PICTURE,
        Path("picture.png"),
    ],
    ids=lambda image: type(image).__name__,
)
def test_one_picture_in_every_container_gives_equal_pixels(stored, image):
    if isinstance(image, str):
        image = image.replace("{folder}", str(stored))
    column = prompt({"prompt": "<image>Sum?", "images": [image]}, stored)
    own = prompt({"prompt": [{"role": "user", "content": [{"type": "image", "image": image}, TEXT]}]}, stored)
    for found in (column, own):
        (pixels,) = found.images
        assert pixels.dtype == np.uint8 and np.array_equal(pixels, PICTURE)
        assert shape(found) == ["*", "Sum?"]


@pytest.mark.case("A5")
@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.full((4, 4, 3), 0.5), r"array float64 \[4, 4, 3\]"),
        (np.full((4, 4, 3), 0.5, np.float32), "array float32"),
        (7, "type int"),
        (0.5, "type float"),
        (True, "type bool"),
        (None, "type NoneType"),
        ([[[0, 0, 0]]], "type list"),
        ({"image": "picture.png"}, "type dict"),
        ({"bytes": None, "path": None}, "neither its bytes nor its path"),
        ("", "cannot be read as an image: '' is no file"),
        (".", "is no file"),
        ("/dev/zero", "is no file"),
        ("a\0b", "null byte"),
        ("https://example.org/a.png", "nothing is fetched while training; download it"),
        ("S3://bucket/a.png", "nothing is fetched while training"),
        ("data:image/png;base64,@@@", "data URI that cannot be decoded"),
        ("data:image/png;base64", "it has no comma"),
        (base64.b64encode(b"x" * 4000).decode(), "a string of 5336 characters .* is no path"),
    ],
)
def test_what_is_no_image_is_refused_by_row_and_type(stored, image, words):
    found = prompt({"prompt": "<image>and<image>Sum?", "images": ["picture.png", image]}, stored)
    assert np.array_equal(found.images[0], PICTURE)
    with pytest.raises(StrettoError, match=f"^row r7, image 1: .*{words}"):
        found.images[1]


@pytest.mark.case("A5")
@pytest.mark.parametrize("images", [{"bytes": PNG, "path": None}, 7, 0.5, True, PICTURE, Image.fromarray(PICTURE)])
def test_a_bare_value_where_a_list_of_images_is_due_is_a_type_error(images):
    assert f"column 'images' is of type {type(images).__name__}" in refusal({"prompt": "<image>?", "images": images})


def test_one_image_as_text_or_bytes_needs_no_list(stored):
    for image in ("picture.png", PNG, URI):
        assert np.array_equal(prompt({"prompt": "Sum?", "images": image}, stored).images[0], PICTURE)


@pytest.mark.case("D3")
@pytest.mark.parametrize("row", [{"images": []}, {"images": None}, {}])
def test_an_empty_list_none_and_no_key_all_mean_no_image(row):
    found = prompt({"prompt": "Sum?", **row})
    assert len(found.images) == 0 and shape(found) == ["Sum?"]


def test_images_are_decoded_when_asked_for_and_not_kept(stored):
    images = prompt({"prompt": "<image>Sum?", "images": ["picture.png"]}, stored).images
    assert isinstance(images, Images) and len(images) == 1
    (stored / "picture.png").write_bytes(encoded(255 - PICTURE))
    assert np.array_equal(images[0], 255 - PICTURE)
    assert np.array_equal(images[-1], images[0]) and len(images[:0]) == 0
    with pytest.raises(IndexError):
        images[1]


# Places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count", "parts"),
    [
        ("<image>Sum?", 1, ["*", "Sum?"]),
        ("What is <image>?", 1, ["What is ", "*", "?"]),
        ("<image>\n<image>\nSum?", 2, ["*", "\n", "*", "\nSum?"]),
        ("<image><image>", 2, ["*", "*"]),
        ("Sum?", 1, ["*", "Sum?"]),
        ("Sum?", 3, ["*", "*", "*", "Sum?"]),
        ("", 1, ["*"]),
    ],
)
def test_a_string_prompt_has_its_images_where_it_says_or_first(text, count, parts):
    found = prompt({"prompt": text, "images": [PNG] * count})
    assert shape(found) == parts
    assert [m["role"] for m in found.messages] == ["user"]
    assert len(found.images) == count


@given(st.lists(st.text(alphabet="ab <image>", max_size=8), min_size=1, max_size=6))
def test_text_between_placeholders_survives_as_it_is(pieces):
    text = "<image>".join(pieces)
    count = text.count("<image>")
    if not count and not text.strip():
        return
    found = prompt({"prompt": text, "images": [PNG] * count})
    assert "".join("<image>" if p == "*" else p for p in shape(found)) == text


def test_own_images_and_those_of_the_column_come_in_the_order_of_their_places():
    other = 255 - PICTURE
    content = [
        {"type": "image"},
        TEXT,
        {"type": "image", "bytes": encoded(other), "path": None},
        {"type": "image_url", "image_url": {"url": URI}},
        {"type": "image_url", "image_url": URI},
        {"type": "image", "image": None, "text": None},
    ]
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": content}]
    found = prompt({"prompt": messages, "images": [PNG, encoded(other)]})
    assert shape(found) == ["Add.", "*", "Sum?", "*", "*", "*", "*"]
    expected = [PICTURE, other, PICTURE, PICTURE, other]
    assert all(np.array_equal(a, b) for a, b in zip(found.images, expected, strict=True))


def test_messages_without_a_place_get_the_images_in_the_first_user_message():
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "Sum?"}]
    found = prompt({"prompt": messages, "images": [PNG]})
    assert [[p["type"] for p in m["content"]] for m in found.messages] == [["text"], ["image", "text"]]
    parts = [{"role": "user", "content": [TEXT]}]
    assert "1 image(s) for 0 place(s)" in refusal({"prompt": parts, "images": [PNG]})


def test_further_keys_of_a_message_reach_the_template_and_empty_ones_do_not():
    found = prompt({"prompt": [{"role": "user", "content": "Sum?", "name": "Ada", "tool_calls": None}]})
    assert found.messages == ({"role": "user", "content": [TEXT], "name": "Ada"},)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "<image>?", "images": []}, "0 image(s) for 1 place(s)"),
        ({"prompt": "<image>?", "images": [PNG, PNG]}, "2 image(s) for 1 place(s)"),
        ({"prompt": "  "}, "the prompt is empty"),
        ({"prompt": []}, "has no message"),
        ({}, "the prompt (column 'prompt') is missing"),
        ({"prompt": 7}, "is of type int"),
        ({"prompt": ["Sum?"]}, "message 1 is of type str"),
        ({"prompt": [{"from": "human", "value": "Sum?"}]}, "with the keys from, value; a message is {role, content}"),
        ({"prompt": [{"role": "user", "content": None}]}, "message 1: its content is missing"),
        ({"prompt": [{"role": "user", "content": ["x"]}]}, "message 1, part 1 is of type str"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "of type 'video'"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "its text is missing"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a", "path": "b"}]}]},
            "names its image 2 times (image, path)",
        ),
        (
            {"prompt": [{"role": "user", "content": "3+5?"}, {"role": "assistant", "content": "8"}]},
            "its last message is the assistant's",
        ),
        ({"prompt": [{"role": "user", "content": "x", "extra": b"y"}]}, "more than text, numbers, lists and tables"),
        ({"prompt": "half \ud800"}, "half of a surrogate pair at 5"),
        ({"prompt": "x", "answer": None}, "no answer (column 'answer')"),
        ({"prompt": "x", "answer": "\udfff"}, "half of a surrogate pair"),
        ({"prompt": "x", "answer": float("nan")}, "of type float"),
        ({"prompt": "x", "answer": datetime.date(2026, 1, 2)}, "of type date"),
        ({"prompt": "x", "answer": b"8"}, "of type bytes"),
    ],
)
def test_a_row_that_can_not_be_used_says_why(row, words):
    assert words in refusal(row)


# Other columns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("8", "8"),
        ("", ""),
        (8, "8"),
        (2**70, "1180591620717411303424"),
        (0.1, "0.1"),
        (True, "true"),
        (["a", 1], '["a", 1]'),
        ({"größe": [None]}, '{"größe": [null]}'),
        (decimal.Decimal("1.50"), "1.50"),
    ],
)
def test_answers_are_text_numbers_and_json(value, text):
    assert prompt({"prompt": "x", "answer": value}).answer == text


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_as_text_is_the_same_number(value):
    assert type(value)(as_text(value, "answer")) == value


def test_no_answer_column_means_no_answer():
    assert prompt({"prompt": "x", "answer": None}, answer_column="").answer == ""


def test_source_and_id_columns():
    assert prompt({"prompt": "x"}).source == "x.jsonl"
    assert prompt({"prompt": "x", "set": "geo"}, source_column="set").source == "geo"
    assert prompt({"prompt": "x"}, source_column="set").source == ""
    cfg = DataConfig(id_column="id")
    assert row_id({"id": 17}, cfg) == "17" and row_id({"id": "a/ü"}, cfg) == "a/ü" and row_id({}, DataConfig()) is None
    for value in (None, "", 1.5, True, ["a"], "\ud800"):
        with pytest.raises(BadRow, match="id"):
            row_id({"id": value}, cfg)


def test_a_row_is_left_as_it_is():
    messages = [{"role": "user", "content": [{"type": "image"}, TEXT]}]
    row = {"prompt": messages, "images": [PNG], "answer": 3}
    before = repr(row)
    assert repr(prompt(row)) != "" and repr(prompt(row).messages) == repr(prompt(row).messages)
    assert repr(row) == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("<image>"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "image", "path", "url"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "image_url"])}, optional={"text": JSON, "image": JSON}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", ""])}, optional={"content": JSON | st.lists(PART)}
)


@given(
    st.fixed_dictionaries({}, optional={"prompt": JSON | st.lists(MESSAGE, max_size=3), "images": JSON, "answer": JSON})
)
def test_whatever_a_row_holds_it_is_a_prompt_or_a_bad_row(row):
    before = repr(row)
    cfg = DataConfig(source="files", train_files=("x.jsonl",), answer_column="answer")
    try:
        found = to_prompt(row, cfg, "r7", "x.jsonl", Path("."))
    except BadRow:
        found = None
    assert repr(row) == before
    if found is None:
        return
    places = [part for m in found.messages for part in m["content"] if part == {"type": "image"}]
    assert len(places) == len(found.images)
    for index in range(len(found.images)):
        with pytest.raises(StrettoError, match=f"row r7, image {index}: "):  # none of these is an image
            found.images[index]
