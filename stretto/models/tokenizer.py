"""A small byte-level Qwen tokenizer and the chat template, for models that are built from a config block.

It is transformers' own Qwen2 tokenizer class with a vocabulary of the 256 bytes, a few whole words and Qwen's special
tokens, so that the demo needs no download. A model directory or hub id brings its own.
"""

from __future__ import annotations

from transformers import AddedToken, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

WORDS = ("user", "assistant", "system", "Sum")
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def build_tokenizer() -> Qwen2Tokenizer:
    """The tiny tokenizer; the same ids on every call."""
    vocab = {char: i for i, char in enumerate(bytes_to_unicode().values())}
    merges = []
    for word in WORDS:
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            vocab.setdefault(word[: end + 1], len(vocab))
    for token in SPECIAL_TOKENS:
        vocab[token] = len(vocab)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=merges, unk_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
