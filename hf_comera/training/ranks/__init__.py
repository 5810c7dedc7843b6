"""Rank adaptation: ranks are trained with the task, removed when dead, and end at a wanted size."""
