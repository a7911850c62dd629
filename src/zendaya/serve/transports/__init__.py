"""One file per protocol by which clients reach a server; `base` says what a transport is."""
