"""The trainer on Megatron-core: one model split over tensor, pipeline, context, expert and data-parallel ranks."""
