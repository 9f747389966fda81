"""Problem sets, prompts and selection."""
