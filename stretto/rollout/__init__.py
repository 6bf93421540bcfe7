"""Rollout: engines, their scheduler and rewards. Never imports ``data``, ``plane`` or ``actor``."""
