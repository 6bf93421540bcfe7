"""Schedules: which samples are laid out together, on which rank, and what their losses are divided by."""

from stretto.schedule.packing import loss_normaliser, schedule_chunk

__all__ = ["loss_normaliser", "schedule_chunk"]
