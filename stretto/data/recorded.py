"""The prompts of a recording, with the images that they were recorded with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stretto.data.images import Images
from stretto.recording import RecordedPrompt, Recording


class RecordedSource:
    """Row r is the prompt of partition r // G, group r % G, where G is the number of groups of a partition."""

    def __init__(self, recording: Recording):
        self.recording = recording

    def __len__(self) -> int:
        return self.recording.partitions * self.recording.groups

    def __getitem__(self, row: int) -> RecordedPrompt:
        """Raises IndexError outside, StrettoError where the recording is damaged there."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {self.recording.path}, which has rows 0 to {len(self) - 1}")
        prompt, images = self.recording.prompt(*divmod(row, self.recording.groups))
        for path in images:
            self.recording.check_file(path)
        return replace(prompt, images=Images([path.absolute() for path in images], prompt.row_id))

    def fingerprint(self) -> str:
        """That of the recording; equal ones have equal prompts."""
        return self.recording.digest

    def facts(self) -> dict[str, Any]:
        """``recorded`` is what the manifest of the recorded run says of its data."""
        return {"rows": len(self), "fingerprint": self.fingerprint(), "recorded": self.recording.data}
