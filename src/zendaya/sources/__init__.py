"""Input and when it arrives: files, pipes, microphones, voice activity and simulated links."""
