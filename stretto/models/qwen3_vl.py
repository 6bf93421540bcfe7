"""The adapter of the Qwen3-VL family: everything that the engine must know about how it reads prompts and images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from stretto import compat
from stretto.models.batch import ModelInputs, PromptBatch, Responses, SampleBatch, SampleInput
from stretto.models.positions import mrope_positions
from stretto.types import ProcessedPrompt, Prompt, StrettoError

PARTS = {
    "projector": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
    "vision_tower": ("model.visual.",),
}
"""Beginnings of parameter names; the first part that one fits has it."""


class Qwen3VL:
    """Processing, layout and forward of ``Qwen3VLForConditionalGeneration``.

    Attributes:
        eos_ids: ids that end a response.
        suppressed_V: bool [V]; ids that a response never holds (vision and special ids, and ids past the tokenizer's),
            masked both where tokens are sampled and where their log-probs are taken.
    """

    def __init__(self, config: Any, tokenizer: Any, image_processor: Any, eos_ids: Sequence[int]):
        self.config = config
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.eos_ids = tuple(int(i) for i in eos_ids)
        self.merge_size: int = config.vision_config.spatial_merge_size
        self.vocab_size: int = config.text_config.vocab_size
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos_ids[0]
        self.suppressed_V = self._suppressed()
        self._image_token: str = tokenizer.convert_ids_to_tokens(config.image_token_id)

    def _suppressed(self) -> Tensor:
        suppressed = torch.zeros(self.vocab_size, dtype=torch.bool)
        suppressed[len(self.tokenizer) :] = True
        special = [i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special]
        config = self.config
        special += [config.image_token_id, config.video_token_id, config.vision_start_token_id]
        special += [config.vision_end_token_id]
        suppressed[torch.tensor(sorted(set(special)))] = True
        suppressed[list(self.eos_ids)] = False
        return suppressed

    def part(self, parameter: str) -> str:
        """``vision_tower``, ``projector`` (from image features to the language model, deepstack levels included) or
        ``language_model``: where a parameter of this name belongs.
        """
        return next((part for part, starts in PARTS.items() if parameter.startswith(starts)), "language_model")

    # Prompts -----------------------------------------------------------------------------------------------------

    def process(self, prompt: Prompt) -> ProcessedPrompt:
        """Chat template, tokenizer and image processor, once per prompt group.

        Raises:
            StrettoError: where images and image parts of the messages do not match in number; names the row.
        """
        parts = self._parts(prompt)
        pixel_values, grid = self._pixels(prompt.images)
        ids = self._prompt_ids(prompt, parts, (grid.prod(-1) // self.merge_size**2).tolist())
        types = (ids == self.config.image_token_id).astype(np.int8)
        return ProcessedPrompt(prompt_ids=ids, mm_token_type_ids=types, pixel_values=pixel_values, image_grid_thw=grid)

    def prompt_tokens(self, prompt: Prompt) -> int:
        """``len(process(prompt).prompt_ids)``, from the sizes of images alone: their pixels are not looked at.

        Raises:
            StrettoError: as ``process``.
        """
        parts = self._parts(prompt)
        return len(self._prompt_ids(prompt, parts, [n // self.merge_size**2 for n in self.patches(prompt.images)]))

    def patches(self, images: Sequence[np.ndarray]) -> list[int]:
        """Patches that each of ``images`` [height, width, 3] will have, from their sizes alone."""
        count = self.image_processor.get_number_of_image_patches
        return [int(count(image.shape[0], image.shape[1])) for image in images]

    def reads_as(self) -> str:
        """A name of how prompts are read: equal names, equal ``prompt_tokens`` and ``patches`` for every prompt."""
        tokenizer, images = self.tokenizer, self.image_processor
        sizes = (dict(images.size), images.patch_size, images.merge_size, self.merge_size)
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        told = repr((sizes, tokenizer.chat_template, vocabulary))
        return hashlib.sha256(told.encode()).hexdigest()

    def _parts(self, prompt: Prompt) -> list[str]:
        """The text of the chat template, cut at its images."""
        text = self.tokenizer.apply_chat_template(
            [dict(m) for m in prompt.messages], tokenize=False, add_generation_prompt=True
        )
        parts = text.split(self._image_token)
        if len(parts) - 1 != len(prompt.images):
            raise StrettoError(
                f"row {prompt.row_id}: {len(prompt.images)} image(s), but its messages have {len(parts) - 1} place(s) "
                f"for one; give each image one {{'type': 'image'}} part and keep {self._image_token!r} out of the text"
            )
        return parts

    def _prompt_ids(self, prompt: Prompt, parts: Sequence[str], tokens_per_image: Sequence[int]) -> np.ndarray:
        """Ids int32 [P] of the text with as many image tokens at each cut as the image there has features."""
        text = parts[0] + "".join(
            self._image_token * n + rest for n, rest in zip(tokens_per_image, parts[1:], strict=True)
        )
        ids = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        found = int((ids == self.config.image_token_id).sum())
        if found != sum(tokens_per_image):
            raise StrettoError(
                f"row {prompt.row_id}: {found} image tokens for {sum(tokens_per_image)} image features; keep special "
                f"tokens such as {self._image_token!r} out of the text"
            )
        return ids

    def _pixels(self, images: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        vision = self.config.vision_config
        if not images:
            width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            return np.zeros((0, width), np.float32), np.zeros((0, 3), np.int32)
        out = self.image_processor(images=list(images), return_tensors="np", input_data_format="channels_last")
        return (
            np.ascontiguousarray(out["pixel_values"], dtype=np.float32),
            np.asarray(out["image_grid_thw"], dtype=np.int32).reshape(-1, 3),
        )

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of response ids, special tokens left out; for rewards and people, never tokenised again."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def encode_answer(self, text: str) -> np.ndarray:
        """Response ids int32 of a supervised answer, EOS at its end."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray([*ids, self.eos_ids[0]], dtype=np.int32)

    # Layout ------------------------------------------------------------------------------------------------------

    def collate(
        self,
        samples: Sequence[SampleInput],
        device: torch.device | str = "cpu",
        layout: Literal["padded", "shared"] = "padded",
    ) -> SampleBatch:
        """The samples laid out for one forward, see ``SampleBatch``. Those that hold the same prompt object share its
        images, and in the ``shared`` layout the forward of the prompt.
        """
        return self._collate_shared(samples, device) if layout == "shared" else self._collate_padded(samples, device)

    def _collate_shared(self, samples: Sequence[SampleInput], device: torch.device | str) -> SampleBatch:
        distinct = {id(s.prompt): s.prompt for s in samples}
        rows = {key: row for row, key in enumerate(distinct)}
        prompt_row = np.array([rows[id(s.prompt)] for s in samples], np.int64)
        prompts = self.collate_prompts(list(distinct.values()), device)
        lengths = tuple(len(s.response_ids) for s in samples)
        width = max(*lengths, 1) - 1  # nothing is predicted from the last token
        ids = np.full((len(samples), width), self.pad_id, dtype=np.int64)
        predict: list[np.ndarray] = []
        for row, sample in enumerate(samples):
            ids[row, : max(lengths[row] - 1, 0)] = sample.response_ids[:-1]
            after = len(distinct) + row * width + np.arange(lengths[row] - 1)
            predict.append(np.concatenate([prompt_row[row : row + 1], after])[: lengths[row]])
        row_of = torch.from_numpy(prompt_row).to(device)
        positions = prompts.next_position[row_of][:, None] + torch.arange(width, device=device)
        mask = prompts.inputs.attention_mask
        if mask is not None:
            mask = torch.cat([mask[row_of], mask.new_ones(len(samples), width)], dim=1)
        response_ids = np.concatenate([s.response_ids for s in samples]).astype(np.int64)
        return SampleBatch(
            inputs=prompts.inputs,
            predict_index=torch.from_numpy(np.concatenate(predict)).to(device),
            response_ids_T=torch.from_numpy(response_ids).to(device),
            row_T=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)).to(device),
            lengths=lengths,
            responses=Responses(torch.from_numpy(ids).to(device), positions.expand(3, -1, -1), mask, row_of),
        )

    def _collate_padded(self, samples: Sequence[SampleInput], device: torch.device | str) -> SampleBatch:
        """Right padding needs no attention mask: causality alone keeps padding out of real tokens."""
        prompts = [s.prompt for s in samples]
        lengths = tuple(len(s.response_ids) for s in samples)
        width = max(len(s.prompt.prompt_ids) + len(s.response_ids) for s in samples)
        input_ids = np.full((len(samples), width), self.pad_id, dtype=np.int64)
        positions = np.zeros((3, len(samples), width), dtype=np.int64)
        predict: list[np.ndarray] = []
        known: dict[int, tuple[np.ndarray, int]] = {}
        for row, sample in enumerate(samples):
            p, r = len(sample.prompt.prompt_ids), lengths[row]
            input_ids[row, :p] = sample.prompt.prompt_ids
            input_ids[row, p : p + r] = sample.response_ids
            if id(sample.prompt) not in known:
                known[id(sample.prompt)] = self._positions(sample.prompt)
            prompt_positions, after = known[id(sample.prompt)]
            positions[:, row, :p] = prompt_positions
            positions[:, row, p:] = after + np.arange(width - p)
            predict.append(row * width + p - 1 + np.arange(r))
        inputs = self._inputs(input_ids, positions, None, prompts, device)
        response_ids = np.concatenate([s.response_ids for s in samples]).astype(np.int64)
        return SampleBatch(
            inputs=inputs,
            predict_index=torch.from_numpy(np.concatenate(predict)).to(device),
            response_ids_T=torch.from_numpy(response_ids).to(device),
            row_T=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)).to(device),
            lengths=lengths,
        )

    def collate_prompts(self, prompts: Sequence[ProcessedPrompt], device: torch.device | str = "cpu") -> PromptBatch:
        """Left-padded prompts for a prefill; the mask is None where all prompts are equally long."""
        width = max(len(p.prompt_ids) for p in prompts)
        input_ids = np.full((len(prompts), width), self.pad_id, dtype=np.int64)
        positions = np.zeros((3, len(prompts), width), dtype=np.int64)
        mask = np.zeros((len(prompts), width), dtype=np.int64)
        after = np.zeros(len(prompts), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            start = width - len(prompt.prompt_ids)
            input_ids[row, start:] = prompt.prompt_ids
            mask[row, start:] = 1
            positions[:, row, start:], after[row] = self._positions(prompt)
        attention_mask = None if mask.all() else torch.from_numpy(mask).to(device)
        inputs = self._inputs(input_ids, positions, attention_mask, prompts, device)
        return PromptBatch(inputs=inputs, next_position=torch.from_numpy(after).to(device))

    def _positions(self, prompt: ProcessedPrompt) -> tuple[np.ndarray, int]:
        return mrope_positions(prompt.mm_token_type_ids, prompt.image_grid_thw, self.merge_size)

    def _inputs(
        self,
        input_ids: np.ndarray,
        positions: np.ndarray,
        attention_mask: Tensor | None,
        prompts: Sequence[ProcessedPrompt],
        device: torch.device | str,
    ) -> ModelInputs:
        """Host arrays to device tensors; the pixels of distinct prompts once, in order of first appearance."""
        inputs = ModelInputs(
            input_ids=torch.from_numpy(input_ids).to(device),
            position_ids=torch.from_numpy(positions).to(device),
            attention_mask=attention_mask,
            pixel_values=None,
            image_grid_thw=None,
            image_token_index=None,
        )
        offsets: dict[int, int] = {}
        distinct: list[ProcessedPrompt] = []
        rows: list[np.ndarray] = []
        total = 0
        for prompt in prompts:
            tokens = int(prompt.mm_token_type_ids.sum())
            if tokens == 0:
                continue
            if id(prompt) not in offsets:
                offsets[id(prompt)] = total
                distinct.append(prompt)
                total += tokens
            rows.append(offsets[id(prompt)] + np.arange(tokens))
        if not distinct:
            return inputs
        pixels = np.concatenate([p.pixel_values for p in distinct])
        grid = np.concatenate([p.image_grid_thw for p in distinct]).astype(np.int64)
        return replace(
            inputs,
            pixel_values=torch.from_numpy(pixels).to(device),
            image_grid_thw=torch.from_numpy(grid).to(device),
            image_token_index=torch.from_numpy(np.concatenate(rows)).to(device),
        )

    # Forward -----------------------------------------------------------------------------------------------------

    def hidden_states(self, model: nn.Module, inputs: ModelInputs, cache: Any | None = None) -> Tensor:
        """Last hidden states [B, S, H]; fills ``cache`` where one is given.

        One vision forward over the distinct images, its rows repeated for every sample that shows them.
        """
        image = None
        if inputs.pixel_values is not None:
            assert inputs.image_grid_thw is not None and inputs.image_token_index is not None
            image = compat.image_features(model, inputs.pixel_values, inputs.image_grid_thw)
            image = image.select(inputs.image_token_index)
        return compat.last_hidden_state(
            model,
            inputs.input_ids,
            inputs.position_ids,
            inputs.attention_mask,
            image,
            self.config.image_token_id,
            cache,
        )

    def response_logits(self, model: nn.Module, batch: SampleBatch) -> Tensor:
        """Logits [T, V] that predict each response token, in row order; the vocabulary is projected only there."""
        if batch.responses is None:
            hidden = self.hidden_states(model, batch.inputs)
            flat = hidden.reshape(-1, hidden.shape[-1])
        else:
            flat = self._shared_hidden_states(model, batch.inputs, batch.responses)
        return self.logits(model, flat.index_select(0, batch.predict_index))

    def _shared_hidden_states(self, model: nn.Module, prompts: ModelInputs, responses: Responses) -> Tensor:
        """Hidden states [K, H] of the ``shared`` layout. The responses attend to the keys and values of their prompts,
        repeated for each of them; gradients flow back through both.
        """
        cache = DynamicCache(config=self.config.text_config)
        last = self.hidden_states(model, prompts, cache)[:, -1]
        if not responses.input_ids.shape[1]:
            return last
        for layer in cache.layers:
            layer.keys = layer.keys.index_select(0, responses.prompt_row)
            layer.values = layer.values.index_select(0, responses.prompt_row)
        inputs = ModelInputs(
            input_ids=responses.input_ids,
            position_ids=responses.position_ids,
            attention_mask=responses.attention_mask,
            pixel_values=None,
            image_grid_thw=None,
            image_token_index=None,
        )
        after = self.hidden_states(model, inputs, cache)
        return torch.cat([last, after.reshape(-1, after.shape[-1])])

    def logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of hidden states [..., H]."""
        return model.get_submodule("lm_head")(hidden)
