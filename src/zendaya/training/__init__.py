"""Training runs: decoders by a recipe, adapters of Whisper, and the gamma head."""
