"""Data sets, image conversion and the processor runner. Never imports ``rollout``, ``plane`` or ``actor``."""
