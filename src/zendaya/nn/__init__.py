"""The network: decoder, length heads, checkpoints, presets, adapters and Whisper's weights."""
