"""Live captions as a service: transports around one hub; nothing is computed in the event loop."""
