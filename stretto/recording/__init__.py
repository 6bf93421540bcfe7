"""Rollout partitions as they were produced, in a folder that pyarrow and safetensors alone can read.

``layout`` says where everything lies and which columns there are, ``writer`` fills the folder, ``reader`` reads it back
to the bit. docs/recording-format.md describes it for readers of other kinds.
"""

from stretto.recording.reader import RecordedGroup, RecordedPrompt, Recording, Timing

__all__ = ["RecordedGroup", "RecordedPrompt", "Recording", "Timing"]
