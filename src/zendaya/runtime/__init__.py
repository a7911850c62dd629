"""What is written, when and from what: the pipeline, the session, policies and engines."""
