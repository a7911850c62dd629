"""What models train on: corpora, and the feature stores made from them."""
