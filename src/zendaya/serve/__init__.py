"""Live captions as a service: sockets and words around the one Session. Nothing is computed here, and nothing in the event loop."""
